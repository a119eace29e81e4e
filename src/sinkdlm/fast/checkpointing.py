"""Activation checkpointing: the backward recomputes activations instead of keeping them."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]

# Selective recomputation keeps these results: matmuls and attention take most of the time and some of the memory.
_COSTLY = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
]


def run_again(run: Callable[..., Any], how: Recompute, *arguments: Any) -> Any:
    """Call run(*arguments); the backward recomputes its intermediate results."""
    # No layer draws random numbers, and the generator's state cannot be saved during a CUDA graph capture.
    if how == "full":
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
    keep = functools.partial(create_selective_checkpoint_contexts, _COSTLY)
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=keep)
