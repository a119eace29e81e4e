"""Autograd functions of a training step: parts of a layer with their own backward, in few passes over memory.

Attention over flat tokens and sinks; residual addition with RMSNorm; matmuls with weight gradients in the weight's dtype; SwiGLU
with the matmul after it. kernels/ops.py defines the operators that they call.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm.fast.attention import content_backward, content_forward
from sinkdlm.kernels import ops
from sinkdlm.model.positions import Rotation


def attend_flat(
    heads: Tensor,
    rotation: Rotation,
    sink_rotation: Rotation | None,
    batch: int,
    n_heads: int,
    *,
    zero_value: bool = False,
    sink_logit: Tensor | None = None,
) -> Tensor:
    """Attend with heads (B T + N, H + 2K, D), which hold q, k and v before rotary: (B T + N, H, D). Rows are the tokens, then the
    sinks, which all tokens see and which see only themselves, then padding.

    sink_logit (H,): joins each head's softmax without a value; there are no sinks then."""
    angles = (rotation.cos, rotation.sin, *(sink_rotation or (None, None)))
    with torch.autocast(heads.device.type, enabled=False):
        return _Attend.apply(heads, *angles, sink_logit, batch, n_heads, zero_value)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        sink_cos: Tensor | None,
        sink_sin: Tensor | None,
        sink_logit: Tensor | None,
        batch: int,
        n_heads: int,
        zero_value: bool,
    ) -> Tensor:
        n_tokens, n_kv, scale = batch * cos.shape[1], (heads.shape[1] - n_heads) // 2, 1 / math.sqrt(heads.shape[2])
        sink_k = sink_v = own = None
        if sink_cos is not None and sink_sin is not None:
            # A sink sees only itself: its output is its value (eq. 6).
            sink_k, sink_v, own = ops.rotate_sinks(heads, sink_cos, sink_sin, n_tokens, n_heads, zero_value)
        rotated, scores = ops.rotate_heads(heads, cos, sin, sink_k, batch, n_heads, scale)
        q, k = (x.transpose(1, 2) for x in rotated.split([n_heads, n_kv], dim=-2))
        v = heads[:n_tokens, n_heads + n_kv :].unflatten(0, (batch, -1)).transpose(1, 2)
        out, lse, rest = content_forward(q, k, v)
        if sink_v is not None and own is not None:
            # Save the merged output and log-sum-exp: from them, content attention's backward rebuilds the joint softmax.
            rows, lse = ops.merge_flat(scores, out, lse, sink_v, own)
        else:
            if sink_logit is not None:
                merged = torch.logaddexp(lse, sink_logit.to(lse.dtype)[:, None])
                out, lse = (out * torch.exp(lse - merged)[..., None]).to(out.dtype), merged
            rows = out.transpose(1, 2).flatten(0, 1)
        ctx.save_for_backward(q, k, v, scores, rows, lse, cos, sin, sink_cos, sink_sin, sink_logit, sink_k, sink_v, *rest)
        ctx.zero_value = zero_value
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, scores, rows, lse, cos, sin, sink_cos, sink_sin, sink_logit, sink_k, sink_v, *rest = ctx.saved_tensors
        batch, _, tokens, width = q.shape
        out, flowing = (ops.by_sample(x, batch, tokens) for x in (rows, grad))
        grads = content_backward(flowing, q, k, v, out, lse, rest)
        grad_logit = None
        if sink_logit is not None:  # softmax backward with value 0: -weight * (grad . out)
            weights = torch.exp(sink_logit.to(lse.dtype)[:, None] - lse)
            grad_logit = -(weights * (flowing * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sink_logit.dtype)
        if sink_k is None:
            grad_heads = ops.join_heads(*grads, cos, sin)
        else:
            had, angles = [q, rows, lse, scores], [cos, sin, sink_cos, sink_sin]
            given = (list(grads), had, [sink_k, sink_v], angles, ctx.zero_value, 1 / math.sqrt(width))
            grad_heads = ops.merge_flat_backward(grad, *given)
        return grad_heads, None, None, None, None, grad_logit, None, None, None


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the fused norm: x + update, and the sum's RMSNorm in `dtype`, that of the matmuls."""
    return _AddNorm.apply(x, update, weight, eps, dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed = ops.add_norm(x, update, weight, eps, dtype)
        x = x.view_as(x) if update is None else total  # autograd needs an output other than the input
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.update_dtype = eps, None if update is None else update.dtype
        return x, normed

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        alike = ctx.update_dtype == x.dtype  # x and update get the same tensor
        update_dtype = None if alike else ctx.update_dtype
        grad_x, grad_update, grad_weight = ops.add_norm_backward(grad_sum, grad_normed, x, weight, ctx.eps, update_dtype)
        if alike:
            grad_update = grad_x
        return grad_x, None if ctx.update_dtype is None else grad_update, grad_weight, None, None


def add_last_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute only the RMSNorm of x + update, in `dtype`: nothing else needs the sum."""
    return add_norm(x, update, weight, eps, dtype)[1]


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias in x's dtype."""
    return _Project.apply(x, weight, bias)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return functional.linear(x, matrix, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = ops.weight_gradient(rows, x.flatten(0, -2), ctx.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None if ctx.bias_dtype is None else rows.sum(0, dtype=ctx.bias_dtype)
        return grad @ matrix, grad_weight, grad_bias


def swiglu_matmul(gate_up: Tensor, weight: Tensor) -> Tensor:
    """Compute (silu(gate) * up) @ weight.T. Saves gate_up alone, which the backward reads once."""
    return _SwigluMatmul.apply(gate_up, weight)


class _SwigluMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return functional.linear(ops.swiglu(gate_up), weight.to(gate_up.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        grad_gate_up, hidden = ops.swiglu_backward(gate_up, grad @ weight.to(grad.dtype))
        if not ctx.needs_input_grad[1]:
            return grad_gate_up, None
        return grad_gate_up, ops.weight_gradient(grad.flatten(0, -2), hidden.flatten(0, -2), weight.dtype)
