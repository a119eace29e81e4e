"""What is on disk is whole and stays there, whatever happens to the process or the machine.

Knows files and folders, and nothing of what they hold.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, aside: Path) -> None:
    """The old content or the new one, whatever happens in between. `aside`, in the same folder, is where it is written first."""
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)
