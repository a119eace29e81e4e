"""Triton kernels for inference on a GPU: each fuses a chain of a layer's small operations into one pass over memory.

Without a GPU or Triton, with gradients or under the compiler, the model computes the same in plain torch; the tests compare the
two. Inputs are half precision or float32; sums and rotations are float32. Imported only where a kernel runs: importing Triton is
slow.

B rows, T tokens, S sinks, H query heads, K key/value heads, D head width.
"""

import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SWIGLU_BLOCK = 1024
_building = threading.Lock()


def build_one(device: str = "cuda") -> None:
    """Build one small kernel, for which Triton loads its whole library. A second thread waits for the first."""
    with _building:
        swiglu(torch.zeros(2, device=device))


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _place_heads(
    heads, cos, sin, sink_k, sink_v, sink_cos, sink_sin, start, first_kept, stop_kept, q, k, v,
    start_b, heads_b, heads_t, cos_b, sink_cos_b, q_b, q_h, q_t, kv_b, kv_h,
    n_heads: tl.constexpr, n_kv: tl.constexpr, n_sinks: tl.constexpr, width: tl.constexpr,
    heads_block: tl.constexpr, kv_block: tl.constexpr, half_block: tl.constexpr, is_moved: tl.constexpr, is_cut: tl.constexpr,
):  # fmt: skip
    """A program per (row, token) splits and rotates the token's heads; the first n_sinks programs of a row place the sinks."""
    b, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = width // 2
    column, kv = tl.arange(0, half_block)[None, :], tl.arange(0, kv_block)[:, None]
    inside = (kv < n_kv) & (column < half)
    if t < n_sinks:
        given = (t * n_kv + kv) * width + column
        sink_angle = sink_cos_b * b + t * half + column
        cos_t, sin_t = tl.load(sink_cos + sink_angle, column < half), tl.load(sink_sin + sink_angle, column < half)
        first, second = tl.load(sink_k + given, inside).to(tl.float32), tl.load(sink_k + given + half, inside).to(tl.float32)
        first, second = _rotate(first, second, cos_t, sin_t)
        spot = kv_b * b + kv_h * kv + t * width + column
        tl.store(k + spot, first.to(k.dtype.element_ty), inside)
        tl.store(k + spot + half, second.to(k.dtype.element_ty), inside)
        tl.store(v + spot, tl.load(sink_v + given, inside), inside)
        tl.store(v + spot + half, tl.load(sink_v + given + half, inside), inside)
    else:
        token = t - n_sinks
        base = heads + heads_b * b + heads_t * token
        angle = cos_b * b + token * half + column
        c, s = tl.load(cos + angle, column < half), tl.load(sin + angle, column < half)
        h = tl.arange(0, heads_block)[:, None]
        mine = (h < n_heads) & (column < half)
        source = base + h * width + column
        one, two = tl.load(source, mine).to(tl.float32), tl.load(source + half, mine).to(tl.float32)
        one, two = _rotate(one, two, c, s)
        place = q + q_b * b + q_h * h + q_t * token + column
        tl.store(place, one.to(q.dtype.element_ty), mine)
        tl.store(place + half, two.to(q.dtype.element_ty), mine)
        row = n_sinks + token
        if is_moved:
            row += tl.load(start + start_b * b).to(tl.int32)
        if is_cut:
            own = row - n_sinks
            kept = (own >= tl.load(first_kept + start_b * b)) & (own < tl.load(stop_kept + start_b * b))
            inside = inside & kept
            row = tl.where(kept, row, n_sinks)
        target = kv_b * b + kv_h * kv + row * width + column
        key_source = base + (n_heads + kv) * width + column
        key_one, key_two = tl.load(key_source, inside).to(tl.float32), tl.load(key_source + half, inside).to(tl.float32)
        key_one, key_two = _rotate(key_one, key_two, c, s)
        tl.store(k + target, key_one.to(k.dtype.element_ty), inside)
        tl.store(k + target + half, key_two.to(k.dtype.element_ty), inside)
        value_source = key_source + n_kv * width
        tl.store(v + target, tl.load(value_source, inside), inside)
        tl.store(v + target + half, tl.load(value_source + half, inside), inside)


