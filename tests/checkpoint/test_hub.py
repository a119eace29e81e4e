"""Models of the Hugging Face hub: fetched by name, pushed with a card. A server on loopback stands for the hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants

from evaluated import save_model
from hubs import TOKEN
from sinkdlm import ModelConfig, load
from sinkdlm.checkpoint.directory import read_provenance
from sinkdlm.checkpoint.hub import HubName, find, name_of, push, read_name
from sinkdlm.errors import UserError
from sinkdlm.interop import load_any, open_source
from sinkdlm.interop.tokenizer import read_tokenizer_at

NAME = "someone/small"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # the client's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def files(folder):
    own = {file.name: file.read_bytes() for file in folder.iterdir()}
    code = {"modeling.py": b"raise SystemExit\n", "pytorch_model.bin": b"\x80"}
    return {**own, **code, "README.md": b"# Small\n", "a/config.json": b"{}"}


def told(do, *args, **more):
    """The message of the mistake, which is one line."""
    with pytest.raises(UserError) as failure:
        do(*args, **more)
    (line,) = str(failure.value).splitlines()
    return line


@pytest.mark.parametrize(("text", "name"), [
    ("hf://a/b", HubName("a/b")),
    ("hf://a-1/b.c@v1.0", HubName("a-1/b.c", "v1.0")),
    ("hf://a/b@refs%2Fpr%2F1/c/d.gguf", HubName("a/b", "refs/pr/1", "c/d.gguf")),
    ("hf://datasets/a/b", HubName("a/b")),
    (Path("hf://a/b"), HubName("a/b")),
    ("a/b", None),
    (Path("/a/b"), None),
])  # fmt: skip
def test_names(text, name):
    assert read_name(text) == name


@pytest.mark.parametrize("text", ["hf://a", "hf://a/b@", "hf://a/b c", "hf://../b", "hf://a/b@1@2"])
def test_what_is_no_name_is_told(text):
    assert "write hf://owner/name" in told(read_name, text)


def test_a_fetched_model_is_the_one_that_was_saved(hub, folder, files, tmp_path):
    sha = hub.add(NAME, files)
    found = find(f"hf://{NAME}")
    assert name_of(found) == f"hf://{NAME}@{sha}"
    assert {file.name: file.read_bytes() for file in found.iterdir()} == {
        name: content for name, content in files.items() if name in {file.name for file in folder.iterdir()}
    }
    ours, theirs = load(folder), load(f"hf://{NAME}")
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    assert load_any(f"hf://{NAME}", {"gate": "elementwise"}).provenance["parent"]["path"] == f"hf://{NAME}@{sha}"
    assert not {"modeling.py", "pytorch_model.bin", "README.md"} & set(hub.fetched())
    assert len([path for _, path, _ in hub.asked if "/a/" in path]) == 0


def test_a_revision_is_its_own(hub, files):
    hub.add(NAME, files)
    other = {**files, "config.json": files["config.json"].replace(b'"n_layers": 2', b'"n_layers": 3')}
    sha = hub.add(NAME, other, branch="deep")
    for revision in ("deep", sha):
        assert json.loads((find(f"hf://{NAME}@{revision}") / "config.json").read_bytes())["n_layers"] == 3
    assert json.loads((find(f"hf://{NAME}") / "config.json").read_bytes())["n_layers"] == 2
    assert told(find, f"hf://{NAME}@none") == f"hf://{NAME}@none: has no such revision"


def test_a_tokenizer_comes_without_the_weights(hub, files, folder):
    hub.add(NAME, files)
    assert len(read_tokenizer_at(f"hf://{NAME}")) == len(read_tokenizer_at(folder))
    assert "tokenizer.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()


def test_a_file_is_fetched_alone(hub, files):
    hub.add(NAME, {"some/x.gguf": b"GGUF", "some/y.gguf": b"", "z.safetensors": b"", "x.pth": b""})
    assert find(f"hf://{NAME}/some/x.gguf").read_bytes() == b"GGUF"
    assert hub.fetched() == ["x.gguf"]
    assert "not a whole GGUF file" in told(open_source, f"hf://{NAME}/some/x.gguf")
    assert "only a .safetensors or a .gguf file" in told(find, f"hf://{NAME}/x.pth")
    assert told(find, f"hf://{NAME}/w.gguf") == f"hf://{NAME}/w.gguf: has no such file"
    assert "has no model.safetensors, and pickles are not fetched" in told(find, f"hf://{NAME}")


def test_a_cut_download_goes_on_where_it_ended(hub, files):
    """Within a call, and after one that failed."""
    size = len(files["model.safetensors"])
    for cut in (5000, -5000):  # a negative one takes the hub down
        name = f"someone/cut{abs(cut) + cut}"
        hub.add(name, {**files, "provenance.json": b"{}"})
        hub.asked.clear()
        hub.cut = cut
        if cut < 0:
            assert "the hub cannot be reached" in told(find, f"hf://{name}")
            hub.down = False
        assert (find(f"hf://{name}") / "model.safetensors").read_bytes() == files["model.safetensors"]
        parts = [range_ for method, path, range_ in hub.asked if method == "GET" and path.endswith(".safetensors")]
        starts = {int(part.removeprefix("bytes=").rstrip("-")) for part in parts[1:] if part}
        assert parts[0] is None
        assert starts == {4096}, (parts, size)


def test_the_cache_serves_without_a_network(hub, files, monkeypatch):
    hub.add(NAME, files)
    found = find(f"hf://{NAME}")
    hub.asked.clear()
    assert find(f"hf://{NAME}") == found
    assert not hub.fetched()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    close_session()
    assert find(f"hf://{NAME}") == found
    line = told(find, "hf://someone/other")
    assert line.startswith("hf://someone/other: not complete in the cache, and the hub cannot be reached (")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find(f"hf://{NAME}") == found
    assert told(find, "hf://someone/other").endswith("not complete in the cache, and HF_HUB_OFFLINE forbids fetching; unset it")
    assert "HF_HUB_OFFLINE" in told(find, "hf://someone/other/x.gguf")


def test_a_token_opens_what_is_private(hub, files, monkeypatch):
    hub.add(NAME, files, private=True)
    hub.add("someone/gated", files, gated=True)
    line = told(find, f"hf://{NAME}")
    assert line == f"hf://{NAME}: not there, or not for everybody, and no token is set: hf auth login, or set HF_TOKEN"
    assert "no token is set" in told(find, "hf://someone/none")
    assert "is gated: ask for access" in told(find, "hf://someone/gated")
    monkeypatch.setenv("HF_TOKEN", "another")
    assert "the token that is set does not allow it" in told(find, f"hf://{NAME}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (find(f"hf://{NAME}") / "model.safetensors").is_file()


def test_a_bare_name_says_how_a_name_is_written():
    cure = "a model of the hub is hf://Qwen/Qwen2.5-0.5B"
    for read in (load, open_source):
        assert told(read, "Qwen/Qwen2.5-0.5B").endswith(cure)
        assert "hf://" not in told(read, "/Qwen/Qwen2.5-0.5B")


# -- push ----------------------------------------------------------------------------------------------------------------------


def evaluated(run, provenance, **more):
    """A run's folder of results, as `sinkdlm eval --out` writes it."""
    table = [{"task": "arc_easy", "metric": "acc", "value": 0.5125, "stderr": 0.01, "items": 200}]
    own = {"table": table, "settings": {"arc_easy": {"estimator": "exact_k", "draws": 128}}, "seed": 0}
    own |= {"environment": {"harness": "lm-eval 0.4.13"}, "model": {"weights": provenance["weights"], **more}}
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text(json.dumps({"results": {}, "sinkdlm": own}))


