"""The sinks' keys and values of a layer, and the scope in which a runner may cache them.

S sinks, K key/value heads, D head width.
"""

from typing import Any, NamedTuple

from torch import Tensor


class Lane(NamedTuple):
    """Keys (before rotary) and values of a layer's sinks, (1, S, K, D) each."""

    k: Tensor
    v: Tensor


class Scope:
    """One `model.inference()` scope: weights must not change in it, so a runner may cache what depends on them alone.

    kept: the runner's cache, with a method `verify()` that raises if weights have changed.
    """

    kept: Any = None

    def close(self) -> None:
        if self.kept is not None:
            self.kept.verify()
