"""Fused operations of a sampler's step, where this machine has them. Imports Triton only where a kernel runs."""

import sys

import torch
from torch import Tensor

from sinkdlm.kernels.available import find_kernels


def draw_candidates(logits: Tensor, keys: Tensor | None, temperature: float, tempered: bool) -> tuple[Tensor, Tensor] | None:
    """Draw a token for each row of (..., V) logits in one pass; returns tokens and their log-odds, or None without a kernel."""
    if find_kernels(logits) is None:
        return None
    from sinkdlm.kernels.draw import choose

    return choose(logits, keys, temperature, tempered)


def keep_eager(owner: type, method: str) -> None:
    """Exclude `owner.method` from torch.compile, which would recompile it for every value of an argument."""
    found = getattr(owner, method)
    # Whoever compiles has imported dynamo; importing it here would take seconds.
    if "torch._dynamo" in sys.modules and not hasattr(found, "_torchdynamo_disable"):
        setattr(owner, method, torch.compiler.disable(found))
