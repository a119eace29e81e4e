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

from sinkdlm.errors import BusyError, UserError, check_regular

LOCK = ".lock"


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_object(path: Path, error: type[UserError], cure: str = "") -> dict[str, Any]:
    """Read the JSON object in a file, or raise an error of this type whose message ends with the cure."""
    check_regular(path, error)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise error(f"{path}: {failure.strerror}{cure}") from None
    except (ValueError, RecursionError) as failure:
        raise error(f"{path}: not valid JSON: {failure}{cure}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object{cure}")
    return content


def is_plain_name(name: str) -> bool:
    """Whether this names a file within a folder. What an index names is never read elsewhere."""
    return Path(name).name == name and name not in ("", "..")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content at once: a hidden sibling is written first."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


def write_text(path: Path, text: str, error: type[UserError], cure: str = "") -> None:
    """Replace a file's content, in a folder that is made if missing, or raise an error whose message ends with the cure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as failure:
        raise error(f"{path}: cannot be written: {failure.strerror}{cure}") from None


@contextmanager
def held(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, created if missing, for one process. Others wait or get a BusyError, in which `what` names the holder."""
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
