"""Token shards as they are written: whole or not at all, and resumable after the process or the machine dies at any moment.

Owns the files of a prepared folder while it is unfinished. Both splits grow as `.partial` files; progress.json, replaced as a
whole, says how long each was when a row was last finished, so that going on means cutting them back to it. index.json comes last.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.checkpoint.durable import replace_text, sync
from sinkdlm.data.shards import FORMAT, INDEX, SPLITS, VERSION
from sinkdlm.errors import DataError

PROGRESS = "progress.json"
_PARTIAL = ".partial"
_BUFFER = 1 << 22  # bytes held before they are written
_ROWS = np.dtype("<u4")
Array = np.ndarray[Any, Any]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", path.with_name(path.name + _PARTIAL))


class GrowingFile:
    """A file written from its start, with its SHA-256, that can be cut back to an earlier length."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.partial = path, path.with_name(path.name + _PARTIAL)
        self.size, self._buffer, self._digest = size, bytearray(), hashlib.sha256()
        if size and not self.partial.exists() and path.exists():  # finished, but that was not yet noted
            path.rename(self.partial)
        path.unlink(missing_ok=True)
        if size and (not self.partial.exists() or self.partial.stat().st_size < size):
            raise DataError(f"{self.partial}: shorter than {PROGRESS} says; remove {path.parent} and prepare again")
        self._file = self.partial.open("r+b" if size else "w+b", buffering=0)
        self._file.truncate(size)
        if size:
            self._digest = hashlib.file_digest(self._file, "sha256")

    def write(self, content: bytes) -> None:
        self._buffer += content
        self.size += len(content)
        if len(self._buffer) >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        waiting = memoryview(bytes(self._buffer))
        self._digest.update(waiting)
        self._buffer.clear()
        while waiting:
            waiting = waiting[self._file.write(waiting) or 0 :]

    def sync(self) -> None:
        self.flush()
        os.fsync(self._file.fileno())

    def tail(self, start: int) -> bytes:
        """What was written from a byte on."""
        self.flush()
        with self.partial.open("rb") as file:
            file.seek(start)
            return file.read()

    def cut_back(self, size: int) -> None:
        self.flush()
        self._file.truncate(size)
        self._file.seek(0)
        self._digest = hashlib.file_digest(self._file, "sha256")
        self.size = size

    def finish(self) -> str:
        """Closes the file under its own name; its SHA-256."""
        self.sync()
        self._file.close()
        self.partial.rename(self.path)
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)


class SplitWriter:
    """The shards of one split: those that are finished, and one that grows. `last`: tokens and documents of the last row."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], with_rows: bool, state: Mapping[str, Any]) -> None:
        self.folder, self.split, self.dtype, self.with_rows = folder, split, dtype, with_rows
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.closed_highest, self.highest = state["closed_highest"], state["highest"]
        self.tokens, self.documents, self.last = state["tokens"], state["documents"], list(state["last"])
        for shard in self.shards:
            if not (folder / shard["file"]).exists():
                raise DataError(f"{folder / shard['file']}: missing, but {PROGRESS} has it; remove {folder} and prepare again")
        self._open()

    @staticmethod
    def empty() -> dict[str, Any]:
        return {"shards": [], "closed_highest": -1, "highest": -1, "tokens": 0, "documents": 0, "last": [0, 0]}

    @property
    def n_documents(self) -> int:
        return self.documents + sum(shard["documents"] for shard in self.shards)

    @property
    def n_tokens(self) -> int:
        return self.tokens + sum(shard["tokens"] for shard in self.shards)

    def state(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.empty()}

    def _open(self) -> None:
        name = f"{self.split}-{len(self.shards):05d}"
        self._bin = GrowingFile(self.folder / f"{name}.bin", self.tokens * self.dtype.itemsize)
        self._rows = GrowingFile(self.folder / f"{name}.rows", 2 * self.documents * _ROWS.itemsize) if self.with_rows else None

    @property
    def files(self) -> list[GrowingFile]:
        return [self._bin, *([self._rows] if self._rows else [])]

    def write(self, tokens: Array, rows: Array | None, n_documents: int, *, first: bool) -> None:
        """Adds a row, or a piece of one. rows: (examples, 2), prompt tokens and tokens in all."""
        self.last = [0, 0] if first else self.last
        self.last = [self.last[0] + len(tokens), self.last[1] + n_documents]
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + n_documents
        if len(tokens):
            self.highest = max(self.highest, int(tokens.max()))
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        if self._rows is not None and rows is not None:
            self._rows.write(rows.astype(_ROWS).tobytes())

    def close_shard(self) -> None:
        if self.tokens == 0:
            return
        entry = {"file": self._bin.path.name, "tokens": self.tokens, "documents": self.documents, "sha256": self._bin.finish()}
        if self._rows is not None:
            entry |= {"rows": self._rows.path.name, "rows_sha256": self._rows.finish()}
        self.shards.append(entry)
        self.closed_highest = max(self.closed_highest, self.highest)
        self.highest, self.tokens, self.documents, self.last = -1, 0, 0, [0, 0]
        self._open()

    def copy_last(self, other: "SplitWriter") -> None:
        """Writes the last row at the end of another split's open shard."""
        tokens, documents = self.last
        found = np.frombuffer(self._bin.tail((self.tokens - tokens) * self.dtype.itemsize), self.dtype)
        start = 2 * (self.documents - documents) * _ROWS.itemsize
        rows = np.frombuffer(self._rows.tail(start), _ROWS).reshape(-1, 2) if self._rows is not None else None
        other.write(found, rows, documents, first=True)

    def forget_last(self) -> None:
        """The counts without the last row; cut_back then takes it off the files."""
        tokens, documents = self.last
        self.tokens, self.documents, self.last = self.tokens - tokens, self.documents - documents, [0, 0]
        kept = np.memmap(self._bin.partial, self.dtype, "r", shape=(self.tokens,)) if self.tokens else None
        self.highest = -1 if kept is None else int(kept.max())

    def cut_back(self) -> None:
        self._bin.cut_back(self.tokens * self.dtype.itemsize)
        if self._rows is not None:
            self._rows.cut_back(2 * self.documents * _ROWS.itemsize)

    def summary(self) -> dict[str, Any]:
        return {
            "tokens": sum(shard["tokens"] for shard in self.shards),
            "documents": sum(shard["documents"] for shard in self.shards),
            "highest_id": self.closed_highest,
            "shards": self.shards,
        }


