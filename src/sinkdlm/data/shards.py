"""Read token shards from disk, ours, datatrove's or SMDM's packed files, as one flat run of tokens.

Owns the formats for reading. Opening a split checks sizes alone; checksums are compared on request. Must not know rows, order or
tokenizers.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.checkpoint.durable import is_plain_name
from sinkdlm.errors import DataError, check_regular

INDEX = "index.json"
FORMAT, VERSION = "sinkdlm-tokens", 1
SPLITS = ("train", "validation")
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_ROW_DTYPE = np.dtype("<u4")
_OPEN_SHARDS = 64
# SMDM's packed files: magic, version, dtype code, tokens in the file.
_PACKED_MAGIC = b"LITPKDS"
_PACKED_HEADER = np.dtype([("magic", "S7"), ("version", "<u8"), ("code", "u1"), ("tokens", "<u8")])
_PACKED_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Shard:
    """One file of flat tokens. `sha256` is None where the format records none."""

    path: Path
    n_tokens: int
    dtype: np.dtype[Any]
    offset: int = 0
    sha256: str | None = None
    rows: Path | None = None
    rows_sha256: str | None = None


class _Descriptor(int):
    """Of an open file, which is closed when nobody reads it any more."""

    def __del__(self) -> None:
        os.close(self)


@dataclass(eq=False)
class Split:
    """The shards of one split as one run of tokens: `read(start, stop)` crosses from shard to shard."""

    folder: Path
    shards: list[Shard]
    fingerprint: str
    kind: str = "text"
    n_documents: int | None = None
    eos_id: int | None = None
    highest_id: int | None = None
    tokenizer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        shards = self.shards
        self.starts = np.concatenate([[0], np.cumsum([shard.n_tokens for shard in shards], dtype=np.int64)])
        self.n_tokens = int(self.starts[-1])
        for shard in shards:
            _check_size(shard)
        # Opened on first use: a large set has more shards than a process may hold open.
        self._open = functools.lru_cache(_OPEN_SHARDS)(lambda number: _Descriptor(os.open(shards[number].path, os.O_RDONLY)))

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Tokens start..stop-1 of the split."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.n_tokens}")
        if start == stop:
            return _NOTHING
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = first + 1 if stop <= self.starts[first + 1] else int(np.searchsorted(self.starts, stop))
        begins = enumerate(self.starts[first:last].tolist(), start=first)
        pieces = [self._read_shard(number, max(0, start - begin), stop - begin) for number, begin in begins]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read_shard(self, number: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Read instead of mapped: a mapped file that is cut while a run reads it ends the process without a word."""
        shard = self.shards[number]
        found = np.empty(min(stop, shard.n_tokens) - start, shard.dtype)
        rest, place = found.view(np.uint8).data, shard.offset + start * shard.dtype.itemsize
        try:
            while len(rest):
                done = os.preadv(self._open(number), [rest], place)
                if not done:
                    raise DataError(f"{shard.path}: cut while it was read: no byte {place}; restore it or prepare the set again")
                rest, place = rest[done:], place + done
        except OSError as failure:
            raise DataError(f"{shard.path}: cannot be read: {failure.strerror}; restore it or prepare the set again") from None
        return found

    def example_rows(self) -> np.ndarray[Any, Any]:
        """(examples, 3) int64 of a split of examples: start, prompt tokens, all tokens."""
        parts = []
        for shard, begin in zip(self.shards, self.starts[:-1], strict=True):
            assert shard.rows is not None
            pairs = _read_rows(shard.rows)
            ends = np.cumsum(pairs[:, 1])
            if len(pairs) == 0 or int(ends[-1]) != shard.n_tokens or bool((pairs[:, 0] >= pairs[:, 1]).any()):
                raise DataError(f"{shard.rows}: does not fit {shard.path.name}; prepare the set again")
            parts.append(np.stack([begin + ends - pairs[:, 1], pairs[:, 0], pairs[:, 1]], axis=1))
        return np.concatenate(parts) if parts else np.zeros((0, 3), np.int64)

    def verify(self) -> Iterator[int]:
        """Compare every checksum; yield the bytes of each file as it is done."""
        for shard in self.shards:
            for path, expected in ((shard.path, shard.sha256), (shard.rows, shard.rows_sha256)):
                if path is None or expected is None:
                    continue
                try:
                    with path.open("rb") as file:
                        found = hashlib.file_digest(file, "sha256").hexdigest()
                except OSError as failure:
                    raise DataError(f"{path}: cannot be read: {failure.strerror}; restore it or prepare the set again") from None
                if found != expected:
                    raise DataError(f"{path}: damaged: its SHA-256 is not the one in {INDEX}; prepare the set again or restore it")
                yield path.stat().st_size


_NOTHING = np.zeros(0, np.uint16)


