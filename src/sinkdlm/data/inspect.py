"""Check and describe a set of token shards: every size and checksum, counts, settings, and samples as text."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.data.display import ByteBar, counted
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.shards import INDEX, SPLITS, Split, document_ends, open_split
from sinkdlm.data.writing import read_json
from sinkdlm.errors import DataError, panics_raised

_WINDOW = 1 << 16  # tokens searched for the ends of a document
_UNBOUND = 128  # tokens shown where a format does not say where documents end
_SHOWN = 2000  # characters of a sample


def read_set(folder: str | Path, tokenizer: Any = None, *, samples: int = 2) -> dict[str, Any]:
    """Check and describe a set, ours, datatrove's or SMDM's packed one. tokenizer: for the samples, instead of the set's own."""
    folder = Path(folder)
    splits = {split: opened for split in SPLITS if (opened := open_split(folder, split)).shards or split == "train"}
    train, own = splits["train"], (folder / INDEX).exists()
    index = read_json(folder / INDEX) if own else {}
    _verify(splits)
    decode, notes = _decoder(folder, index, tokenizer)
    shown = {split: [] if decode is None else _samples(opened, decode, samples) for split, opened in splits.items()}
    return {
        "folder": str(folder),
        "format": "sinkdlm" if own else "datatrove" if train.shards[0].path.suffix == ".ds" else "packed (LITPKDS)",
        **{name: getattr(train, name) for name in ("kind", "eos_id", "tokenizer")},
        "settings": index.get("settings"),
        "splits": {split: _facts(opened) for split, opened in splits.items()},
        "samples": [{"split": split, **sample} for split, found in shown.items() for sample in found],
        "notes": notes,
    }


def _facts(split: Split) -> dict[str, Any]:
    return {
        "tokens": split.n_tokens,
        "documents": split.n_documents,
        "shards": len(split.shards),
        "dtype": split.shards[0].dtype.name if split.shards else None,
        "highest_id": split.highest_id,
        "checksums": "compared" if split.shards and all(shard.sha256 for shard in split.shards) else "none recorded",
    }


def _verify(splits: dict[str, Split]) -> None:
    """Compare checksums, and check that shards hold whole documents."""
    total = sum(shard.path.stat().st_size for split in splits.values() for shard in split.shards if shard.sha256)
    sizes = (size for split in splits.values() for size in split.verify())
    with ByteBar("checking", total) as display:
        for done in itertools.accumulate(sizes):
            display.update(done, done)
    for split in splits.values():
        if split.kind == "examples":
            split.example_rows()
        for shard, end in zip(split.shards, split.starts[1:], strict=True):
            if split.eos_id is not None and shard.n_tokens and int(split.read(int(end) - 1, int(end))[0]) != split.eos_id:
                raise DataError(f"{shard.path}: does not end with the end-of-document id {split.eos_id}; prepare the set again")


def _decoder(folder: Path, index: dict[str, Any], tokenizer: Any) -> tuple[Any, list[str]]:
    if tokenizer is not None:
        expected = index.get("tokenizer", {}).get("vocabulary_sha256")
        other = expected is not None and mark_tokenizer(tokenizer)["vocabulary_sha256"] != expected
        return tokenizer.backend_tokenizer, ["the given tokenizer is not the one of this set"] if other else []
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        return None, ["no tokenizer in the folder: --tokenizer T shows samples as text"]
    from tokenizers import Tokenizer

    try:
        with panics_raised():
            return Tokenizer.from_file(str(path)), []
    except Exception as failure:  # the library raises bare Exceptions
        raise DataError(f"{path}: cannot be read: {failure}; --tokenizer gives another") from None


def _samples(split: Split, decode: Any, n: int) -> list[dict[str, Any]]:
    """Return samples spread evenly over the split."""

    def text(start: int, stop: int) -> str:
        try:
            return str(decode.decode(split.read(start, stop).tolist(), skip_special_tokens=False))[:_SHOWN]
        except (OverflowError, TypeError) as failure:
            raise DataError(f"{split.folder}: tokens {start} to {stop} are not ids of the tokenizer: {failure}") from None

    if split.kind == "examples":
        rows = split.example_rows()
        n = min(n, len(rows))
        chosen = [rows[len(rows) * k // n] for k in range(n)]
        return [
            {"prompt": text(start, start + prompt), "response": text(start + prompt, start + total)}
            for start, prompt, total in chosen
        ]
    found = []
    for k in range(n if split.n_tokens else 0):
        start, stop = _document_at(split, split.n_tokens * k // n)
        found.append({"start": start, "text": text(start, stop)})
    return [sample for place, sample in enumerate(found) if sample not in found[:place]]


def _document_at(split: Split, position: int) -> tuple[int, int]:
    """Start and end of the document that holds a token; where ends are unknown, of a few tokens from there on."""
    if split.eos_id is None:
        shard = int(np.searchsorted(split.starts, position, side="right")) - 1
        begin, ends = int(split.starts[shard]), document_ends(split.shards[shard].path)
        if not len(ends):
            return position, min(position + _UNBOUND, split.n_tokens)
        at = int(np.searchsorted(ends, position - begin, side="right"))
        return begin + (int(ends[at - 1]) if at else 0), begin + int(ends[at])
    begin, end = max(0, position - _WINDOW), min(position + _WINDOW, split.n_tokens)
    before = np.flatnonzero(split.read(begin, position) == split.eos_id)
    after = np.flatnonzero(split.read(position, end) == split.eos_id)
    return begin + (int(before[-1]) + 1 if len(before) else 0), position + int(after[0]) + 1 if len(after) else end


def describe(found: dict[str, Any]) -> str:
    """Format what `read_set` found for people: one fact a line, samples at the end."""
    what = "example" if found["kind"] == "examples" else "document"
    lines = [f"{found['folder']}: {found['format']}, {found['kind']}"]
    for split, part in found["splits"].items():
        count = counted(part["documents"], what) if part["documents"] is not None else f"unknown number of {what}s"
        highest = f", ids up to {part['highest_id']}" if part["highest_id"] is not None else ""
        shards = f"{counted(part['shards'], 'shard')} of {part['dtype']}{highest}, checksums {part['checksums']}"
        lines.append(f"  {split:11s}{part['tokens']:,} tokens, {count}, {shards}")
    if found["tokenizer"]:
        rows = f"{found['tokenizer']['rows']:,} rows (model.vocab_size)"
        lines.append(f"  tokenizer  {found['tokenizer']['source']}, {rows}, end-of-document {found['eos_id']}")
    for key, value in (found["settings"] or {}).items():
        if key not in ("tokenizer", "inputs", "eos_id") and value is not None:
            lines.append(f"  {key:14s}{value}")
    if found["settings"]:
        inputs = found["settings"]["inputs"]
        lines.append(f"  inputs        {', '.join(inputs['names'])} ({inputs['sources']} sources, {inputs['bytes']:,} bytes)")
    lines += [f"  note: {note}" for note in found["notes"]]
    for sample in found["samples"]:
        parts = {key: value for key, value in sample.items() if key not in ("split", "start")}
        lines.append(f"\n-- {sample['split']}" + (f", token {sample['start']}" if "start" in sample else ""))
        lines += [f"{key}: {value}" if len(parts) > 1 else value for key, value in parts.items()]
    return "\n".join(lines)
