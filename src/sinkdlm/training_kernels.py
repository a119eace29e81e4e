"""Triton kernels for training on a GPU: what torch and its compiler do in several passes over memory, in one.

Owns how, not what: operators.py says what each computes, in torch's own operations, and the tests hold the two together. Sums in
float32. Imported only where it is used, because Triton is.

B rows, T tokens, S sinks, H query heads, K key/value heads, D head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 64  # of a program that merges
_COLUMNS = 1024  # of one that computes SwiGLU
_VOCABULARY = 4096  # logits that a program holds at a time


@triton.jit
def _merge(
    q, content, lse, sink_k, sink_v, out, merged, scale, n_tokens,
    q_b, q_h, q_t, o_b, o_h, o_t, k_b, k_h, k_s, v_b, v_h, v_s,
    n_heads: tl.constexpr, group: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    width_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    b, h = row // n_heads, row % n_heads
    token, lane = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width_block)
    exists, wide = token < n_tokens, lane < width
    inside = exists[:, None] & wide[None, :]
    place = o_b * b + o_h * h + o_t * token[:, None] + lane[None, :]
    queries = tl.load(q + q_b * b + q_h * h + q_t * token[:, None] + lane[None, :], inside, 0).to(tl.float32)
    sum_ = tl.load(content + place, inside, 0).to(tl.float32)
    most = tl.load(lse + row * n_tokens + token, exists, 0)
    total = tl.full([block], 1.0, tl.float32)  # of all weights, as multiples of exp(most)
    for s in tl.static_range(n_sinks):
        key = tl.load(sink_k + k_b * b + k_h * (h // group) + k_s * s + lane, wide, 0).to(tl.float32)
        value = tl.load(sink_v + v_b * b + v_h * (h // group) + v_s * s + lane, wide, 0).to(tl.float32)
        score = tl.sum(queries * key[None, :], 1) * scale
        higher = tl.maximum(most, score)
        kept, weight = tl.exp(most - higher), tl.exp(score - higher)
        sum_ = sum_ * kept[:, None] + weight[:, None] * value[None, :]
        total = total * kept + weight
        most = higher
    tl.store(out + place, (sum_ / total[:, None]).to(out.dtype.element_ty), inside)
    tl.store(merged + row * n_tokens + token, most + tl.log(total), exists)


def merge_sinks(q: Tensor, content: Tensor, lse: Tensor, sink_k: Tensor, sink_v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """operators.merge_sinks."""
    batch, heads, tokens, width = q.shape
    q, content, sink_k, sink_v = (_narrow(x) for x in (q, content, sink_k, sink_v))
    lse = lse.contiguous()
    out, merged = torch.empty_like(content), torch.empty_like(lse)
    _merge[(triton.cdiv(tokens, _TOKENS), batch * heads)](
        q, content, lse, sink_k, sink_v, out, merged, scale, tokens,
        *q.stride()[:3], *content.stride()[:3], *_strides(sink_k, batch), *_strides(sink_v, batch),
        n_heads=heads, group=heads // sink_k.shape[1], n_sinks=sink_k.shape[2], width=width,
        width_block=triton.next_power_of_2(width), block=_TOKENS, num_warps=8,
    )  # fmt: skip
    return out, merged


def _narrow(x: Tensor) -> Tensor:
    """With the last dimension laid out element by element."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(sinks: Tensor, batch: int) -> tuple[int, int, int]:
    """Of rows, heads and sinks. What all rows share has one row."""
    by_row, by_head, by_sink, _ = sinks.stride()
    return (by_row if sinks.shape[0] == batch else 0), by_head, by_sink


