"""Operators of a training step: each in plain torch, with a Triton kernel on a GPU.

The plain forms run without a GPU, and the tests compare the kernels with them. They have no gradients: fast/functions.py calls
them from autograd functions with their own backward.

B batch, T tokens, S sinks, N rows behind the B T flat tokens (sinks, then zero padding), H query heads, K key/value heads, D head
width, F width of SwiGLU's output.
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
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return _wide(x).repeat_interleave(heads // x.shape[1], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in the angles' dtype; -sin rotates back."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@operator(_sink_attention)
def rotate_sinks(
    heads: Tensor, cos: Tensor, sin: Tensor, n_tokens: int, n_heads: int, zero_value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sinks' keys, rotated by cos and sin (1, S, 1, D/2), and values, (1, K, S, D) each; and their attention output
    (N, H, D), which is their value, as they see only themselves, then zeros. heads (n_tokens + N, H + 2K, D): tokens, then
    sinks."""
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
    """Rotate queries and keys of heads (B T or more, H + 2K, D) by cos and sin (1 or B, T, 1, D/2) into (B, T, H + K, D). Also
    return the queries' scores on the sinks (B, T, H, S), times scale; S = 0 without sinks."""
    n_rotated, tokens = (heads.shape[1] + n_heads) // 2, cos.shape[1]
    rotated = _rotate(heads[: batch * tokens, :n_rotated].unflatten(0, (batch, tokens)), cos, sin).to(heads.dtype)
    if sink_k is None:
        return rotated, heads.new_empty(batch, tokens, n_heads, 0, dtype=torch.promote_types(heads.dtype, torch.float32))
    queries = rotated[:, :, :n_heads].transpose(1, 2)
    return rotated, ((_wide(queries) @ _repeat(sink_k, n_heads).mT) * scale).transpose(1, 2).contiguous()


@operator(_sink_attention)
def merge_flat(scores: Tensor, content: Tensor, lse: Tensor, sink_v: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Merge sinks, with scores (B, T, H, S), into attention over content: its output (B, H, T, D) and log-sum-exp (B, H, T).
    Returns flat tokens (B T + N, H, D), the last N of which are `behind` (N, H, D), and the new log-sum-exp."""
    scores = scores.transpose(1, 2)
    merged = torch.logaddexp(lse, scores.logsumexp(-1))
    out = _wide(content) * torch.exp(lse - merged)[..., None]
    out = out + torch.exp(scores - merged[..., None]) @ _repeat(sink_v, scores.shape[1])
    return torch.cat([out.to(content.dtype).transpose(1, 2).flatten(0, 1), behind]), merged.contiguous()


def _sink_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sink_k: Tensor, sink_v: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the sinks' scores (B, H, T, S), times scale, and of their keys and values."""
    heads, n_kv = q.shape[1], sink_k.shape[1]
    weights = torch.exp(scores - lse[..., None])  # (B, H, T, S)
    mean = (_wide(grad) * _wide(out)).sum(-1, keepdim=True)
    score_grads = weights * (_wide(grad) @ _repeat(sink_v, heads).mT - mean) * scale
    grad_k, grad_v = ((x.mT @ _wide(y)).unflatten(1, (n_kv, -1)).sum(2) for x, y in ((score_grads, q), (weights, grad)))
    return score_grads, grad_k.sum(0, keepdim=True), grad_v.sum(0, keepdim=True)


def by_sample(rows: Tensor, batch: int, tokens: int) -> Tensor:
    """View flat tokens (B T or more, H, D) as (B, H, T, D)."""
    return rows[: batch * tokens].unflatten(0, (batch, tokens)).transpose(1, 2)


@operator(_sink_attention)
def join_heads(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate gradients of q and k back by cos and sin (1 or B, T, 1, D/2); join them with v's: (B T, H + 2K, D)."""
    rows = [_rotate(grad.transpose(1, 2), cos, -sin) for grad in (grad_q, grad_k)]
    return torch.cat([row.to(grad_k.dtype) for row in (*rows, grad_v.transpose(1, 2))], dim=2).flatten(0, 1)


@operator(_sink_attention)
def merge_flat_backward(
    grad: Tensor, grads: list[Tensor], had: list[Tensor], sinks: list[Tensor], angles: list[Tensor], zero_value: bool, scale: float
) -> Tensor:
    """Compute the backward of rotate_sinks, rotate_heads and merge_flat: the gradient of heads (B T + N, H + 2K, D).

    It is join_heads, plus q's gradient through the sinks' scores, plus the rows of the sinks. grad: of merge_flat's flat tokens.
    grads: of q, k and v, by the backward of content attention. had: q, merge_flat's flat tokens and log-sum-exp, scores. sinks:
    their keys and values. angles: cos and sin of tokens, then of sinks.
    """
    (q, rows, lse, scores), (sink_k, sink_v), (cos, sin, sink_cos, sink_sin) = had, sinks, angles
    batch, n_heads, tokens, _ = q.shape
    n_kv, n_sinks = sink_k.shape[1:3]
    flowing, out = (by_sample(x, batch, tokens) for x in (grad, rows))
    score_grads, to_k, to_v = _sink_backward(flowing, q, out, lse, sink_k, sink_v, scores.transpose(1, 2), scale)
    joined = join_heads.plain(_wide(grads[0]) + score_grads @ _repeat(sink_k, n_heads), grads[1], grads[2], cos, sin)
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
    """Compute silu(gate) * up: (..., 2 F) -> (..., F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@operator(_dense)
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate_up's gradient, and swiglu's output once more: recomputing is cheaper than keeping it."""
    gate, up = (_wide(half) for half in gate_up.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    silu = _wide((gate * chance).to(gate_up.dtype))
    slope = chance * (1 + gate * (1 - chance))
    halves = [_wide(grad) * up * slope, _wide(grad) * silu]
    return torch.cat(halves, dim=-1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)


@operator(_dense)
def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the fused norm: x + update (empty without an update), and the sum's RMSNorm in `dtype`."""
    total = x if update is None else x + update
    wide = torch.promote_types(total.dtype, weight.dtype)
    normed = torch.nn.functional.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps)
    return x.new_empty(0) if update is None else total, normed.to(dtype)


@operator(_dense)
def add_norm_backward(
    grad_sum: Tensor, grad_normed: Tensor, x: Tensor, weight: Tensor, eps: float, update_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x, of the update (the same in update_dtype; empty where that is None) and of weight.

    x is the sum, read by the residual stream (its gradient: grad_sum) and by the norm (grad_normed)."""
    precise = torch.promote_types(x.dtype, torch.float32)
    values, grads = x.to(precise), grad_normed.to(precise)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = values * scale
    grad_weight = (grads * normed).flatten(0, -2).sum(0)
    grads = grads * weight.to(precise)
    whole = grad_sum.to(precise) + (grads - normed * (grads * normed).mean(-1, keepdim=True)) * scale
    update = x.new_empty(0) if update_dtype is None else whole.to(update_dtype, copy=True)
    return whole.to(x.dtype), update, grad_weight.to(weight.dtype)


@operator(_dense)
def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute grad.T @ x, (M, N) and (M, K) -> (N, K), in the weight's `dtype`, without rounding to theirs in between."""
    return grad.to(dtype).mT @ x.to(dtype)
