"""Write token shards whole or not at all, resumable after the process or the machine dies at any moment.

Owns the files of an unfinished folder: nobody reads them before index.json, which is written last. progress.json, replaced
atomically, records each file's length at the last finished row. Resuming cuts the files back to it.
"""

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.checkpoint.durable import LOCK, read_object, replace_text, sync
from sinkdlm.checkpoint.tokenizer import write_tokenizer
from sinkdlm.data.shards import FORMAT, INDEX, SPLITS, VERSION
from sinkdlm.errors import DataError

PROGRESS = "progress.json"
_BUFFER = 1 << 22  # bytes held before they are written
_ROW_BYTES = 8  # of an example in a .rows file: prompt tokens and tokens in all
Array = np.ndarray[Any, Any]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


class GrowingFile:
    """A file that grows from its start and can be cut back to an earlier length."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        if size and (not path.exists() or path.stat().st_size < size):
            raise DataError(f"{path}: shorter than {PROGRESS} says; remove {path.parent} and prepare again")
        path.touch()
        self._file = io.BufferedRandom(io.FileIO(path, "r+"), _BUFFER)
        self._file.truncate(size)
        self.write, self.close = self._file.write, self._file.close
        self._file.seek(size)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def tail(self, n_bytes: int) -> bytes:
        """Read the last `n_bytes`."""
        self._file.seek(-n_bytes, os.SEEK_END)
        return self._file.read()

    def cut_back(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)

    def finish(self) -> str:
        """Close the file and return its SHA-256."""
        self.sync()
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self.close()
        return digest

    def discard(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class SplitWriter:
    """The shards of one split: finished ones, and one that grows. `last`: tokens and documents of the last row."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], with_rows: bool, state: Mapping[str, Any]) -> None:
        self.folder, self.split, self.dtype, self.with_rows = folder, split, dtype, with_rows
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.closed_highest, self.last = state["closed_highest"], list(state["last"])
        self.tokens, self.documents = state["tokens"], state["documents"]
        for shard in self.shards:
            if not (folder / shard["file"]).exists():
                raise DataError(f"{folder / shard['file']}: missing, but {PROGRESS} has it; remove {folder} and prepare again")
        self._open()

    @staticmethod
    def empty() -> dict[str, Any]:
        return {"shards": [], "closed_highest": -1, "tokens": 0, "documents": 0, "last": [0, 0]}

    def state(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.empty()}

    def total(self, what: str) -> int:
        """Number of "tokens" or "documents" in all shards."""
        return int(getattr(self, what)) + sum(shard[what] for shard in self.shards)

    def _sizes(self, tokens: int, documents: int) -> list[int]:
        """Bytes of so many tokens and documents, per file."""
        return [tokens * self.dtype.itemsize, documents * _ROW_BYTES][: 1 + self.with_rows]

    def _open(self) -> None:
        names = [f"{self.split}-{len(self.shards):05d}{ending}" for ending in (".bin", ".rows")]
        sizes = self._sizes(self.tokens, self.documents)
        self.files = [GrowingFile(self.folder / name, size) for name, size in zip(names, sizes, strict=False)]

    def write(self, contents: Sequence[bytes], n_tokens: int, n_documents: int, *, first: bool) -> None:
        """Add a row, or a piece of one. contents: one per file."""
        last = [0, 0] if first else self.last
        self.last = [last[0] + n_tokens, last[1] + n_documents]
        self.tokens, self.documents = self.tokens + n_tokens, self.documents + n_documents
        for file, content in zip(self.files, contents, strict=True):
            file.write(content)

    def close_shard(self) -> None:
        if self.tokens == 0:
            return
        digests = [file.finish() for file in self.files]
        path = self.files[0].path
        entry = {"file": path.name, "tokens": self.tokens, "documents": self.documents, "sha256": digests[0]}
        if self.with_rows:
            entry |= {"rows": self.files[1].path.name, "rows_sha256": digests[1]}
        self.shards.append(entry)
        self.closed_highest = max(self.closed_highest, int(np.memmap(path, self.dtype, "r").max()))
        self.tokens, self.documents, self.last = 0, 0, [0, 0]
        self._open()

    def move_last(self, other: "SplitWriter") -> None:
        """Copy the last row to the end of another split's open shard and stop counting it here; cut_back then removes it."""
        other.write(
            [file.tail(size) for file, size in zip(self.files, self._sizes(*self.last), strict=True)], *self.last, first=True
        )
        self.tokens, self.documents, self.last = self.tokens - self.last[0], self.documents - self.last[1], [0, 0]

    def cut_back(self) -> None:
        for file, size in zip(self.files, self._sizes(self.tokens, self.documents), strict=True):
            file.cut_back(size)

    def summary(self) -> dict[str, Any]:
        counts = {what: self.total(what) for what in ("tokens", "documents")}
        return {**counts, "highest_id": self.closed_highest, "shards": self.shards}


