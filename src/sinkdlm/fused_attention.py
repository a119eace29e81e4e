"""Attention of a training step on a GPU, from a layer's projected heads to mixed values, as one function with its own backward.

The content's attention is the plain kernel's; rotary and sinks are joined to it in as few passes over memory as there can be, also
in the backward: see operators.py. Computes what attention.py and positions.py compute, which the tests hold it to; anything that is
hidden, cached, watched or changed goes that way.
"""

import math
from typing import Any

import torch
from torch import Tensor

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
