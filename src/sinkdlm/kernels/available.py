"""Check whether Triton kernels can run here."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor


@functools.cache
def load_kernels() -> Any:
    """Return inference.py, after building one of its kernels; None without a GPU, Triton or a C compiler."""
    if not torch.cuda.is_available():
        return None
    try:
        from sinkdlm.kernels import inference
    except ImportError:
        return None
    try:
        inference.build_one()
    except Exception as error:  # whatever the toolchain raises
        warnings.warn(f"Triton kernels cannot be built here ({error}); slower plain operations are used", stacklevel=2)
        return None
    return inference


def has_kernels() -> bool:
    return load_kernels() is not None


def find_kernels(x: Tensor) -> Any:
    """Return the inference kernels if x is on a GPU, without gradients and outside torch.compile, which fuses by itself."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    kernels = load_kernels()
    return kernels if kernels is not None and x.dtype in kernels.DTYPES else None
