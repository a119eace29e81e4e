"""Write files so that a crash of the process or the machine leaves the old content or the new one; lock folders.

Knows nothing of what the files hold.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sinkdlm.errors import BusyError, UserError

LOCK = ".lock"


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_object(path: Path, error: type[UserError], cure: str = "") -> dict[str, Any]:
    """The JSON object in a file, or an error of this type, which ends with the cure."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise error(f"{path}: {failure.strerror}{cure}") from None
    except ValueError as failure:
        raise error(f"{path}: not valid JSON: {failure}{cure}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object{cure}")
    return content


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content at once: a hidden sibling is written first."""
    aside = path.with_name(f".{path.name}.partial")
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
