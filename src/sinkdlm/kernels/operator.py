"""Custom operators that are opaque to torch.compile. Eager code calls their Triton function directly.

The first call through torch.library loads the compiler, about two seconds; each call takes about 20 microseconds to dispatch.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """An operator: `plain` torch, and on a GPU the kernel of the same name in the module that `home` imports.

    It has no gradients: callers are autograd functions with their own backward."""

    def __init__(self, plain: Callable[_P, _R], home: Callable[[], ModuleType]) -> None:
        self.plain, self._home, self._name = plain, home, plain.__name__
        self.op = torch.library.custom_op(f"sinkdlm::{self._name}", plain, mutates_args=())
        self.op.register_kernel("cuda")(self.kernel)
        self.op.register_fake(plain)  # shapes, strides and types are those of the plain form

    def kernel(self, *args: Any, **given: Any) -> Any:
        return getattr(self._home(), self._name)(*args, **given)

    def __call__(self, *args: _P.args, **given: _P.kwargs) -> _R:
        # With gradients on, call through torch.library: it raises where a caller lacks a backward.
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.op(*args, **given)
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in (*args, *given.values()))
        return self.kernel(*args, **given) if on_gpu else self.plain(*args, **given)


def operator(home: Callable[[], ModuleType]) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Decorate the plain form. home: imports the kernel's module, and Triton, on first use."""
    return lambda plain: Operator(plain, home)
