"""Write files so that a crash of the process or the machine leaves the old content or the new one; lock folders.

Knows nothing of what the files hold.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkdlm.errors import BusyError, UserError

LOCK = ".lock"


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, aside: Path) -> None:
    """Replace a file's content at once. `aside`, in the same folder, is written first."""
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


@contextmanager
def held(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, made if need be, for one process. Another one waits, or gets a BusyError that calls it a `what`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as failure:
        raise UserError(f"{folder}: cannot be written: {failure.strerror}; choose another --out") from None
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise BusyError(f"{folder}: another {what} runs there; choose another --out, or wait for it to end") from None
        yield
    finally:
        os.close(lock)