def test_what_is_pushed_comes_back(hub, token, tmp_path, command_line):
    run = tmp_path / "run"
    model = save_model(run / "model")
    (run / "recipe.toml").write_text("")
    (model / "notes.md").write_text("not for others")
    evaluated(run, read_provenance(model))
    status, out, err = command_line("push", run, NAME)
    assert (status, err) == (0, "")
    assert out.startswith(f"pushed {model} to hf://{NAME}: {hub.url}/{NAME}/commit/")
    there = hub.models[NAME].commits[hub.models[NAME].branches["main"]]
    pushed = {file.name for file in model.iterdir()} - {"notes.md"}
    assert set(there) == pushed | {"README.md", ".gitattributes"}
    found = find(f"hf://{NAME}")
    assert {name: (found / name).read_bytes() for name in pushed} == {name: (model / name).read_bytes() for name in pushed}
    assert len(hub.large) == 1  # the weights went by LFS
    card = there["README.md"].decode()
    assert card.startswith("---\nlibrary_name: sinkdlm\n")
    assert "| arc_easy | acc | 0.5125 | 0.0100 | 200 |" in card
    assert "By lm-eval 0.4.13, seed 0. arc_easy: exact_k, 128 draws." in card
    assert f"sinkdlm sample hf://{NAME}" in card
    assert f'AutoModelForMaskedLM.from_pretrained("{NAME}")\nfound = model.diffusion_generate(' in card
    assert "| sinks | 1, isolated, front |" in card