class Store:
    """A folder that is being prepared. Opening one that is unfinished takes it up where it was."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], dtype: np.dtype[Any]) -> None:
        self.folder, self.settings, self.shard_tokens = folder, dict(settings), settings["shard_tokens"]
        with_rows = settings["kind"] != "text"
        noted = self._begin()
        self.resumed = self.noted = noted["position"] != [0, 0]
        self.position: tuple[int, int] = (noted["position"][0], noted["position"][1])
        self.counts: dict[str, int] = dict(noted["counts"])
        self.splits = {split: SplitWriter(folder, split, dtype, with_rows, noted["splits"][split]) for split in SPLITS}

    def _begin(self) -> dict[str, Any]:
        """What was noted, or a first note. One of a run that died before it finished a row binds nobody."""
        path = self.folder / PROGRESS
        noted = read_json(path) if path.exists() else None
        if noted is None:
            other = sorted(file.name for file in self.folder.iterdir() if file.name != PROGRESS + _PARTIAL)
            if other:
                raise DataError(f"{self.folder}: holds {other[0]} and is no unfinished set; choose another --out or remove it")
        if noted is None or noted["position"] == [0, 0]:
            splits = {split: SplitWriter.empty() for split in SPLITS}
            noted = {"settings": self.settings, "position": [0, 0], "counts": {}, "splits": splits}
            write_json(path, noted)
        compare(self.folder, noted.get("settings", {}), self.settings, "begun")
        return noted

    def write(
        self, split: str, tokens: Array, rows: Array | None, n_documents: int, *, first: bool, last: bool, position: tuple[int, int]
    ) -> bool:
        """Adds a row, or a piece of one. A full shard is closed before the next row begins. Was something noted on disk?"""
        writer, closed = self.splits[split], False
        if len(tokens):  # none: every example of the row was too long
            if first and writer.tokens >= self.shard_tokens:
                writer.close_shard()
                self.note()
                closed = True
            writer.write(tokens, rows, n_documents, first=first)
        if last:
            self.position = position
        return closed

    def note(self) -> None:
        """Makes everything up to the last finished row safe."""
        for writer in self.splits.values():
            for file in writer.files:
                file.sync()
        content = {"settings": self.settings, "position": list(self.position), "counts": self.counts}
        content["splits"] = {split: writer.state() for split, writer in self.splits.items()}
        write_json(self.folder / PROGRESS, content)
        self.noted = True

    def move_last(self, split: str, target: str) -> None:
        """The last row of one split to the other. Noted before the file is cut, so that dying in between loses nothing and does
        nothing twice."""
        writer = self.splits[split]
        writer.copy_last(self.splits[target])
        writer.forget_last()
        self.note()
        writer.cut_back()

    def finish(self, index: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
        for writer in self.splits.values():
            writer.close_shard()
            self.note()
        for writer in self.splits.values():
            for file in writer.files:
                file.discard()
        try:
            tokenizer.save_pretrained(self.folder / "tokenizer")
        except OSError:
            raise
        except Exception as failure:  # tokenizers raises a bare one, also where the disk is full
            raise OSError(0, f"tokenizer: {str(failure).splitlines()[0]}") from None
        for path in (self.folder / "tokenizer").iterdir():
            sync(path)
        splits = {split: writer.summary() for split, writer in self.splits.items()}
        whole = {"format": FORMAT, "version": VERSION, **index, "settings": self.settings, "splits": splits}
        write_json(self.folder / INDEX, whole)
        (self.folder / PROGRESS).unlink()
        self.close()
        return whole

    def abandon(self) -> None:
        """Removes what was begun and holds nothing."""
        for writer in self.splits.values():
            for file in writer.files:
                file.discard()
        (self.folder / PROGRESS).unlink(missing_ok=True)
        self.close()
        with suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        for writer in self.splits.values():
            for file in writer.files:
                file.close()


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
    except (OSError, ValueError, AssertionError):
        raise DataError(f"{path}: damaged; remove {path.parent} and prepare again") from None
    return found


def compare(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuses to go on with other settings than those on disk."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if keys:
        plain = [key for key in keys if not isinstance(now.get(key, before.get(key)), dict)]
        told = [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in plain] + [key for key in keys if key not in plain]
        raise DataError(f"{folder}: {what} with other settings: {'; '.join(told)}; choose another --out or remove the folder")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two preparations in one folder would overwrite each other. Released when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{folder}: another preparation is writing there; wait for it or choose another --out") from None
        yield
    finally:
        os.close(handle)
