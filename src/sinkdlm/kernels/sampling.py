"""Fused operations of a sampler's step, where this machine has them. Imports Triton only where a kernel runs."""

import sys
from typing import Any

import torch
from torch import Tensor

from sinkdlm.kernels.available import find_kernels


def draw_candidates(logits: Tensor, keys: Tensor | None, temperature: float, tempered: bool) -> tuple[Tensor, Tensor] | None:
    """Draw a token for each row of (..., V) logits in one pass; returns tokens and their log-odds, or None without a kernel."""
    if find_kernels(logits) is None:
        return None
    from sinkdlm.kernels.draw import choose

    return choose(logits, keys, temperature, tempered)


def keep_eager(owner: Any, method: str) -> None:
    """Exclude `owner.method` from torch.compile, which would recompile it for every value of an argument."""
    if "torch._dynamo" in sys.modules:  # whoever compiles has imported it; importing it here would take seconds
        setattr(owner, method, torch.compiler.disable(getattr(owner, method)))
