"""Forwards that somebody watches run as they are written, whatever is compiled: a watcher cannot live in a compiled block."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0
_held: Any = None  # what puts the compiler's stance back


@contextmanager
def uncompiled() -> Iterator[None]:
    """The stance is one for all threads: the first to come takes it, the last to leave puts it back, in whatever order they leave.

    Where the compiler is not loaded, which takes a second, nothing is compiled.
    """
    global _inside, _held
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _lock:
        if _inside == 0:
            _held = torch.compiler.set_stance("force_eager")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _held.__exit__(None, None, None)