def place_heads(
    heads: Tensor,
    n_heads: int,
    rotation: Any,
    lane: Any = None,
    sink_rotation: Any = None,
    into: tuple[Tensor, Tensor] | None = None,
    start: Tensor | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads (B, T, H + 2K, D) into q (B, H, T, D) and k, v (B, K, S + T, D), rotate q and k, put the sinks in front.

    lane: the sinks' keys (before rotary) and values, (1, S, K, D) each. into: key and value buffers (B, K, S + L, D) of longer
    rows, where these tokens begin at index `start`, () or (B, 1); others are left as they are. first, stop (B, 1): keep only tokens
    between these indices.
    """
    batch, n_tokens, n_all, width = heads.shape
    n_kv = (n_all - n_heads) // 2
    n_sinks = 0 if lane is None else lane.k.shape[1]
    # Attention's output has the layout of its queries: token-major, as the next matmul reads it.
    q = heads.new_empty(batch, n_tokens, n_heads, width).transpose(1, 2)
    k, v = into or (heads.new_empty(batch, n_kv, n_sinks + n_tokens, width) for _ in range(2))
    cos, sin = rotation.cos, rotation.sin
    sink_cos, sink_sin = (sink_rotation.cos, sink_rotation.sin) if n_sinks else (cos, sin)
    sink_k, sink_v = (lane.k.contiguous(), lane.v.contiguous()) if n_sinks else (q, q)
    assert heads.stride(3) == 1
    assert heads.stride(2) == width
    assert k.stride()[1:] == v.stride()[1:]
    assert k.stride()[2:] == (width, 1)
    _place_heads[(batch, n_sinks + n_tokens)](
        heads, cos, sin, sink_k, sink_v, sink_cos, sink_sin,
        *(q if one is None else one for one in (start, first, stop)), q, k, v,
        start.stride(0) if start is not None and start.dim() else 0,
        heads.stride(0), heads.stride(1), cos.stride(0) if cos.shape[0] > 1 else 0,
        sink_cos.stride(0) if sink_cos.shape[0] > 1 else 0, *q.stride()[:3], k.stride(0), k.stride(1),
        n_heads, n_kv, n_sinks, width,
        heads_block=triton.next_power_of_2(n_heads), kv_block=triton.next_power_of_2(n_kv),
        half_block=triton.next_power_of_2(width // 2), is_moved=start is not None, is_cut=first is not None,
    )  # fmt: skip
    return q, k, v


@triton.jit
def _swiglu(gate_up, out, n, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    gate = tl.load(gate_up + row * 2 * n + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + column, inside).to(tl.float32)
    # Rounded in between, as torch's two operations are.
    gate = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * n + column, (gate * up).to(out.dtype.element_ty), inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up: (..., 2 F) -> (..., F)."""
    gate_up = gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], n)
    block = min(_SWIGLU_BLOCK, triton.next_power_of_2(n))
    _swiglu[(out.numel() // n, triton.cdiv(n, block))](gate_up, out, n, block=block)
    return out


@triton.jit
def _to_float8(x, rows, scales, n, largest, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([block], tl.float32)
    for begin in range(0, n, block):
        column = begin + tl.arange(0, block)
        most = tl.maximum(most, tl.abs(tl.load(x + row * n + column, column < n, 0).to(tl.float32)))
    scale = tl.maximum(tl.max(most), 1e-12) / largest
    tl.store(scales + row, scale)
    for begin in range(0, n, block):
        column = begin + tl.arange(0, block)
        value = tl.load(x + row * n + column, column < n, 0).to(tl.float32) / scale
        tl.store(rows + row * n + column, value.to(rows.dtype.element_ty), column < n)


def to_float8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to float8: (M, N) -> (M, N), and the factor (M, 1) that restores each row."""
    x = x.contiguous()
    rows, scales = torch.empty_like(x, dtype=dtype), torch.empty(x.shape[0], 1, device=x.device)
    block = min(2048, triton.next_power_of_2(x.shape[1]))
    _to_float8[(x.shape[0],)](x, rows, scales, x.shape[1], torch.finfo(dtype).max, block=block)
    return rows, scales
