"""What the sinks of a layer hand to its tokens, and the scope in which it may be kept.

S sinks, K key/value heads, D head width.
"""

from typing import Any, NamedTuple

from torch import Tensor


class Lane(NamedTuple):
    """Keys of a layer's sinks before rotary, and their values, each (1, S, K, D)."""

    k: Tensor
    v: Tensor


class Scope:
    """One `model.inference()`: weights stay as they are in it, so a runner may keep what depends on them alone.

    kept: whatever the runner keeps, with a method `verify()` that raises if weights have changed all the same.
    """

    kept: Any = None

    def close(self) -> None:
        if self.kept is not None:
            self.kept.verify()