def open_split(folder: str | Path, split: str = "train") -> Split:
    """Open a split of our format, of datatrove's `*.ds` files or of SMDM's packed `*.bin` files (these two have `train` only)."""
    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"{folder}: a file, not a folder of token shards; make one with: sinkdlm data prepare {folder} ...")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder; make one with: sinkdlm data prepare TEXT --tokenizer T --out {folder}"
            f" (or, for the nano recipes, sinkdlm data example --out {folder})"
        )
    check_regular(folder, DataError)
    if (folder / INDEX).exists():
        return _open_own(folder, split)
    if (folder / "progress.json").exists() or list(folder.glob("*.partial")):
        raise DataError(f"{folder}: unfinished: run the same `sinkdlm data prepare` again, it goes on where it stopped")
    datatrove = sorted(folder.rglob("*.ds"))
    packed = sorted(path for path in folder.glob("*.bin") if _is_packed(path))
    if not datatrove and not packed:
        raise DataError(
            f"{folder}: no token shards: neither {INDEX} of `sinkdlm data prepare`, nor datatrove's *.ds, nor LITPKDS *.bin"
        )
    shards = [_datatrove_shard(path) for path in datatrove] or [_packed_shard(path) for path in packed]
    if split != "train":
        shards = []
    sizes = json.dumps([[shard.path.name, shard.n_tokens] for shard in shards])
    n_documents = sum(len(document_ends(shard.path)) for shard in shards) if datatrove else None
    eos_id, tokenizer = _scale_record(folder) if datatrove else (None, None)
    fingerprint = hashlib.sha256(sizes.encode()).hexdigest()
    return Split(folder, shards, fingerprint, n_documents=n_documents, eos_id=eos_id, tokenizer=tokenizer)


def _scale_record(folder: Path) -> tuple[int | None, dict[str, Any] | None]:
    """End-of-document id and tokenizer that `sinkdlm data prepare --executor` recorded; None where datatrove was run by itself."""
    try:
        noted = json.loads((folder / "settings.json").read_text())
        return int(noted["eos_id"]), dict(noted["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None


def _fingerprint(index: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Fingerprint of a split's content, wherever it lies and whatever its sources were called."""
    files = [[entry["sha256"], entry.get("rows_sha256")] for entry in part["shards"]]
    told = [index["kind"], index["dtype"], index["eos_id"], (index["tokenizer"] or {}).get("vocabulary_sha256"), files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _open_own(folder: Path, split: str) -> Split:
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes())
        if index.get("format") != FORMAT or index.get("version") != VERSION:
            told = f"format {index.get('format')!r}, version {index.get('version')!r}"
            raise DataError(f"{path}: {told}: not readable by this version; prepare the set again")
        dtype: np.dtype[Any] = _DTYPES[index["dtype"]]
        part = index["splits"][split]
        for name in [entry[key] for entry in part["shards"] for key in ("file", "rows") if key in entry]:
            if not is_plain_name(name):
                raise ValueError(f"{name!r} is no file of this folder")
        shards = [
            Shard(folder / entry["file"], int(entry["tokens"]), dtype, 0, entry["sha256"], rows, entry.get("rows_sha256"))
            for entry in part["shards"]
            for rows in [folder / entry["rows"] if "rows" in entry else None]
        ]
        facts = {"n_documents": part["documents"], "highest_id": part["highest_id"]}
        facts |= {name: index[name] for name in ("kind", "eos_id", "tokenizer")}
        return Split(folder, shards, _fingerprint(index, part), **facts)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as failure:
        raise DataError(f"{path}: damaged ({type(failure).__name__}: {failure}); prepare the set again") from None


def _check_size(shard: Shard) -> None:
    expected, cure = shard.offset + shard.n_tokens * shard.dtype.itemsize, "restore it or prepare the set again"
    try:
        size = shard.path.stat().st_size
    except OSError as failure:
        raise DataError(f"{shard.path}: missing shard: {failure.strerror}; {cure}") from None
    if size < expected or (shard.sha256 is not None and size > expected):
        what = "truncated" if size < expected else "too long"
        raise DataError(f"{shard.path}: {what}: {size} bytes, expected {expected}; {cure}")
    if shard.rows is not None and not shard.rows.exists():
        raise DataError(f"{shard.rows}: missing; {cure}")


def _read_rows(path: Path) -> np.ndarray[Any, Any]:
    flat = np.fromfile(path, _ROW_DTYPE)
    return flat[: len(flat) // 2 * 2].reshape(-1, 2).astype(np.int64)


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PACKED_MAGIC)) == _PACKED_MAGIC


def _packed_shard(path: Path) -> Shard:
    header = np.fromfile(path, _PACKED_HEADER, count=1)
    if len(header) == 0 or int(header["version"][0]) != 1:
        raise DataError(f"{path}: a LITPKDS file whose header cannot be read")
    code = int(header["code"][0])
    if code not in _PACKED_DTYPES:
        raise DataError(f"{path}: LITPKDS dtype code {code}: not integer tokens")
    return Shard(path, int(header["tokens"][0]), np.dtype(_PACKED_DTYPES[code]), offset=_PACKED_HEADER.itemsize)


def _datatrove_shard(path: Path) -> Shard:
    """Open a datatrove file. Bytes per token: its size over the last document's end, or the metadata's where there is no index."""
    size, ends = path.stat().st_size, document_ends(path)
    metadata = path.with_name(path.name + ".metadata")
    if len(ends):
        width = size // max(1, int(ends[-1]))
    else:
        stated = metadata.read_text().split("\n")[0].rpartition("|")[2] if metadata.exists() else ""
        width = int(stated) if stated.isdigit() else 2
    if width not in (2, 4) or size % width or (len(ends) and int(ends[-1]) * width != size):
        raise DataError(f"{path}: {size} bytes do not fit its index and metadata: damaged or unfinished")
    return Shard(path, size // width, np.dtype(f"<u{width}"))


def document_ends(path: Path) -> np.ndarray[Any, Any]:
    """Ends of the documents in a datatrove file; empty where it has no index."""
    index = path.with_name(path.name + ".index")
    count = index.stat().st_size // 8 if index.exists() else 0
    return np.memmap(index, "<i8", "r", shape=(count,)) if count else np.zeros(0, np.int64)
