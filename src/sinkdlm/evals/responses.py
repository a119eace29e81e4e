"""Answers, and the file that they are kept in: appended batch by batch, so that a kill loses at most the batch under way.

The first line says what is answered, by what and how; a run that goes on must be the same in all of it. Knows no model.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from sinkdlm.errors import EvalError
from sinkdlm.evals.requests import VERSION, Key, Sheet, parse, read_bytes

# What must be equal for a file to be gone on with -> what to say otherwise.
_SAME = {
    "requests": "answers to other requests or settings",
    "arithmetic": "answers in another precision",
    "checkpoint": "answers of another model",
    "tokenizer": "answers with another tokenizer",
}


@dataclass(frozen=True)
class Response:
    """value: log p, a bound on it or a score, as `kind` says, in nats; of a generated answer, `texts`: one for each stage.

    truncated: tokens that did not fit the model and were cut from the left. unknown: that stand for what the tokenizer does not
    have. full_draws: without adaptive draws.
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
    """checkpoint, tokenizer: fingerprints. model: facts of it, to be shown."""
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
    """The file of a run that answers: made, or opened to go on. Without a path answers are held in memory alone."""

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
            raise EvalError(f"{path}: another run is writing there") from None
        except OSError as failure:
            raise EvalError(f"{path}: cannot be written: {failure.strerror}") from None
        found, self.done, size = _read_whole_lines(path, _encode(header))
        if found is not None:
            for name, other in _SAME.items():
                if found.get(name) != header[name]:
                    raise EvalError(f"{path}: has {other}; choose another --out, or remove it")
        self._file.truncate(size)  # not before it is known that the file is ours
        if found is None:
            self._write([header])

    def append(self, responses: Sequence[Response]) -> None:
        """On disk when it returns."""
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
            raise EvalError(f"{self._file.name}: writing failed: {failure.strerror}; run the same command again to go on") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _encode(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


def _read_whole_lines(path: Path, begun: bytes = b"") -> tuple[dict[str, Any] | None, dict[Key, Response], int]:
    """The header, the responses, and the bytes up to the end of the last whole line.

    begun: a first line that may have been cut off while it was written; any other text without an end is not ours."""
    content = read_bytes(path)
    size = content.rfind(b"\n") + 1  # a line without its end was being written when something ended the run
    if not size and begun.startswith(content):
        return None, {}, 0
    header, lines = parse(path, content[:size] or content, "responses")
    try:
        responses = [Response(**line) for line in lines]
    except TypeError as failure:
        raise EvalError(f"{path}: not as a file of responses should be: {failure}") from None
    return header, {response.key: response for response in responses}, size


def read_answers(path: Path) -> tuple[dict[str, Any], dict[Key, Response]]:
    """The header and every response of a finished or unfinished file."""
    header, responses, _ = _read_whole_lines(path)
    if header is None:
        raise EvalError(f"{path}: is empty")
    return header, responses
