"""Score documents: nats, bits per byte and perplexity, of each and of all, with standard errors."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.checkpoint.hub import read_name
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.inputs import Reader, count_bytes, find_sources, whole_text_of
from sinkdlm.data.shards import INDEX, open_split
from sinkdlm.errors import EvalError
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.report import align
from sinkdlm.evals.requests import ROLLING, Key, Request, Response, Sheet, number_of
from sinkdlm.evals.settings import Settings, settings_for
from sinkdlm.text.prompts import begin, check_bos

PREPARED_TOKENS = 1 << 15  # of a prepared set that `score` reads, at most
_TASK = "documents"


def read_documents(
    path: Path,
    *,
    field: str = "text",
    documents: str = "file",
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
) -> tuple[list[str], int]:
    """Read the texts of a file, a folder or a data set of the hub (a whole .txt, its lines or paragraphs, a field of rows), the
    first `limit` of them; count rows without text."""
    named = read_name(path)
    if named is None and not path.exists():
        raise EvalError(f"{path}: no such file or folder")
    sources = find_sources([str(named or path)], split=split, config=subset)
    found: list[str] = []
    n_left_out = 0
    for _, _, row in Reader(sources, documents=documents).rows([field]):
        if len(found) == limit:
            break
        text = whole_text_of(row, field)
        if text is None:
            n_left_out += 1
            continue
        count_bytes(text, row.place)
        found.append(text)
    if not found:
        raise EvalError(f"{named or path}: holds no text to score")
    return found, n_left_out


def encode_documents(texts: Sequence[str], tokenizer: Any, bos: bool | None) -> list[tuple[list[int], int, int]]:
    """(tokens, 0, noise number) of each text, as `score` encodes and numbers them; texts without a token are left out."""
    settings = scoring(tokenizer, {}, bos)
    ids = TextEncoder(tokenizer, settings.bos).encode_documents(texts)
    numbers = [number_of(*request.key) for request in sheet_of(texts, settings, 0).requests]
    return [(ids[text], 0, number) for text, number in zip(texts, numbers, strict=True) if ids[text]]


def prefix_of(tokenizer: Any, bos: bool | None) -> list[int]:
    """What stands before a document: BOS or EOS, or nothing where the tokenizer has neither."""
    encoder = TextEncoder(tokenizer, scoring(tokenizer, {}, bos).bos)
    return [] if encoder.prefix_id is None else [encoder.prefix_id]


def is_prepared(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_prepared(folder: Path, tokenizer: Any, most: int) -> list[tuple[list[int], int, int]]:
    """(tokens, tokens that are given, noise number) of the validation documents or examples of a set, up to `most` tokens."""
    split = open_split(folder, "validation")
    mark = (split.tokenizer or {}).get("vocabulary_sha256")
    if mark not in (None, mark_tokenizer(tokenizer)["vocabulary_sha256"]):
        raise EvalError(f"{folder}: was prepared with another tokenizer than the model's; give its texts instead")
    if not split.n_tokens:
        raise EvalError(f"{folder}: has no validation split; prepare it with --validation above 0, or give texts")
    if split.kind == "examples":
        spans = [(start, start + total, n_given) for start, n_given, total in split.example_rows().tolist()]
    else:
        stop = min(most, split.n_tokens)
        ends = (np.flatnonzero(split.read(0, stop) == split.eos_id) + 1).tolist() if split.eos_id is not None else []
        spans = [(start, end, 0) for start, end in itertools.pairwise([0, *ends, stop])]
    found, n_read = [], 0
    for number, (start, end, n_given) in enumerate(spans):
        ids = split.read(start, end).tolist()
        first = int(ids[:1] == [tokenizer.bos_token_id])  # the prefix brings its own
        last = len(ids) - int(ids[-1:] == [split.eos_id])
        if last > max(first, n_given) and n_read < most:
            found.append((ids[first:last], max(0, n_given - first), number))
            n_read += last - first
    return found


def validation_texts(folder: Path, tokenizer: Any) -> list[str]:
    """The first validation documents of a prepared set, for `score`."""
    if open_split(folder, "validation").kind == "examples":
        raise EvalError(f"{folder}: holds examples, not documents; compare two models on it, or score a file of texts")
    return [tokenizer.decode(ids) for ids, _, _ in read_prepared(folder, tokenizer, PREPARED_TOKENS)]


def scoring(tokenizer: Any, changes: Mapping[str, Any], bos: bool | None = None) -> Settings:
    """The settings that score documents: these begin as prompts of `sample` do."""
    check_bos(tokenizer, bos)
    return settings_for("", {**changes, "greedy": False, "bos": bool(begin(tokenizer, [], bos))})


def sheet_of(texts: Sequence[str], settings: Settings, seed: int) -> Sheet:
    return Sheet([Request(ROLLING, _TASK, number, 0, text) for number, text in enumerate(texts)], {_TASK: settings}, seed)


def report(texts: Sequence[str], responses: Mapping[Key, Response], n_left_out: int = 0) -> dict[str, Any]:
    """Build what --json prints. kind: "bound" (perplexity is an upper bound) or "likelihood"; neither holds with unknown tokens.

    draws: masks; forwards where kind is "likelihood", which draws nothing. left_out: rows without text.
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
    names += ["draws"] if found["kind"] != "likelihood" else []  # a likelihood draws nothing
    rows = [["document", *(name.removeprefix("bits_per_byte_").replace("_per_", "/") for name in names)]]
    for name, line in [*enumerate(found["documents"]), ("total", found["total"])]:
        rows.append([str(name), *(f"{line[key]:.4f}" if isinstance(line[key], float) else str(line[key]) for key in names)])
    return "\n".join([align(rows), *(f"note  {note}" for note in _notes(found))])


def _notes(found: Mapping[str, Any]) -> list[str]:
    unknown, n_tokens = found["total"]["unknown"], found["total"]["tokens"]
    notes = []
    if unknown:  # part of the text was not scored
        share = f"{unknown} of {n_tokens} tokens stand for characters that the tokenizer does not have"
        notes.append(f"{share}: these are lost, and values are neither bounds nor comparable")
    elif found["kind"] == "bound":
        notes.append("nats, bits per byte and perplexity are upper bounds")
    if found["left_out"]:
        notes.append(f"{found['left_out']} rows without text were left out")
    return notes
