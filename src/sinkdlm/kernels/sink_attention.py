"""Triton kernels of attention in training: rotary with the sinks' scores, merging sinks into attention over content, and both
backwards, each in one pass over memory.

ops.py defines each function in plain torch. Sums are float32. Imported only where a kernel runs: importing Triton is slow.

B rows, T tokens, S sinks, H query heads, K key/value heads, D head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MERGED_TILE, _MERGE_WARPS = 1024, 2  # _merge: elements and warps of a program
_BACK_TILE, _BACK_WARPS, _BACK_STAGES = 1024, 2, 3  # _merge_backward: elements of a tile, warps, pipeline stages
_SPAN, _LEAST_SPAN = 512, 64  # _merge_backward: tokens of a program, at most and at least
_BUSY = 4  # _merge_backward: programs per SM below which spans get shorter
_RETURNED_TILE, _RETURN_WARPS = 8192, 4  # _return_sinks: elements and warps of a program
_WARPS = 8  # _rotate_heads: most warps with sinks
_JOINED_WARPS, _JOINED_BY_WARP = 4, 768  # _join_heads: most warps, rotary pairs of a warp
_ROTATE_WARPS, _SCORED_BY_WARP = 4, 1024  # _rotate_heads: warps without sinks; rotary pairs of a warp with them


@triton.jit
def _merge(
    scores, content, lse, sink_v, behind, out, merged, n_tokens, n_behind, c_b, c_h, c_t, o_b, o_h, o_t, v_h, v_s,
    n_heads: tl.constexpr, group: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    width_block: tl.constexpr, block: tl.constexpr, behind_block: tl.constexpr,
):  # fmt: skip
    """A program merges some tokens of one head by online softmax. Neighbouring programs take neighbouring heads of the same tokens,
    which are contiguous in memory. A head's first program also copies the rows behind the tokens."""
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(0) % n_heads
    row = b * n_heads + h
    token, column = tl.program_id(0) // n_heads * block + tl.arange(0, block), tl.arange(0, width_block)
    exists, wide = token < n_tokens, column < width
    inside = exists[:, None] & wide[None, :]
    sum_ = tl.load(content + c_b * b + c_h * h + c_t * token[:, None] + column[None, :], inside, 0).to(tl.float32)
    most = tl.load(lse + row * n_tokens + token, exists, 0)
    total = tl.full([block], 1.0, tl.float32)  # sum of softmax weights, relative to exp(most)
    for s in tl.static_range(n_sinks):
        value = tl.load(sink_v + v_h * (h // group) + v_s * s + column, wide, 0).to(tl.float32)
        score = tl.load(scores + ((b * n_tokens + token) * n_heads + h) * n_sinks + s, exists, 0)
        higher = tl.maximum(most, score)
        kept, weight = tl.exp(most - higher), tl.exp(score - higher)
        sum_ = sum_ * kept[:, None] + weight[:, None] * value[None, :]
        total = total * kept + weight
        most = higher
    place = o_b * b + o_h * h + o_t * token[:, None] + column[None, :]
    tl.store(out + place, (sum_ / total[:, None]).to(out.dtype.element_ty), inside)
    tl.store(merged + row * n_tokens + token, most + tl.log(total), exists)
    if (tl.program_id(0) < n_heads) & (tl.program_id(1) == 0):
        line = tl.arange(0, behind_block)
        there = (line < n_behind)[:, None] & wide[None, :]
        given = tl.load(behind + (line[:, None] * n_heads + h) * width + column[None, :], there, 0)
        tl.store(out + o_b * tl.num_programs(1).to(tl.int64) + o_h * h + o_t * line[:, None] + column[None, :], given, there)


def merge_flat(scores: Tensor, content: Tensor, lse: Tensor, sink_v: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, width = content.shape
    flat = content.new_empty(batch * tokens + behind.shape[0], heads, width)
    content, sink_v, lse, into = _narrow(content), _narrow(sink_v), lse.contiguous(), _by_sample(flat, batch, tokens)
    merged = torch.empty_like(lse)
    wide = triton.next_power_of_2(width)
    block = max(1, _MERGED_TILE // wide)
    _merge[(triton.cdiv(tokens, block) * heads, batch)](
        scores.contiguous(), content, lse, sink_v, behind.contiguous(), into, merged, tokens, behind.shape[0],
        *content.stride()[:3], *into.stride()[:3], *sink_v.stride()[1:3],
        n_heads=heads, group=heads // sink_v.shape[1], n_sinks=sink_v.shape[2], width=width,
        width_block=wide, block=block, behind_block=triton.next_power_of_2(max(1, behind.shape[0])), num_warps=_MERGE_WARPS,
    )  # fmt: skip
    return flat, merged


def _by_sample(rows: Tensor, batch: int, tokens: int) -> Tensor:
    """View flat tokens (B T or more, H, D) as (B, H, T, D)."""
    return rows[: batch * tokens].unflatten(0, (batch, tokens)).transpose(1, 2)


def _narrow(x: Tensor) -> Tensor:
    """Make the last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _merge_backward(
    grad, q, scores, out, lse, sink_v, score_grads, into_k, into_v, scale, n_tokens,
    g_b, g_h, g_t, q_b, q_h, q_t, o_b, o_h, o_t, v_h, v_s,
    n_heads: tl.constexpr, group: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    width_block: tl.constexpr, block: tl.constexpr, n_blocks: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """A program takes one sink, one head and some tiles of tokens. It sums the gradients by tile, and over tokens at the end."""
    part, b, s = tl.program_id(0) // n_heads, tl.program_id(1).to(tl.int64), tl.program_id(2)
    h = tl.program_id(0) % n_heads
    row = b * n_heads + h
    column = tl.arange(0, width_block)
    wide = column < width
    value = tl.load(sink_v + v_h * (h // group) + v_s * s + column, wide, 0).to(tl.float32)[None, :]
    to_key, to_value = tl.zeros([block, width_block], tl.float32), tl.zeros([block, width_block], tl.float32)
    for step in tl.range(n_blocks, num_stages=stages):
        token = (part * n_blocks + step) * block + tl.arange(0, block)
        exists = token < n_tokens
        inside = exists[:, None] & wide[None, :]
        grads = tl.load(grad + g_b * b + g_h * h + g_t * token[:, None] + column[None, :], inside, 0).to(tl.float32)
        outs = tl.load(out + o_b * b + o_h * h + o_t * token[:, None] + column[None, :], inside, 0).to(tl.float32)
        queries = tl.load(q + q_b * b + q_h * h + q_t * token[:, None] + column[None, :], inside, 0).to(tl.float32)
        most = tl.load(lse + row * n_tokens + token, exists, 0)
        score = tl.load(scores + ((b * n_tokens + token) * n_heads + h) * n_sinks + s, exists, 0)
        weight = tl.where(exists, tl.exp(score - most), 0.0)
        score_grad = weight * tl.sum(grads * (value - outs), 1) * scale
        tl.store(score_grads + (row * n_tokens + token) * n_sinks + s, score_grad, exists)
        to_key += score_grad[:, None] * queries
        to_value += weight[:, None] * grads
    spot = ((row * (tl.num_programs(0) // n_heads) + part) * n_sinks + s) * width + column
    tl.store(into_k + spot, tl.sum(to_key, 0), wide)
    tl.store(into_v + spot, tl.sum(to_value, 0), wide)


def _sink_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sink_v: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, list[Tensor], int]:
    """Return gradients of the sinks' scores; partial sums of keys' and values' (B, H, parts, S, D); and the number of parts."""
    batch, heads, tokens, width = q.shape
    grad, q, out, sink_v = (_narrow(x) for x in (grad, q, out, sink_v))
    n_kv, n_sinks = sink_v.shape[1:3]
    wide = triton.next_power_of_2(width)
    block = max(1, _BACK_TILE // wide)
    n_blocks = max(1, _choose_span(batch * heads * n_sinks, tokens, q.device) // block)
    n_parts = triton.cdiv(tokens, block * n_blocks)
    score_grads = torch.empty(batch, heads, tokens, n_sinks, dtype=torch.float32, device=q.device)
    # A partial sum per program, added in a fixed order afterwards: without atomics, results are deterministic.
    parts = [torch.empty(batch, heads, n_parts, n_sinks, width, dtype=torch.float32, device=q.device) for _ in range(2)]
    _merge_backward[(n_parts * heads, batch, n_sinks)](
        grad, q, scores.contiguous(), out, lse.contiguous(), sink_v, score_grads, *parts, scale, tokens,
        *grad.stride()[:3], *q.stride()[:3], *out.stride()[:3], *sink_v.stride()[1:3],
        n_heads=heads, group=heads // n_kv, n_sinks=n_sinks, width=width,
        width_block=wide, block=block, n_blocks=n_blocks, stages=_BACK_STAGES, num_warps=_BACK_WARPS,
    )  # fmt: skip
    return score_grads, parts, n_parts


def _choose_span(n_heads: int, tokens: int, device: torch.device) -> int:
    """Choose how many tokens a program takes: fewer while SMs would idle. n_heads: B H S."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    span = _SPAN
    while span > _LEAST_SPAN and n_heads * triton.cdiv(tokens, span) < _BUSY * processors:
        span //= 2
    return span


@triton.jit
def _rotate_heads(
    heads, cos, sin, sink_k, rotated, scores, scale, n_tokens, heads_t, cos_b, sk_h, sk_s,
    n_heads: tl.constexpr, n_kv: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    heads_block: tl.constexpr, kv_block: tl.constexpr, half_block: tl.constexpr,
):  # fmt: skip
    """A program per token rotates its queries and keys and computes its queries' scores on the sinks."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0)
    half: tl.constexpr = width // 2
    column = tl.arange(0, half_block)[None, :]
    angle = cos_b * b + t * half + column
    c, s = tl.load(cos + angle, column < half).to(tl.float32), tl.load(sin + angle, column < half).to(tl.float32)
    source, into = heads + (b * n_tokens + t) * heads_t + column, rotated + (b * n_tokens + t) * (n_heads + n_kv) * width + column
    h, kv = tl.arange(0, heads_block)[:, None], tl.arange(0, kv_block)[:, None]
    mine, inside = (h < n_heads) & (column < half), (kv < n_kv) & (column < half)
    first = tl.load(source + h * width, mine, 0).to(tl.float32)
    second = tl.load(source + h * width + half, mine, 0).to(tl.float32)
    key_first = tl.load(source + (n_heads + kv) * width, inside, 0).to(tl.float32)
    key_second = tl.load(source + (n_heads + kv) * width + half, inside, 0).to(tl.float32)
    rotated_first = (first * c - second * s).to(rotated.dtype.element_ty)
    rotated_second = (second * c + first * s).to(rotated.dtype.element_ty)
    tl.store(into + h * width, rotated_first, mine)
    tl.store(into + h * width + half, rotated_second, mine)
    for sink in tl.static_range(n_sinks):
        place = sink_k + sk_h * (h // (n_heads // n_kv)) + sk_s * sink + column
        product = rotated_first.to(tl.float32) * tl.load(place, mine, 0).to(tl.float32)  # rounded, as attention reads queries
        product += rotated_second.to(tl.float32) * tl.load(place + half, mine, 0).to(tl.float32)
        score = tl.sum(product, 1, keep_dims=True) * scale
        tl.store(scores + ((b * n_tokens + t) * n_heads + h) * n_sinks + sink, score, h < n_heads)
    into += (n_heads + kv) * width
    tl.store(into, (key_first * c - key_second * s).to(rotated.dtype.element_ty), inside)
    tl.store(into + half, (key_second * c + key_first * s).to(rotated.dtype.element_ty), inside)


def rotate_heads(
    heads: Tensor, cos: Tensor, sin: Tensor, sink_k: Tensor | None, batch: int, n_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, width, n_kv = cos.shape[1], heads.shape[2], (heads.shape[1] - n_heads) // 2
    heads = heads if heads.stride()[1:] == (width, 1) else heads.contiguous()
    sink_k, n_sinks = (None, 0) if sink_k is None else (_narrow(sink_k), sink_k.shape[2])
    cos, sin = cos.contiguous(), sin.contiguous()
    rotated = heads.new_empty(batch, tokens, n_heads + n_kv, width)
    heads_block, half = triton.next_power_of_2(n_heads), triton.next_power_of_2(width // 2)
    warps = _ROTATE_WARPS if sink_k is None else min(_WARPS, max(1, heads_block * half // _SCORED_BY_WARP))
    scores = torch.empty(batch, tokens, n_heads, n_sinks, dtype=torch.float32, device=heads.device)
    _rotate_heads[(tokens, batch)](
        heads, cos, sin, heads if sink_k is None else sink_k, rotated, scores, scale, tokens, heads.stride(0),
        cos.stride(0) if cos.shape[0] > 1 else 0, *((0, 0) if sink_k is None else sink_k.stride()[1:3]),
        n_heads=n_heads, n_kv=n_kv, n_sinks=n_sinks, width=width,
        heads_block=heads_block, kv_block=triton.next_power_of_2(n_kv),
        half_block=half, num_warps=warps,
    )  # fmt: skip
    return rotated, scores


@triton.jit
def _join_heads(
    grad_q, grad_k, grad_v, score_grads, sink_k, cos, sin, heads, n_tokens,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, cos_b, sk_h, sk_s,
    n_heads: tl.constexpr, n_kv: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    heads_block: tl.constexpr, kv_block: tl.constexpr, half_block: tl.constexpr,
):  # fmt: skip
    """A program per token rotates its gradients back and joins them into one row."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0)
    half: tl.constexpr = width // 2
    column = tl.arange(0, half_block)[None, :]
    angle = cos_b * b + t * half + column
    c, s = tl.load(cos + angle, column < half).to(tl.float32), tl.load(sin + angle, column < half).to(tl.float32)
    row = heads + (b * n_tokens + t) * (n_heads + 2 * n_kv) * width + column
    h, kv = tl.arange(0, heads_block)[:, None], tl.arange(0, kv_block)[:, None]
    mine, inside = (h < n_heads) & (column < half), (kv < n_kv) & (column < half)
    source = grad_q + q_b * b + q_h * h + q_t * t + column
    first, second = tl.load(source, mine, 0).to(tl.float32), tl.load(source + half, mine, 0).to(tl.float32)
    for sink in tl.static_range(n_sinks):
        score_grad = tl.load(score_grads + ((b * n_heads + h) * n_tokens + t) * n_sinks + sink, h < n_heads, 0)
        key = sink_k + sk_h * (h // (n_heads // n_kv)) + sk_s * sink + column
        first += score_grad * tl.load(key, mine, 0).to(tl.float32)
        second += score_grad * tl.load(key + half, mine, 0).to(tl.float32)
    tl.store(row + h * width, (first * c + second * s).to(heads.dtype.element_ty), mine)
    tl.store(row + h * width + half, (second * c - first * s).to(heads.dtype.element_ty), mine)
    source = grad_k + k_b * b + k_h * kv + k_t * t + column
    first, second = tl.load(source, inside, 0).to(tl.float32), tl.load(source + half, inside, 0).to(tl.float32)
    spot = row + (n_heads + kv) * width
    tl.store(spot, (first * c + second * s).to(heads.dtype.element_ty), inside)
    tl.store(spot + half, (second * c - first * s).to(heads.dtype.element_ty), inside)
    source = grad_v + v_b * b + v_h * kv + v_t * t + column
    spot += n_kv * width
    tl.store(spot, tl.load(source, inside).to(heads.dtype.element_ty), inside)
    tl.store(spot + half, tl.load(source + half, inside).to(heads.dtype.element_ty), inside)


def join_heads(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, n_heads, tokens, width = grad_q.shape
    heads = grad_k.new_empty(batch * tokens, n_heads + 2 * grad_k.shape[1], width)
    _join_into(heads, [grad_q, grad_k, grad_v], cos, sin, None, None)
    return heads


def _join_into(
    into: Tensor, grads: list[Tensor], cos: Tensor, sin: Tensor, score_grads: Tensor | None, sink_k: Tensor | None
) -> None:
    """Write the joined gradients to the first B T rows of `into`. grads: of q, k and v."""
    grad_q, grad_k, grad_v = (_narrow(x) for x in grads)
    batch, n_heads, tokens, width = grad_q.shape
    n_kv = grad_k.shape[1]
    sink_k = None if sink_k is None else _narrow(sink_k)
    cos, sin = cos.contiguous(), sin.contiguous()
    heads_block, kv_block, half = (triton.next_power_of_2(n) for n in (n_heads, n_kv, width // 2))
    _join_heads[(tokens, batch)](
        grad_q, grad_k, grad_v, grad_q if score_grads is None else score_grads, grad_q if sink_k is None else sink_k,
        cos, sin, into, tokens,
        *grad_q.stride()[:3], *grad_k.stride()[:3], *grad_v.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0,
        *((0, 0) if sink_k is None else sink_k.stride()[1:3]),
        n_heads=n_heads, n_kv=n_kv, n_sinks=0 if score_grads is None else score_grads.shape[3], width=width,
        heads_block=heads_block, kv_block=kv_block, half_block=half,
        num_warps=min(_JOINED_WARPS, max(1, (heads_block + 2 * kv_block) * half // _JOINED_BY_WARP)),
    )  # fmt: skip


@triton.jit
def _sum_halves(parts, n_all, n_each, n_between, kv, row, column, wide, n_sinks, width: tl.constexpr, block: tl.constexpr,
                half_block: tl.constexpr):  # fmt: skip
    """Sum n_all partial gradients of a sink's key (or value), half by half: n_each are adjacent, the next n_between further on."""
    first, second = tl.zeros([block, half_block], tl.float32), tl.zeros([block, half_block], tl.float32)
    for begin in range(0, n_all, block):
        part = begin + tl.arange(0, block)
        place = (part // n_each * n_between + kv * n_each + part % n_each) * n_sinks + row
        source, inside = parts + place[:, None] * width + column[None, :], (part < n_all)[:, None] & wide[None, :]
        first += tl.load(source, inside, 0)
        second += tl.load(source + width // 2, inside, 0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _return_sinks(
    grad, from_k, from_v, cos, sin, into, n_all, n_each, n_between, n_sinks, n_heads,
    n_kv: tl.constexpr, group: tl.constexpr, width: tl.constexpr, half_block: tl.constexpr, zero_value: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """A program takes one row behind the tokens, and one head of its queries, keys or values."""
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = width // 2
    column = tl.arange(0, half_block)
    wide = column < half
    kv = (head - n_heads) % n_kv
    is_sink, is_key = (row < n_sinks) & (head >= n_heads), head < n_heads + n_kv
    n_all = tl.where(is_sink, n_all, 0)  # the other rows and heads have no parts to sum
    parts = from_k if is_key else from_v
    first, second = _sum_halves(parts, n_all, n_each, n_between, kv, row, column, wide, n_sinks, width, block, half_block)
    rotates = column < tl.where(is_sink & is_key, half, 0)
    c, s = (
        tl.load(cos + row * half + column, rotates, 1).to(tl.float32),
        tl.load(sin + row * half + column, rotates, 0).to(tl.float32),
    )
    left, right = first * c + second * s, second * c - first * s
    keeps = column < tl.where(is_sink & (head >= n_heads + n_kv), half, 0)
    for member in tl.static_range(group):
        source = grad + (row * n_heads + kv * group + member) * width + column
        left += tl.load(source, keeps, 0).to(tl.float32)
        right += tl.load(source + half, keeps, 0).to(tl.float32)
    if zero_value:
        left, right = tl.where(keeps, 0.0, left), tl.where(keeps, 0.0, right)
    place = into + (row * (n_heads + 2 * n_kv) + head) * width + column
    tl.store(place, left.to(into.dtype.element_ty), wide)
    tl.store(place + half, right.to(into.dtype.element_ty), wide)


def merge_flat_backward(
    grad: Tensor, grads: list[Tensor], had: list[Tensor], sinks: list[Tensor], angles: list[Tensor], zero_value: bool, scale: float
) -> Tensor:
    (q, rows, lse, scores), (sink_k, sink_v), (cos, sin, sink_cos, sink_sin) = had, sinks, angles
    batch, n_heads, tokens, width = q.shape
    n_kv, n_sinks = sink_k.shape[1:3]
    flowing, out = (_by_sample(x, batch, tokens) for x in (grad, rows))
    score_grads, parts, n_parts = _sink_backward(flowing, q, out, lse, sink_v, scores, scale)
    heads = grad.new_empty(grad.shape[0], n_heads + 2 * n_kv, width)
    n_each, behind = n_heads // n_kv * n_parts, grad[batch * tokens :].contiguous()
    half = triton.next_power_of_2(width // 2)
    block = min(max(1, _RETURNED_TILE // half), triton.next_power_of_2(batch * n_each))
    _return_sinks[(behind.shape[0], n_heads + 2 * n_kv)](
        behind, *parts, sink_cos.contiguous(), sink_sin.contiguous(), heads[batch * tokens :],
        batch * n_each, n_each, n_heads * n_parts, n_sinks, n_heads,
        n_kv=n_kv, group=n_heads // n_kv, width=width, half_block=half, zero_value=zero_value,
        block=block, num_warps=_RETURN_WARPS,
    )  # fmt: skip
    _join_into(heads, grads, cos, sin, score_grads, sink_k)
    return heads


@triton.jit
def _rotate_sinks(
    heads, cos, sin, sink_k, sink_v, own, n_sinks, n_heads, heads_t,
    n_kv: tl.constexpr, group: tl.constexpr, width: tl.constexpr, half_block: tl.constexpr, zero_value: tl.constexpr,
):  # fmt: skip
    """A program takes one row behind the tokens and one query head: it writes a sink's value or zeros, and per group its key."""
    row, h = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = width // 2
    column = tl.arange(0, half_block)
    kv, wide = h // group, column < half
    mine = column < tl.where(row < n_sinks, half, 0)
    leads = mine & (column < tl.where(h % group == 0, half, 0))
    key = heads + row.to(tl.int64) * heads_t + (n_heads + kv) * width + column
    c, s = tl.load(cos + row * half + column, leads, 0).to(tl.float32), tl.load(sin + row * half + column, leads, 0).to(tl.float32)
    first, second = tl.load(key, leads, 0).to(tl.float32), tl.load(key + half, leads, 0).to(tl.float32)
    spot = (kv * n_sinks + row) * width + column
    tl.store(sink_k + spot, (first * c - second * s).to(sink_k.dtype.element_ty), leads)
    tl.store(sink_k + spot + half, (second * c + first * s).to(sink_k.dtype.element_ty), leads)
    for part in tl.static_range(2):
        value = tl.load(key + n_kv * width + part * half, mine, 0)
        if zero_value:
            value = tl.zeros_like(value)
        tl.store(sink_v + spot + part * half, value, leads)
        tl.store(own + (row * n_heads + h) * width + part * half + column, value, wide)


def rotate_sinks(
    heads: Tensor, cos: Tensor, sin: Tensor, n_tokens: int, n_heads: int, zero_value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width, n_sinks, n_kv = heads.shape[2], cos.shape[1], (heads.shape[1] - n_heads) // 2
    heads = heads if heads.stride()[1:] == (width, 1) else heads.contiguous()
    sink_k, sink_v = (heads.new_empty(1, n_kv, n_sinks, width) for _ in range(2))
    own = heads.new_empty(heads.shape[0] - n_tokens, n_heads, width)
    _rotate_sinks[(own.shape[0], n_heads)](
        heads[n_tokens:], cos.contiguous(), sin.contiguous(), sink_k, sink_v, own, n_sinks, n_heads, heads.stride(0),
        n_kv=n_kv, group=n_heads // n_kv, width=width, half_block=triton.next_power_of_2(width // 2), zero_value=zero_value,
        num_warps=1,
    )  # fmt: skip
    return sink_k, sink_v, own
