"""Folders that are made once for all processes of a test session."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Call make(folder) in the first process that asks; others wait, and fail if it failed or was killed."""
    done, failure = folder.with_name(f"{folder.name}.done"), folder.with_name(f"{folder.name}.failed")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees a dead process's lock
        if done.exists():
            return folder
        if folder.exists():
            reason = failure.read_text() if failure.exists() else "its maker was killed"
            pytest.fail(f"{folder.name}, which the tests share, could not be made: {reason}", pytrace=False)
        folder.mkdir()
        try:
            make(folder)
        except BaseException as problem:
            failure.write_text(f"{type(problem).__name__}: {problem}")
            raise
        done.touch()
    return folder
