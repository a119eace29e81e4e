"""Requests and responses as text: the neutral format between a machine with the harness and one without.

A sheet is a list of requests with the settings to answer them. On disk it is JSON lines: a header, and a line for each request.
Requests hold text, which is tokenised where it is answered. Knows no harness and no model.

A file of responses is appended batch by batch, so that a kill loses at most the batch under way. Its header names the requests,
the model and the settings; a run that resumes must match it.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from sinkdlm.checkpoint.durable import write_text
from sinkdlm.errors import EvalError, check_regular
from sinkdlm.evals.settings import Settings

LOGLIKELIHOOD, ROLLING, GENERATE = "loglikelihood", "loglikelihood_rolling", "generate_until"
KINDS = (LOGLIKELIHOOD, ROLLING, GENERATE)
VERSION = 1
# Header fields that must match to resume a file -> how the error names a mismatch.
_SAME = {
    "requests": "answers to other requests or settings",
    "arithmetic": "answers in another precision",
    "checkpoint": "answers of another model",
    "tokenizer": "answers with another tokenizer",
}


class Key(NamedTuple):
    """Names a request within its sheet. The requests of one document are the options of a question."""

    task: str
    doc: int
    option: int
    repeat: int


@dataclass(frozen=True)
class Request:
    """context: the prompt; of a rolling request, the text. generation: as the harness's gen_kwargs.

    divisors: metric -> what divides an option's value before the options of a question are compared.
    """

    kind: str
    task: str
    doc: int
    index: int
    context: str
    continuation: str = ""
    repeat: int = 0
    generation: Mapping[str, Any] = field(default_factory=dict)
    divisors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EvalError(f"{self.place}: kind = {self.kind!r}: allowed: {', '.join(KINDS)}")
        if self.kind == LOGLIKELIHOOD and not self.continuation:
            raise EvalError(f"{self.place}: the continuation is empty: there is nothing to score")
        if self.kind == ROLLING and not self.context:
            raise EvalError(f"{self.place}: the text is empty: there is nothing to score")

    @property
    def key(self) -> Key:
        return Key(self.task, self.doc, self.index, self.repeat)

    @property
    def place(self) -> str:
        return f"{self.task}: document {self.doc}, request {self.index}"

    @property
    def question(self) -> tuple[str, int]:
        return self.task, self.doc

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", {})}


def number_of(*parts: object) -> int:
    """Hash a name to the number that keys its noise, the same in any batch, order and process."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclass(frozen=True)
