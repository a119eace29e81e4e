"""Whether Triton kernels can run, here and now."""

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def load_kernels() -> Any:
    """The kernels of inference.py, once one has been built; None without a GPU, Triton or a C compiler."""
    if not torch.cuda.is_available():
        return None
    try:
        from sinkdlm.kernels import inference
    except ImportError:
        return None
    return inference if inference.is_usable() else None


def has_kernels() -> bool:
    return load_kernels() is not None


def find_kernels(x: Tensor) -> Any:
    """Kernels for what is computed with x: on a GPU, without gradients, and outside the compiler, which fuses by itself."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    kernels = load_kernels()
    return kernels if kernels is not None and x.dtype in kernels.DTYPES else None
