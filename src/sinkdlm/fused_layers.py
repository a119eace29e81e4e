"""Parts of a layer in a training step on a GPU, each as one function with its own backward, in as few passes over memory as can be.

Attention from projected heads to mixed values (the content's is the plain kernel's; rotary and sinks are joined to it), the norm
with the addition before it, and SwiGLU with the product after it. What the operators under them compute says operators.py. The
model computes the same by torch's own operations, which the tests hold this to, wherever anything is hidden, cached, watched or
changed.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm import operators
from sinkdlm.attention import content_backward, content_forward
from sinkdlm.positions import Rotation


def attend_heads(
    heads: Tensor, rotation: Rotation, n_heads: int, sink_k: Tensor | None = None, sink_v: Tensor | None = None
) -> Tensor:
    """heads (B, T, H + 2K, D): queries, keys, values before rotary; sinks (1 or B, K, S, D), rotated -> (B, H, T, D)."""
    with torch.autocast(heads.device.type, enabled=False):
        return _Attend.apply(heads, rotation.cos, rotation.sin, n_heads, sink_k, sink_v)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, n_heads: int, sink_k: Tensor | None, sink_v: Tensor | None
    ) -> Tensor:
        n_kv = (heads.shape[2] - n_heads) // 2
        turned, v = heads.split([n_heads + n_kv, n_kv], dim=-2)
        q, k = Rotation(cos, sin).apply(turned).split([n_heads, n_kv], dim=-2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse, rest = content_forward("fused", q, k, v, None)
        if sink_k is not None and sink_v is not None:
            out, lse = operators.merge_sinks(q, out, lse, sink_k, sink_v, 1 / math.sqrt(q.shape[3]))
        ctx.save_for_backward(q, k, v, out, lse, cos, sin, sink_k, sink_v, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cos, sin, sink_k, sink_v, *rest = ctx.saved_tensors
        grad_q, grad_k, grad_v = content_backward("fused", grad, q, k, v, None, out, lse, rest)
        turns = grad_sink_k = grad_sink_v = None
        if sink_k is not None:
            scale = 1 / math.sqrt(q.shape[3])
            turns, grad_sink_k, grad_sink_v = operators.merge_sinks_backward(grad, q, out, lse, sink_k, sink_v, scale)
        grad_heads = operators.join_heads(grad_q, grad_k, grad_v, cos, sin, turns, sink_k)
        return grad_heads, None, None, None, grad_sink_k, grad_sink_v


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x + update, and its norm in `dtype`, the products' precision."""
    return _AddNorm.apply(x, update, weight, eps, dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x = x.view_as(x) if update is None else x + update
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.update_dtype = eps, None if update is None else update.dtype
        normed = functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return x, normed if normed.dtype == dtype else normed.to(dtype)  # see attention._Merge

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_update, grad_weight = operators.add_norm_backward(grad_sum, grad_normed, x, weight, ctx.eps, ctx.update_dtype)
        return grad_x, grad_update if ctx.update_dtype is not None else None, grad_weight, None, None


def swiglu_product(gate_up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) @ weight.T. Keeps gate_up alone, and goes over it once in the backward."""
    return _SwigluProduct.apply(gate_up, weight)


class _SwigluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return functional.linear(operators.swiglu(gate_up), weight.to(gate_up.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        grad_gate_up, hidden = operators.swiglu_backward(gate_up, grad @ weight.to(grad.dtype))
        grad_weight = grad.flatten(0, -2).mT @ hidden.flatten(0, -2)
        return grad_gate_up, grad_weight.to(weight.dtype)
