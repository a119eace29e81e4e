"""Triton kernel of attention from a short span of tokens to the keys and values that a cache keeps.

Each query sees keys from the first one on, up to an end of its own, which is read on the device: no mask, no copy, no shape that
depends on how much is kept. A row's bits do not depend on the other rows. fast/attention.py has the plain form.

B rows, W tokens of a span, H query heads, K key/value heads, D head width, L keys.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _KEYS = 64, 64  # queries and keys of a tile
_WARPS, _STAGES = 4, 3
_LEAST = 16  # tiles of matmuls are no narrower


@triton.jit
def _span_attention(
    q, k, v, ends, logits, out, scale, n_tokens,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, e_b, e_t, o_b, o_h, o_t,
    group: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    has_logit: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """A program takes some queries of a group of heads, and all keys that they see, by online softmax."""
    part, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    line, column = part * rows + tl.arange(0, rows), tl.arange(0, wide)
    exists, inside = line < group * n_tokens, column < width
    head, token = kv * group + line // n_tokens, line % n_tokens
    end = tl.load(ends + e_b * b + e_t * token, exists, 0)
    last = tl.max(end, 0)
    both = exists[:, None] & inside[None, :]
    query = tl.load(q + q_b * b + q_h * head[:, None] + q_t * token[:, None] + column[None, :], both, 0)
    most, total = tl.full([rows], -1e30, tl.float32), tl.zeros([rows], tl.float32)
    if has_logit:
        most = tl.load(logits + head, exists, 0).to(tl.float32) * 1.4426950408889634  # log2(e)
        total += 1
    mixed = tl.zeros([rows, wide], tl.float32)
    for begin in range(0, last, keys):
        key = begin + tl.arange(0, keys)
        there = key < last
        place = (k_b * b + k_h * kv + k_t * key)[None, :] + column[:, None]
        score = tl.dot(query, tl.load(k + place, there[None, :] & inside[:, None], 0), input_precision=precision)
        score = tl.where(key[None, :] < end[:, None], score * scale, -float("inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        kept, weight = tl.exp2(most - higher), tl.exp2(score - higher[:, None])
        value = tl.load(v + (v_b * b + v_h * kv + v_t * key)[:, None] + column[None, :], there[:, None] & inside[None, :], 0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * kept[:, None], input_precision=precision)
        total, most = total * kept + tl.sum(weight, 1), higher
    total = tl.where(exists, total, 1)
    place = o_b * b + o_h * head[:, None] + o_t * token[:, None] + column[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), both)


def attend_to_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sink_logit: Tensor | None = None) -> Tensor:
    """Attend from q (B, H, W, D) to the first `ends` keys, (B or 1, 1, W or 1, 1), of k and v (B, K, L, D): (B, H, W, D).

    sink_logit (H,): joins each head's softmax without a value. No query may see nothing."""
    batch, heads, n_tokens, width = q.shape
    group = heads // k.shape[1]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    ends = ends.to(torch.int32)
    out = q.new_empty(batch, n_tokens, heads, width).transpose(1, 2)  # token-major, as the next matmul reads it
    rows = min(_ROWS, max(_LEAST, triton.next_power_of_2(group * n_tokens)))
    _span_attention[(triton.cdiv(group * n_tokens, rows), k.shape[1], batch)](
        q, k, v, ends, q if sink_logit is None else sink_logit, out, math.log2(math.e) / math.sqrt(width), n_tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        ends.stride(0) if ends.shape[0] > 1 else 0, ends.stride(2) if ends.shape[2] > 1 else 0, *out.stride()[:3],
        group=group, width=width, wide=max(_LEAST, triton.next_power_of_2(width)), rows=rows, keys=_KEYS,
        has_logit=sink_logit is not None, precision="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out