class Store:
    """A folder under preparation. Opening an unfinished one resumes it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
        self.folder, self.settings, self.dtype = folder, dict(settings), dtype
        noted = self._begin()
        self.resumed = self.noted = noted["position"] != [0, 0]
        self.position: tuple[int, int] = (noted["position"][0], noted["position"][1])
        self.counts: Counter[str] = Counter(noted["counts"])
        with_rows = settings["kind"] != "text"
        self.splits = {split: SplitWriter(folder, split, dtype, with_rows, noted["splits"][split]) for split in SPLITS}

    def _begin(self) -> dict[str, Any]:
        """Return the saved progress, or start it. A run that died before it finished a row binds nobody to its settings."""
        path = self.folder / PROGRESS
        noted = read_json(path) if path.exists() else None
        if noted is None:
            other = sorted(file.name for file in self.folder.iterdir() if file.name not in (LOCK, f".{PROGRESS}.partial"))
            if other:
                raise DataError(f"{self.folder}: holds {other[0]} and is not an unfinished set; choose another --out or remove it")
        if noted is None or noted["position"] == [0, 0]:
            splits = {split: SplitWriter.empty() for split in SPLITS}
            noted = {"settings": self.settings, "position": [0, 0], "counts": {}, "splits": splits}
            write_json(path, noted)
        compare(self.folder, noted.get("settings", {}), self.settings, "begun")
        return noted

    @property
    def _files(self) -> list[GrowingFile]:
        return [file for writer in self.splits.values() for file in writer.files]

    def write(self, split: str, tokens: Array, rows: Array | None, n_documents: int, *, first: bool) -> bool:
        """Add a row, or a piece of one; return whether progress was saved. A full shard is closed before the next row begins.

        rows: (examples, 2), prompt tokens and all tokens."""
        writer = self.splits[split]
        if not len(tokens):  # every example of the row was too long
            return False
        closes = first and writer.tokens >= self.settings["shard_tokens"]
        if closes:
            writer.close_shard()
            self.note()
        contents = [tokens.astype(self.dtype).tobytes()] + ([] if rows is None else [rows.astype("<u4").tobytes()])
        writer.write(contents, len(tokens), n_documents, first=first)
        return closes

    def note(self) -> None:
        """Save progress: everything up to the last finished row is then safe on disk."""
        for file in self._files:
            file.sync()
        content = {"settings": self.settings, "position": list(self.position), "counts": self.counts}
        content["splits"] = {split: writer.state() for split, writer in self.splits.items()}
        write_json(self.folder / PROGRESS, content)
        self.noted = True

    def move_last(self, split: str, target: str) -> None:
        """Move the last row of one split to the other. Progress is saved before the file is cut: a crash in between loses nothing
        and repeats nothing."""
        self.splits[split].move_last(self.splits[target])
        self.note()
        self.splits[split].cut_back()

    def hold_out_end(self, n_tokens: int) -> None:
        """Move the end of the only document to the validation split, as a document of its own. A run that dies in between finds no
        document left in training, moves the end back, and begins again."""
        train = self.splits["train"]
        train.last = [n_tokens, 1]
        self.move_last("train", "validation")
        train.write([np.array([self.settings["eos_id"]], self.dtype).tobytes()], 1, 1, first=True)
        self.note()

    def finish(self, index: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
        for writer in self.splits.values():
            writer.close_shard()
            self.note()
        for file in self._files:
            file.discard()
        write_tokenizer(self.folder / "tokenizer", tokenizer)
        for path in (self.folder / "tokenizer").iterdir():
            sync(path)
        splits = {split: writer.summary() for split, writer in self.splits.items()}
        whole = {"format": FORMAT, "version": VERSION, **index, "settings": self.settings, "splits": splits}
        write_json(self.folder / INDEX, whole)
        self._unlink_notes()
        return whole

    def abandon(self) -> None:
        """Remove the files that were begun, and the folder if it is empty."""
        for file in self._files:
            file.discard()
        self._unlink_notes()
        with suppress(OSError):
            self.folder.rmdir()

    def _unlink_notes(self) -> None:
        for name in (PROGRESS, LOCK):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    return read_object(path, DataError, f"; damaged: remove {path.parent} and prepare again")


def compare(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with settings other than those on disk."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if keys:
        plain = [key for key in keys if not isinstance(now.get(key, before.get(key)), dict)]
        told = [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in plain] + [key for key in keys if key not in plain]
        raise DataError(f"{folder}: {what} with other settings: {'; '.join(told)}; choose another --out or remove the folder")
