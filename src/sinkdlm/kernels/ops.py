"""Operators of a training step: what each computes, in torch's own operations, and the Triton kernel that does it on a GPU.

The plain forms run wherever there is no GPU, and are what the tests hold the kernels to. Gradients are the callers':
fast/functions.py calls these from functions that have their own backward.

B batch, T tokens, S sinks, N flat tokens behind the others (the sinks, and zeros that fill up), H query heads, K key/value heads,
D head width, F columns of SwiGLU's result.
"""

from types import ModuleType

import torch
from torch import Tensor

from sinkdlm.kernels.operator import operator


def _sink_attention() -> ModuleType:
    from sinkdlm.kernels import sink_attention

    return sink_attention


def _dense() -> ModuleType:
    from sinkdlm.kernels import dense

    return dense


def _inference() -> ModuleType:
    from sinkdlm.kernels import inference

    return inference


def _wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return _wide(x).repeat_interleave(heads // x.shape[1], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the angles' precision; by -sin it rotates back."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@operator(_sink_attention)
def rotate_sinks(
    heads: Tensor, cos: Tensor, sin: Tensor, n_tokens: int, n_heads: int, zero_value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the sinks, whose rows lie behind n_tokens of heads (n_tokens + N, H + 2K, D): their keys, rotated by cos and sin
    (1, S, 1, D/2), and their values, (1, K, S, D) each; and what each makes of itself, its value for every query head
    (N, H, D), zeros behind the last sink's."""
    n_sinks, n_kv = cos.shape[1], (heads.shape[1] - n_heads) // 2
    k, v = heads[n_tokens : n_tokens + n_sinks, n_heads:].split([n_kv, n_kv], dim=1)
    rotated = _rotate(k, cos[0], sin[0]).to(heads.dtype)
    v = torch.zeros_like(v) if zero_value else v
    own = v.repeat_interleave(n_heads // n_kv, dim=1)
    own = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, heads.shape[0] - n_tokens - n_sinks))
    key, value = (x.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format) for x in (rotated, v))
    return key, value, own


