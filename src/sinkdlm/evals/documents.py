"""How likely a model finds documents: nats, bits per byte, perplexity, of each and of all, with standard errors."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinkdlm.data.inputs import Reader, count_bytes, find_sources, whole_text_of
from sinkdlm.errors import EvalError
from sinkdlm.evals.report import align
from sinkdlm.evals.requests import ROLLING, Key, Request, Response, Sheet
from sinkdlm.evals.settings import Settings

_TASK = "documents"


def read_documents(path: Path, *, field: str = "text", documents: str = "file") -> tuple[list[str], int]:
    """Texts of a file or folder (a whole .txt, its lines or paragraphs, a field of rows), and how many rows have none."""
    if not path.exists():
        raise EvalError(f"{path}: no such file or folder")
    sources = find_sources([str(path)])
    found, n_left_out = [], 0
    for _, _, row in Reader(sources, documents=documents).rows([field]):
        text = whole_text_of(row, field)
        if text is None:
            n_left_out += 1
            continue
        count_bytes(text, row.place)
        found.append(text)
    if not found:
        raise EvalError(f"{path}: holds no text to score")
    return found, n_left_out


def sheet_of(texts: Sequence[str], settings: Settings, seed: int) -> Sheet:
    return Sheet([Request(ROLLING, _TASK, number, 0, text) for number, text in enumerate(texts)], {_TASK: settings}, seed)


def report(texts: Sequence[str], responses: Mapping[Key, Response], n_left_out: int = 0) -> dict[str, Any]:
    """What --json prints. kind: "bound" (perplexity is then an upper bound) or "likelihood"; of neither where tokens are unknown.

    draws: masks; of a likelihood, for which nothing is drawn, forwards. left_out: rows without text.
    """
    rows = [
        (-float(response.value or 0.0), response.stderr, len(text.encode()), response.n_tokens, response.draws, response.unknown)
        for text, response in zip(texts, responses.values(), strict=True)
    ]
    nats, errors, *counts = zip(*rows, strict=True)
    total = _line(sum(nats), math.hypot(*errors), *map(sum, counts))  # documents draw noise of their own
    documents = [_line(*row) for row in rows]
    return {"kind": next(iter(responses.values())).kind, "documents": documents, "total": total, "left_out": n_left_out}


def _line(nats: float, stderr: float, n_bytes: int, n_tokens: int, draws: int, unknown: int) -> dict[str, Any]:
    bits = n_bytes * math.log(2)
    return {
        "nats": nats,
        "stderr": stderr,
        "bits_per_byte": nats / bits,
        "bits_per_byte_stderr": stderr / bits,
        "perplexity": math.exp(nats / n_tokens) if nats / n_tokens < 700 else math.inf,
        "bytes": n_bytes,
        "tokens": n_tokens,
        "draws": draws,
        "unknown": unknown,
    }


def draw_table(found: Mapping[str, Any]) -> str:
    names = ["nats", "stderr", "bits_per_byte", "bits_per_byte_stderr", "perplexity", "bytes", "tokens"]
    names += ["draws"] if found["kind"] != "likelihood" else []  # for which nothing is drawn
    rows = [["document", *(name.removeprefix("bits_per_byte_").replace("_per_", "/") for name in names)]]
    for name, line in [*enumerate(found["documents"]), ("total", found["total"])]:
        rows.append([str(name), *(f"{line[key]:.4f}" if isinstance(line[key], float) else str(line[key]) for key in names)])
    return "\n".join([align(rows), *(f"note  {note}" for note in _notes(found))])


def _notes(found: Mapping[str, Any]) -> list[str]:
    unknown, n_tokens = found["total"]["unknown"], found["total"]["tokens"]
    notes = []
    if unknown:  # a text that is partly lost is not the one that was scored
        share = f"{unknown} of {n_tokens} tokens stand for characters that the tokenizer does not have"
        notes.append(f"{share}: these are lost, and values are neither bounds nor comparable")
    elif found["kind"] == "bound":
        notes.append("nats, bits per byte and perplexity are upper bounds")
    if found["left_out"]:
        notes.append(f"{found['left_out']} rows without text were left out")
    return notes
