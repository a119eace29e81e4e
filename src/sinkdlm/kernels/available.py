"""Whether Triton kernels can run here. Asks nothing about gradients or the compiler: that is for runners."""

import functools
from typing import Any

import torch


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