class Sheet:
    """settings: by task. about: what made the sheet, for whoever reads the answers."""

    requests: Sequence[Request]
    settings: Mapping[str, Settings]
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.requests:
            raise EvalError("there is no request to answer")
        seen: set[Key] = set()
        for request in self.requests:
            if request.key in seen:
                raise EvalError(f"{request.place}: asked twice")
            seen.add(request.key)
            if request.task not in self.settings:
                raise EvalError(f"{request.place}: the file of requests has no settings for this task")

    @property
    def _lines(self) -> list[dict[str, Any]]:
        settings = {task: one.to_dict() for task, one in sorted(self.settings.items())}
        told = {"count": len(self.requests), "seed": self.seed, "settings": settings, "about": dict(self.about)}
        return [{"sinkdlm": "requests", "version": VERSION, **told}, *(request.to_dict() for request in self.requests)]

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides the answers."""
        found = hashlib.sha256()
        for line in self._lines:
            found.update(json.dumps({**line, "about": None}, sort_keys=True).encode())
        return found.hexdigest()

    def write(self, path: Path) -> None:
        write_text(path, b"".join(map(_encode, self._lines)).decode(), EvalError)

    @classmethod
    def read(cls, path: Path) -> "Sheet":
        header, lines = parse(path, read_bytes(path), "requests")
        try:
            settings = {task: Settings.of(values, task) for task, values in header["settings"].items()}
            requests = [Request(**line) for line in lines]
            if len(requests) != header["count"]:
                raise EvalError(f"{path}: {len(requests)} of {header['count']} requests: the file was cut; write it again")
            return cls(requests, settings, header["seed"], header["about"])
        except (KeyError, TypeError, AttributeError) as failure:
            told = f"not a file of requests: {failure}; write it again with --write-requests"
            raise EvalError(f"{path}: {told}") from None


def read_bytes(path: Path) -> bytes:
    check_regular(path, EvalError)
    try:
        return path.read_bytes()
    except OSError as failure:
        raise EvalError(f"{path}: cannot be read: {failure.strerror}") from None


def parse(path: Path, content: bytes, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the further lines of a file of requests or responses."""
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(content.splitlines() or [b"{}"], start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise EvalError(f"{path}: line {number} is not JSON") from None
        if not isinstance(value, dict):
            raise EvalError(f"{path}: line {number} is not a JSON object")
        objects.append(value)
        if objects[0].get("sinkdlm") != kind:
            raise EvalError(f"{path}: not a file of {kind}; its first line must say so")
        if objects[0].get("version") != VERSION:
            raise EvalError(f"{path}: {kind} of version {objects[0].get('version')}, and this sinkdlm reads {VERSION}")
    return objects[0], objects[1:]


def by_question(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests of one document together, documents in their first order."""
    found: dict[tuple[str, int], list[Request]] = {}
    for request in requests:
        found.setdefault(request.question, []).append(request)
    return list(found.values())


@dataclass(frozen=True)
class Response:
    """value: log p, a bound on it or a score, as `kind` says, in nats. texts: a generated answer, one for each stage.

    truncated: tokens that did not fit the model and were cut from the left. unknown: tokens that stand for characters that the
    tokenizer does not have. full_draws: draws without adaptive stopping.
    """

    task: str
    doc: int
    index: int
    repeat: int = 0
    value: float | None = None
    stderr: float = 0.0
    kind: str = ""
    greedy: bool | None = None
    texts: Sequence[str] = ()
    draws: int = 0
    full_draws: int = 0
    forwards: int = 0
    n_tokens: int = 0
    truncated: int = 0
    unknown: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        return Key(self.task, self.doc, self.index, self.repeat)

    @property
    def text(self) -> str:
        return self.texts[-1] if self.texts else ""


def header_of(sheet: Sheet, checkpoint: str, tokenizer: str, arithmetic: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Build the header of a file of responses. checkpoint, tokenizer: fingerprints. model: facts to show."""
    return {
        "sinkdlm": "responses",
        "version": VERSION,
        "requests": sheet.digest,
        "checkpoint": checkpoint,
        "tokenizer": tokenizer,
        "arithmetic": arithmetic,
        "model": dict(model),
        "seed": sheet.seed,
        "settings": {task: one.to_dict() for task, one in sheet.settings.items()},
        "about": dict(sheet.about),
    }


class Journal:
    """A file of responses, made or resumed. Without a path, responses stay in memory."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.done: dict[Key, Response] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._open(path, header)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, header: Mapping[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvalError(f"{path}: another run is writing it; wait for it, or choose another --out") from None
        except OSError as failure:
            raise EvalError(f"{path}: cannot be written: {failure.strerror}") from None
        found, self.done, size = _read_whole_lines(path, _encode(header))
        if found is not None:
            for name, other in _SAME.items():
                if found.get(name) != header[name]:
                    raise EvalError(f"{path}: has {other}; choose another --out, or remove it")
        self._file.truncate(size)  # not before we know that the file is ours
        if found is None:
            self._write([header])

    def append(self, responses: Sequence[Response]) -> None:
        """Append responses; they are on disk when this returns."""
        self.done |= {response.key: response for response in responses}
        self._write([asdict(response) for response in responses])

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(b"".join(map(_encode, lines)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as failure:
            raise EvalError(f"{self._file.name}: writing failed: {failure.strerror}; the same command resumes") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """A run that was refused before its first answer leaves no file, which would bind the next run to its settings."""
        if kind is not None and self._file is not None and not self.done:
            Path(self._file.name).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _encode(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


def _read_whole_lines(path: Path, begun: bytes = b"") -> tuple[dict[str, Any] | None, dict[Key, Response], int]:
    """Read the header, the responses, and the number of bytes up to the end of the last whole line.

    begun: our first line, which may have been cut off; any other text without a line end is not ours."""
    content = read_bytes(path)
    size = content.rfind(b"\n") + 1  # a kill may have cut the last line
    if not size and begun.startswith(content):
        return None, {}, 0
    header, lines = parse(path, content[:size] or content, "responses")
    try:
        responses = [Response(**line) for line in lines]
    except TypeError as failure:
        raise EvalError(f"{path}: not a file of responses: {failure}") from None
    return header, {response.key: response for response in responses}, size


def read_answers(path: Path) -> tuple[dict[str, Any], dict[Key, Response]]:
    """The header and every response of a finished or unfinished file."""
    header, responses, _ = _read_whole_lines(path)
    if header is None:
        raise EvalError(f"{path}: is empty")
    return header, responses
