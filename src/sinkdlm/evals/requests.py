"""What is asked of a model, as text: the neutral form between a harness and a machine that has none.

A sheet is a list of requests and how they are to be answered. On disk it is JSON lines: a header, and a line for each request.
Requests hold text, which is tokenised where it is answered. Knows no harness and no model.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.checkpoint.durable import replace_text
from sinkdlm.errors import EvalError
from sinkdlm.evals.settings import Settings

LOGLIKELIHOOD, ROLLING, GENERATE = "loglikelihood", "loglikelihood_rolling", "generate_until"
KINDS = (LOGLIKELIHOOD, ROLLING, GENERATE)
VERSION = 1


class Key(NamedTuple):
    """Tells requests of a sheet apart. Those of one document are options of a question."""

    task: str
    doc: int
    option: int
    repeat: int


@dataclass(frozen=True)
class Request:
    """context: the prompt; of a rolling request, the text. generation: as the harness's gen_kwargs.

    divisors: metric -> what the option's value is divided by before options are compared, where they are options of a question.
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
    """A number for a name: what keys noise, so that it is the same in any batch, order and process."""
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
                raise EvalError(f"{request.place}: the sheet has no settings for this task")

    @property
    def _lines(self) -> list[dict[str, Any]]:
        settings = {task: one.to_dict() for task, one in sorted(self.settings.items())}
        told = {"count": len(self.requests), "seed": self.seed, "settings": settings, "about": dict(self.about)}
        return [{"sinkdlm": "requests", "version": VERSION, **told}, *(request.to_dict() for request in self.requests)]

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the answers."""
        found = hashlib.sha256()
        for line in self._lines:
            found.update(json.dumps({**line, "about": None}, sort_keys=True).encode())
        return found.hexdigest()

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
            replace_text(path, text)
        except OSError as failure:
            raise EvalError(f"{path}: cannot be written: {failure.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> "Sheet":
        header, lines = parse(path, read_bytes(path), "requests")
        try:
            settings = {task: Settings.of(values, task) for task, values in header["settings"].items()}
            requests = [Request(**line) for line in lines]
            if len(requests) != header["count"]:
                raise EvalError(f"{path}: {len(requests)} of {header['count']} requests: it was cut; write it again")
            return cls(requests, settings, header["seed"], header["about"])
        except (KeyError, TypeError, AttributeError) as failure:
            told = f"not as a file of requests should be: {failure}; write it again with --write-requests"
            raise EvalError(f"{path}: {told}") from None


def read_bytes(path: Path) -> bytes:
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
        except ValueError:
            raise EvalError(f"{path}: line {number} is no JSON") from None
        if not isinstance(value, dict):
            raise EvalError(f"{path}: line {number} is no JSON object")
        objects.append(value)
        if objects[0].get("sinkdlm") != kind:
            raise EvalError(f"{path}: no file of {kind}; its first line should say so")
        if objects[0].get("version") != VERSION:
            raise EvalError(f"{path}: {kind} of version {objects[0].get('version')}, and this sinkdlm reads {VERSION}")
    return objects[0], objects[1:]


def by_question(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests of one document together, documents in their first order."""
    found: dict[tuple[str, int], list[Request]] = {}
    for request in requests:
        found.setdefault(request.question, []).append(request)
    return list(found.values())
