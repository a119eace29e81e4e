"""Whether Triton kernels may stand in for torch's own operations, here and now."""

import functools
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


@functools.cache
def _load_kernels() -> Any:
    """The package's Triton kernels; nothing where there is no Triton, or where this file stands alone."""
    try:
        from sinkdlm.kernels import inference as kernels
    except ImportError:
        return None
    return kernels if kernels.is_usable() else None


def find_kernels(x: Tensor) -> Any:
    """Kernels for what is computed with x: on a GPU, without gradients, and outside the compiler, which fuses by itself."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    kernels = _load_kernels()
    return kernels if kernels is not None and x.dtype in kernels.DTYPES else None


def trains_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a training step in this arithmetic goes through operators.py: half precision on a GPU, with gradients. Asked outside
    of compiled code, which is then told."""
    if device.type != "cuda" or dtype not in _HALF or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return has_kernels()


def has_kernels() -> bool:
    return _load_kernels() is not None