@triton.jit
def _merge_backward(
    grad, q, out, lse, sink_k, sink_v, grad_q, into_q, into_k, into_v, scale, n_tokens,
    g_b, g_h, g_t, q_b, q_h, q_t, o_b, o_h, o_t, d_b, d_h, d_t, k_b, k_h, k_s, v_b, v_h, v_s,
    n_heads: tl.constexpr, group: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    width_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    b, h = row // n_heads, row % n_heads
    token, lane = part * block + tl.arange(0, block), tl.arange(0, width_block)
    exists, wide = token < n_tokens, lane < width
    inside = exists[:, None] & wide[None, :]
    grads = tl.load(grad + g_b * b + g_h * h + g_t * token[:, None] + lane[None, :], inside, 0).to(tl.float32)
    queries = tl.load(q + q_b * b + q_h * h + q_t * token[:, None] + lane[None, :], inside, 0).to(tl.float32)
    outs = tl.load(out + o_b * b + o_h * h + o_t * token[:, None] + lane[None, :], inside, 0).to(tl.float32)
    place = d_b * b + d_h * h + d_t * token[:, None] + lane[None, :]
    total = tl.load(grad_q + place, inside, 0).to(tl.float32)
    mean = tl.sum(grads * outs, 1)
    most = tl.load(lse + row * n_tokens + token, exists, 0)
    for s in tl.static_range(n_sinks):
        key = tl.load(sink_k + k_b * b + k_h * (h // group) + k_s * s + lane, wide, 0).to(tl.float32)
        value = tl.load(sink_v + v_b * b + v_h * (h // group) + v_s * s + lane, wide, 0).to(tl.float32)
        weight = tl.exp(tl.sum(queries * key[None, :], 1) * scale - most)
        weight = tl.where(exists, weight, 0.0)
        turn = weight * (tl.sum(grads * value[None, :], 1) - mean) * scale
        total += turn[:, None] * key[None, :]
        spot = ((row * tl.num_programs(0) + part) * n_sinks + s) * width + lane
        tl.store(into_k + spot, tl.sum(turn[:, None] * queries, 0), wide)
        tl.store(into_v + spot, tl.sum(weight[:, None] * grads, 0), wide)
    tl.store(into_q + place, total.to(into_q.dtype.element_ty), inside)


def merge_sinks_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sink_k: Tensor, sink_v: Tensor, grad_q: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """operators.merge_sinks_backward."""
    batch, heads, tokens, width = q.shape
    grad, q, out, sink_k, sink_v, grad_q = (_narrow(x) for x in (grad, q, out, sink_k, sink_v, grad_q))
    n_sinks, n_parts = sink_k.shape[2], triton.cdiv(tokens, _TOKENS)
    into_q = torch.empty_like(grad_q)
    # Each program's own sums, added up in a fixed order afterwards: no atomics, the same bits every time.
    parts = torch.empty(2, batch, heads, n_parts, n_sinks, width, dtype=torch.float32, device=q.device)
    _merge_backward[(n_parts, batch * heads)](
        grad, q, out, lse.contiguous(), sink_k, sink_v, grad_q, into_q, parts[0], parts[1], scale, tokens,
        *grad.stride()[:3], *q.stride()[:3], *out.stride()[:3], *grad_q.stride()[:3],
        *_strides(sink_k, batch), *_strides(sink_v, batch),
        n_heads=heads, group=heads // sink_k.shape[1], n_sinks=n_sinks, width=width,
        width_block=triton.next_power_of_2(width), block=_TOKENS, num_warps=8,
    )  # fmt: skip
    grad_k, grad_v = parts.sum(3).unflatten(2, (sink_k.shape[1], -1)).sum(3)  # (B, K, S, D) each
    if sink_k.shape[0] == 1:
        grad_k, grad_v = grad_k.sum(0, keepdim=True), grad_v.sum(0, keepdim=True)
    return into_q, grad_k.to(sink_k.dtype), grad_v.to(sink_v.dtype)


@triton.jit
def _swiglu_backward(gate_up, grad, into, out, n, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    gate = tl.load(gate_up + row * 2 * n + column, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + column, inside, 0).to(tl.float32)
    given = tl.load(grad + row * n + column, inside, 0).to(tl.float32)
    chance = 1 / (1 + tl.exp(-gate))
    silu = (gate * chance).to(out.dtype.element_ty).to(tl.float32)  # rounded as the forward rounds it
    tl.store(out + row * n + column, (silu * up).to(out.dtype.element_ty), inside)
    slope = chance * (1 + gate * (1 - chance))
    tl.store(into + row * 2 * n + column, (given * up * slope).to(into.dtype.element_ty), inside)
    tl.store(into + row * 2 * n + n + column, (given * silu).to(into.dtype.element_ty), inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """operators.swiglu_backward."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    n = grad.shape[-1]
    into, out = torch.empty_like(gate_up), torch.empty_like(grad)
    block = min(_COLUMNS, triton.next_power_of_2(n))
    _swiglu_backward[(grad.numel() // n, triton.cdiv(n, block))](gate_up, grad, into, out, n, block=block)
    return into, out


@triton.jit
def _nll(logits, targets, nll, grad, n, exclude, wants: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most, total = tl.full([block], -3e38, tl.float32), tl.zeros([block], tl.float32)  # finite: inf - inf is no number
    for begin in range(0, n, block):
        column = begin + tl.arange(0, block)
        score = tl.load(logits + row * n + column, (column < n) & (column != exclude), float("-inf"))
        higher = tl.maximum(most, score)
        total = total * tl.exp(most - higher) + tl.exp(score - higher)
        most = higher
    peak = tl.max(most, 0)
    whole = peak + tl.log(tl.sum(total * tl.exp(most - peak), 0))
    target = tl.load(targets + row)
    loss = whole - tl.load(logits + row * n + target)
    tl.store(nll + row, loss)
    if wants:
        # At the target p - 1 = expm1(-nll), by its series where p is near 1 and the difference would round away.
        small = loss * (-1 + loss * (0.5 + loss * (-1 / 6 + loss * (1 / 24))))
        surplus = tl.where(loss < 0.05, small, tl.exp(-loss) - 1)
        for begin in range(0, n, block):
            column = begin + tl.arange(0, block)
            score = tl.load(logits + row * n + column, (column < n) & (column != exclude), float("-inf"))
            chance = tl.where(column == target, surplus, tl.exp(score - whole))
            tl.store(grad + row * n + column, chance.to(grad.dtype.element_ty), column < n)


def nll_of_logits(
    logits: Tensor, targets: Tensor, exclude: int | None, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """logits (N, V) float32 -> nll (N,) and, in grad_dtype, p - onehot(target) (N, V). `exclude` is no outcome."""
    n_rows, n = logits.shape
    nll = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    grad = None if grad_dtype is None else torch.empty_like(logits, dtype=grad_dtype)
    block = min(_VOCABULARY, triton.next_power_of_2(n))
    _nll[(n_rows,)](
        logits, targets, nll, nll if grad is None else grad, n, -1 if exclude is None else exclude,
        wants=grad is not None, block=block, num_warps=8,
    )  # fmt: skip
    return nll, grad