def test_a_card_tells_only_what_is_recorded(hub, token, folder, tmp_path, command_line):
    evaluated(tmp_path, {"weights": {"model.safetensors": "of another model"}})
    model = save_model(tmp_path / "model", n_sinks=0)
    assert command_line("push", model, NAME)[0] == 0
    card = hub.models[NAME].commits[hub.models[NAME].branches["main"]]["README.md"].decode()
    assert "None is recorded." in card
    assert "0.5125" not in card
    assert "| sinks | none |" in card


def test_a_second_push_replaces_the_first(hub, token, tmp_path):
    """Weights of other names go, and a card goes only if it is ours."""
    model, name = save_model(tmp_path / "model"), HubName(NAME)
    parts = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "other.safetensors": b""}
    hub.add(NAME, {**parts, "README.md": b"# My words\n"})
    push(model, name, "---\n---\nours")
    there = hub.models[NAME].commits[hub.models[NAME].branches["main"]]
    assert not {*parts} - {"other.safetensors"} & set(there)
    assert (there["README.md"], "other.safetensors" in there) == (b"# My words\n", True)
    from sinkdlm.checkpoint.card import write_card

    config = ModelConfig(vocab_size=8, n_layers=1, n_heads=1, d_model=8, d_ff=8, mask_id=8, context_length=8)
    first = write_card(NAME, config, {"parent": {"path": "hf://a/b@c0ffee"}}, [])
    assert "\nbase_model: a/b\n" in first
    push(model, HubName("someone/twice"), first)
    push(model, HubName("someone/twice"), first + "more")
    assert hub.models["someone/twice"].commits[hub.models["someone/twice"].branches["main"]]["README.md"].endswith(b"more")


def test_a_branch_and_a_private_repository(hub, token, folder, command_line):
    assert command_line("push", folder, NAME, "--private", "--revision", "trial")[0] == 0
    repo = hub.models[NAME]
    assert repo.private
    assert set(repo.commits[repo.branches["main"]]) == {".gitattributes"}
    assert (find(f"hf://{NAME}@trial") / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    hub.add("someone/public", {"README.md": b""})
    status, _, err = command_line("push", folder, "someone/public", "--private")
    assert status == 2
    assert "exists and is public; make it private on its page, or leave out --private" in err
    assert set(hub.models["someone/public"].commits[hub.models["someone/public"].branches["main"]]) == {"README.md"}


@pytest.mark.parametrize(("name", "words", "line"), [
    (NAME, "no token", "not there, or not for everybody, and no token is set: hf auth login, or set HF_TOKEN"),
    (NAME, "no network", "the hub cannot be reached ("),
    ("small", "", "not a name of the hub; write hf://owner/name"),
    (f"{NAME}@trial", "", "write owner/name; --revision names a branch"),
])  # fmt: skip
def test_a_push_that_cannot_be_is_told_in_a_line(hub, folder, command_line, monkeypatch, name, words, line):
    if words == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    status, out, err = command_line("push", folder, name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert line in err
    assert not hub.models


def test_only_a_checkpoint_is_pushed(hub, token, tmp_path, command_line):
    for made in ("config.json", "nothing"):
        (tmp_path / made).write_text('{"model_type": "llama"}')
    status, _, err = command_line("push", tmp_path, NAME)
    assert (status, err.count("\n")) == (2, 1)
    assert "convert it first" in err
    assert not hub.models