@operator(_sink_attention)
def rotate_heads(
    heads: Tensor, cos: Tensor, sin: Tensor, sink_k: Tensor | None, batch: int, n_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys of heads (B T or more, H + 2K, D), rotated by cos and sin (1 or B, T, 1, D/2): (B, T, H + K, D); and the
    queries' scores on the sinks (B, T, H, S), times scale; S = 0 where there are none."""
    n_rotated, tokens = (heads.shape[1] + n_heads) // 2, cos.shape[1]
    rotated = _rotate(heads[: batch * tokens, :n_rotated].unflatten(0, (batch, tokens)), cos, sin).to(heads.dtype)
    if sink_k is None:
        return rotated, heads.new_empty(batch, tokens, n_heads, 0, dtype=torch.promote_types(heads.dtype, torch.float32))
    queries = rotated[:, :, :n_heads].transpose(1, 2)
    return rotated, ((_wide(queries) @ _repeat(sink_k, n_heads).mT) * scale).transpose(1, 2).contiguous()


@operator(_sink_attention)
def merge_flat(scores: Tensor, content: Tensor, lse: Tensor, sink_v: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the sinks, by their scores (B, T, H, S), to the softmax of attention over content (B, H, T, D) with its log-sum-exp
    (B, H, T): the whole as flat tokens (B T + N, H, D), with `behind` (N, H, D) at its end, and the new log-sum-exp."""
    scores = scores.transpose(1, 2)
    merged = torch.logaddexp(lse, scores.logsumexp(-1))
    out = _wide(content) * torch.exp(lse - merged)[..., None]
    out = out + torch.exp(scores - merged[..., None]) @ _repeat(sink_v, scores.shape[1])
    return torch.cat([out.to(content.dtype).transpose(1, 2).flatten(0, 1), behind]), merged.contiguous()


def _sink_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sink_k: Tensor, sink_v: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sinks' scores, times scale, (B, H, T, S), of their keys and of their values."""
    heads, n_kv = q.shape[1], sink_k.shape[1]
    weights = torch.exp(scores - lse[..., None])  # (B, H, T, S)
    mean = (_wide(grad) * _wide(out)).sum(-1, keepdim=True)
    score_grads = weights * (_wide(grad) @ _repeat(sink_v, heads).mT - mean) * scale
    grad_k, grad_v = ((x.mT @ _wide(y)).unflatten(1, (n_kv, -1)).sum(2) for x, y in ((score_grads, q), (weights, grad)))
    return score_grads, grad_k.sum(0, keepdim=True), grad_v.sum(0, keepdim=True)


def by_sample(rows: Tensor, batch: int, tokens: int) -> Tensor:
    """The tokens' (B T or more, H, D) as (B, H, T, D)."""
    return rows[: batch * tokens].unflatten(0, (batch, tokens)).transpose(1, 2)


def _join(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows = [_rotate(grad.transpose(1, 2), cos, -sin) for grad in (grad_q, grad_k)]
    return torch.cat([row.to(grad_k.dtype) for row in (*rows, grad_v.transpose(1, 2))], dim=2).flatten(0, 1)


@operator(_sink_attention)
def join_heads(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of q, k (rotated by cos and sin, (1 or B, T, 1, D/2)) and v, (B, heads, T, D) each, as one of (B T, H + 2K, D)."""
    return _join(grad_q, grad_k, grad_v, cos, sin)


@operator(_sink_attention)
def merge_flat_backward(
    grad: Tensor, grads: list[Tensor], had: list[Tensor], sinks: list[Tensor], angles: list[Tensor], zero_value: bool, scale: float
) -> Tensor:
    """The backward of rotate_sinks, rotate_heads and merge_flat, (B T + N, H + 2K, D): as join_heads, with what flows to q through
    sinks, and the sinks' own rows behind the tokens'.

    grad: of rows. grads: what the content's own backward gave for q, k and v. had: q, rows, lse and scores. sinks: their keys and
    values. angles: cos and sin of the tokens, and of the sinks.
    """
    (q, rows, lse, scores), (sink_k, sink_v), (cos, sin, sink_cos, sink_sin) = had, sinks, angles
    batch, n_heads, tokens, _ = q.shape
    n_kv, n_sinks = sink_k.shape[1:3]
    flowing, out = (by_sample(x, batch, tokens) for x in (grad, rows))
    score_grads, to_k, to_v = _sink_backward(flowing, q, out, lse, sink_k, sink_v, scores.transpose(1, 2), scale)
    joined = _join(_wide(grads[0]) + score_grads @ _repeat(sink_k, n_heads), grads[1], grads[2], cos, sin)
    behind = grad[batch * tokens :]
    into = joined.new_zeros(behind.shape[0], *joined.shape[1:])
    rotated_back = _rotate(to_k[0].transpose(0, 1), sink_cos[0], -sink_sin[0])
    into[:n_sinks, n_heads : n_heads + n_kv] = rotated_back.to(into.dtype)
    if not zero_value:
        own = _wide(behind[:n_sinks]).unflatten(1, (n_kv, -1)).sum(2)
        into[:n_sinks, n_heads + n_kv :] = (own + to_v[0].transpose(0, 1)).to(into.dtype)
    return torch.cat([joined, into])


@operator(_inference)
def swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F): silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@operator(_dense)
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, and once more what swiglu gave: cheaper to compute here than to keep."""
    gate, up = (_wide(half) for half in gate_up.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    silu = _wide((gate * chance).to(gate_up.dtype))
    slope = chance * (1 + gate * (1 - chance))
    halves = [_wide(grad) * up * slope, _wide(grad) * silu]
    return torch.cat(halves, dim=-1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)


@operator(_dense)
def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The fused norm: x + update (empty without an update), and rms_norm of the sum times weight in `dtype`."""
    total = x if update is None else x + update
    wide = torch.promote_types(total.dtype, weight.dtype)
    normed = torch.nn.functional.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps)
    return x.new_empty(0) if update is None else total, normed.to(dtype)


@operator(_dense)
def add_norm_backward(
    grad_sum: Tensor | None, grad_normed: Tensor, x: Tensor, weight: Tensor, eps: float, update_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the update that was added to make it (the same, in update_dtype; empty where that is None) and of weight.

    x had two consumers: the residual stream (grad_sum, or None) and the norm (grad_normed)."""
    precise = torch.promote_types(x.dtype, torch.float32)
    values, grads = x.to(precise), grad_normed.to(precise)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = values * scale
    grad_weight = (grads * normed).flatten(0, -2).sum(0)
    grads = grads * weight.to(precise)
    whole = (grads - normed * (grads * normed).mean(-1, keepdim=True)) * scale
    whole = whole if grad_sum is None else grad_sum.to(precise) + whole
    update = x.new_empty(0) if update_dtype is None else whole.to(update_dtype, copy=True)
    return whole.to(x.dtype), update, grad_weight.to(weight.dtype)


@operator(_dense)
def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad (M, N) and x (M, K) of a product -> grad.T @ x, (N, K), in the weight's `dtype`: not rounded to theirs on the way."""
    return grad.to(dtype).mT @ x.to(dtype)
