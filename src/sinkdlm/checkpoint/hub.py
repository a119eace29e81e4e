"""Read names of the Hugging Face hub, `hf://owner/name[@revision][/FILE]`: fetch what they name, push checkpoints.

huggingface_hub owns the cache, the tokens and offline mode. Only files of data are fetched, never code or a pickle.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from sinkdlm import __version__
from sinkdlm.checkpoint.card import CARD, SIGN
from sinkdlm.errors import CheckpointError, first_line

_WORD = r"\w[\w.-]*"
# A Path of such a name has lost the second slash. A revision with a slash is quoted, as in refs%2Fpr%2F1.
_NAME = re.compile(rf"hf:/+(?:datasets/)?({_WORD}/{_WORD})(?:@([^/@]+))?(?:/(.+))?", re.ASCII)
_CACHED = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/([^/]+)(/.+)?")
_WEIGHTS, _OTHERS = ("model*.safetensors", "model.safetensors.index.json"), ("*.json", "*.txt", "*.model", "*.jinja")
_FILES = (".safetensors", ".gguf")
_FORMS = "write hf://owner/name, hf://owner/name@REVISION or hf://owner/name/FILE.gguf"


class HubName(NamedTuple):
    """What a name says. file: one file of a repository that holds several models."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision, file = (f"{mark}{part}" if part else "" for mark, part in (("@", self.revision), ("/", self.file)))
        return f"hf://{self.repo}{revision}{file}"


def read_name(name: str | Path) -> HubName | None:
    """Read a name of the hub; None for anything else."""
    if not str(name).startswith("hf:/"):
        return None
    found = _NAME.fullmatch(str(name))
    if found is None:
        raise CheckpointError(f"{name}: not a name of the hub; {_FORMS}")
    repo, revision, file = found.groups()
    return HubName(repo, None if revision is None else unquote(revision), file)


def find(path: str | Path, *, weights: bool = True) -> Path:
    """Return a path as it is; for a name of the hub, the path of its files in the cache, fetched where needed."""
    name = read_name(path)
    if name is None:
        return Path(path)
    if name.file is not None and not name.file.endswith(_FILES):
        raise CheckpointError(f"{name}: only a .safetensors or a .gguf file is fetched by its name")
    from huggingface_hub import hf_hub_download, snapshot_download

    with _failures_told(name):
        if name.file is not None:
            return Path(hf_hub_download(name.repo, name.file, revision=name.revision))
        wanted = [*_OTHERS, *(_WEIGHTS if weights else ())]
        folder = Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{name}: has no model.safetensors, and pickles are not fetched; name one file: {name}/FILE.gguf")
    return folder


def name_of(path: Path) -> str:
    """The name of what lies in the hub's cache, with its commit; any other path as it is."""
    found = _CACHED.fullmatch(path.as_posix())
    return str(path) if found is None else f"hf://{found[1]}/{found[2]}@{found[3]}{found[4] or ''}"


def hint(path: Path) -> str:
    """What to say of a path that does not exist and looks like the name of a model."""
    looks = not path.is_absolute() and re.fullmatch(f"{_WORD}/{_WORD}", str(path), re.ASCII)
    return f"; a model of the hub is hf://{path}" if looks else ""


def push(folder: Path, name: HubName, card: str, *, private: bool = False) -> str:
    """Upload a checkpoint with its card as one commit, and return the commit's address.

    Weights of an earlier push go if these have other names. A card that somebody else wrote stays.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, revision = HfApi(), name.revision
    with _failures_told(name):
        api.create_repo(name.repo, private=private or None, exist_ok=True)
        if private and not api.model_info(name.repo).private:
            raise CheckpointError(f"{name}: exists and is public; make it private on its page, or leave out --private")
        if revision is not None:
            api.create_branch(name.repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(name.repo, revision=revision)
        files = {file.name: file for pattern in (*_WEIGHTS, *_OTHERS, "*.py") for file in sorted(folder.glob(pattern))}
        made = [CommitOperationAdd(file, path) for file, path in files.items()]
        if CARD not in there or SIGN in Path(api.hf_hub_download(name.repo, CARD, revision=revision)).read_text("utf-8"):
            made.append(CommitOperationAdd(CARD, card.encode()))
        stale = [file for file in there if file not in files and any(fnmatch(file, pattern) for pattern in _WEIGHTS)]
        operations = [*made, *map(CommitOperationDelete, stale)]
        told = f"Push with sinkdlm {__version__}"
        return str(api.create_commit(name.repo, operations, commit_message=told, revision=revision).commit_url)


@contextmanager
def _failures_told(name: HubName) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:  # whatever the client and the network raise
        raise CheckpointError(f"{name}: {_reason(failure)}") from failure


def _reason(failure: Exception) -> str:
    from huggingface_hub import constants, errors, get_token

    if type(failure) is RuntimeError and isinstance(failure.__cause__, Exception):  # how an upload fails
        failure = failure.__cause__
    status = getattr(getattr(failure, "response", None), "status_code", None)
    if isinstance(failure, errors.RevisionNotFoundError):
        return "has no such revision"
    if isinstance(failure, errors.GatedRepoError):
        return "is gated: ask for access on its page of the hub, then log in with: hf auth login"
    if status in (401, 403) or isinstance(failure, errors.RepositoryNotFoundError):
        token = "no token is set" if get_token() is None else "the token that is set does not allow it"
        return f"not there, or not for everybody, and {token}: hf auth login, or set HF_TOKEN"
    if status == 404:
        return "has no such file"
    if constants.HF_HUB_OFFLINE and isinstance(failure, errors.LocalEntryNotFoundError | ConnectionError):
        return "not complete in the cache, and HF_HUB_OFFLINE forbids fetching; unset it"
    lacks = "not complete in the cache, and " if isinstance(failure, errors.LocalEntryNotFoundError) else ""
    if lacks or type(failure).__module__.startswith("httpx"):
        why = first_line(failure.__cause__ if lacks and isinstance(failure.__cause__, Exception) else failure)
        return f"{lacks}the hub cannot be reached ({why}); try again, which goes on where it ended"
    return first_line(failure)
