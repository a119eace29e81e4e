"""Whether Triton kernels may stand in for torch's own operations, here and now."""

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _load_kernels() -> Any:
    """The package's Triton kernels; nothing where there is no Triton, or where this file stands alone."""
    try:
        from sinkdlm import kernels
    except ImportError:
        return None
    return kernels if kernels.is_usable() else None


def find_kernels(x: Tensor) -> Any:
    """Kernels for what is computed with x: on a GPU, without gradients, and outside the compiler, which fuses by itself."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    kernels = _load_kernels()
    return kernels if kernels is not None and x.dtype in kernels.DTYPES else None
