"""Custom operators that torch's compiler does not look into. In eager mode their Triton function is called directly.

Calling through torch.library loads the compiler at the first call, two seconds of a start, and takes some twenty microseconds to
dispatch each time.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """`plain` in torch's own operations, and on a GPU the kernel of the same name in the module that `home` imports.

    Without gradients: those are the callers', which call from functions with a backward of their own."""

    def __init__(self, plain: Callable[_P, _R], home: Callable[[], ModuleType]) -> None:
        self.plain, self._home, self._name = plain, home, plain.__name__
        self.op = torch.library.custom_op(f"sinkdlm::{self._name}", plain, mutates_args=())
        self.op.register_kernel("cuda")(self.kernel)
        self.op.register_fake(plain)  # shapes, strides and types are those of the plain form

    def kernel(self, *args: Any, **given: Any) -> Any:
        return getattr(self._home(), self._name)(*args, **given)

    def __call__(self, *args: _P.args, **given: _P.kwargs) -> _R:
        # With gradients on, through torch.library: it raises where a caller forgot to write the backward.
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.op(*args, **given)
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in (*args, *given.values()))
        return self.kernel(*args, **given) if on_gpu else self.plain(*args, **given)


def operator(home: Callable[[], ModuleType]) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Decorates the plain form. home: imports the module of its kernel, and with it Triton, when it is first needed."""
    return lambda plain: Operator(plain, home)
