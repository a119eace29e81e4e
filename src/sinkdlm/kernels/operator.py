"""Functions that torch's compiler takes whole, as one operation each, and that cost nothing beside what they compute elsewhere.

An operation of torch.library loads the compiler when it is first called, two seconds of a start, and takes some twenty microseconds
to find out what to call. Outside the compiler the function is therefore called as it is.
"""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """`plain` in torch's own operations, and a kernel for tensors on a GPU. Without gradients: those are the callers', which call
    from functions with a backward of their own."""

    def __init__(self, name: str, plain: Callable[_P, _R]) -> None:
        self.plain = plain
        self.op = torch.library.custom_op(f"sinkdlm::{name}", plain, mutates_args=())
        self._kernel: Callable[_P, _R] | None = None

    def fake(self, shapes: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates what tells the compiler shapes, strides and types."""
        self.op.register_fake(shapes)
        return shapes

    def kernel(self, compute: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates what computes on a GPU."""
        self.op.register_kernel("cuda")(compute)
        self._kernel = compute
        return compute

    def __call__(self, *args: _P.args, **given: _P.kwargs) -> _R:
        # With gradients on, torch's own: it refuses a backward that nobody has written.
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.op(*args, **given)
        if self._kernel is not None and any(isinstance(x, torch.Tensor) and x.is_cuda for x in (*args, *given.values())):
            return self._kernel(*args, **given)
        return self.plain(*args, **given)


def operator(name: str) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    def decorate(plain: Callable[_P, _R]) -> Operator[_P, _R]:
        return Operator(name, plain)

    return decorate
