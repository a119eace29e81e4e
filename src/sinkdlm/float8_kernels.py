"""Triton kernels for training in float8: a matrix is read once and written in both layouts that products want.

Owns how, not what: float8_operators.py says what each computes, and the tests hold the two together. Imported only where it is
used, because Triton is.

M tokens, K columns, F half the columns of a gate and its input.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkdlm.float8_operators import GRADIENTS, TOKENS, VALUES, gain_of, padded

_ROWS, _COLUMNS = 128, 128  # of a tile that is rounded
_TILE = 64  # sides of one of SwiGLU's backward, which holds more at a time
_WIDE = 1024  # columns of a program of SwiGLU
_WARPS = 8
_PEAK_BLOCK, _PEAK_WARPS = 32768, 16  # elements of a program that looks for the largest, 64 of each thread


@triton.jit
def _peak(x, peaks, n, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, place < n, 0).to(tl.float32)
    tl.store(peaks + tl.program_id(0), tl.max(tl.abs(value), 0))


def peak(x: Tensor) -> Tensor:
    """float8_operators.peak."""
    x, n = x.contiguous(), x.numel()
    peaks = torch.empty(triton.cdiv(n, _PEAK_BLOCK), dtype=torch.float32, device=x.device)
    _peak[(peaks.numel(),)](x, peaks, n, block=_PEAK_BLOCK, num_warps=_PEAK_WARPS)
    return peaks.amax()


@triton.jit
def _load_again(gain):
    """So that what is turned is rounded by itself: where bytes are taken out of numbers that are also stored as they are, CUDA
    12.8's assembler for Hopper (Triton 3.6's) reads registers that nothing has written."""
    return tl.load(gain, volatile=True)


@triton.jit
def _store_turned(into, value, m, k, n_columns, n_padded):
    """A tile (tokens, columns) into (columns, tokens and zeros)."""
    inside = (k < n_columns)[:, None] & (m < n_padded)[None, :]
    tl.store(into + k.to(tl.int64)[:, None] * n_padded + m[None, :], tl.trans(value), inside)


@triton.jit
def _round(
    x, gain, rows, turned, n_rows, n, n_padded,
    has_rows: tl.constexpr, has_turned: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0) * block_m + tl.arange(0, block_m), tl.program_id(1) * block_k + tl.arange(0, block_k)
    inside = (m < n_rows)[:, None] & (k < n)[None, :]
    place = m.to(tl.int64)[:, None] * n + k[None, :]
    value = tl.load(x + place, inside, 0).to(tl.float32)
    if has_rows:
        tl.store(rows + place, (value * tl.load(gain)).to(rows.dtype.element_ty), inside)
    if has_turned:
        _store_turned(turned, (value * _load_again(gain)).to(rows.dtype.element_ty), m, k, n, n_padded)


def round_float8(x: Tensor, gain: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Tensor, Tensor]:
    """float8_operators.round_float8."""
    x = x.contiguous()
    m, k = x.shape
    wide = padded(m, turned or 1)
    flat = x.new_empty((m, k) if rows else 0, dtype=dtype)
    other = x.new_empty((k, wide) if turned else 0, dtype=dtype)
    _round[(triton.cdiv(wide, _ROWS), triton.cdiv(k, _COLUMNS))](
        x, gain, flat, other, m, k, wide, has_rows=rows, has_turned=turned > 0,
        block_m=_ROWS, block_k=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return flat, other


@triton.jit
def _swiglu_round(gate_up, gain, rows, peaks, n, writes: tl.constexpr, block: tl.constexpr):
    """First the largest magnitude of each program, then, by a gain of all, the values: reading twice is as much traffic as writing
    them in between would be."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    gate = tl.load(gate_up + row * 2 * n + column, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + column, inside, 0).to(tl.float32)
    hidden = gate * (1 / (1 + tl.exp(-gate))) * up
    if writes:
        tl.store(rows + row * n + column, (hidden * tl.load(gain)).to(rows.dtype.element_ty), inside)
    else:
        tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(hidden), 0))


def swiglu_float8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """float8_operators.swiglu_float8."""
    gate_up = gate_up.contiguous()
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    block = min(_WIDE, triton.next_power_of_2(n))
    grid = (m, triton.cdiv(n, block))
    peaks = torch.empty(grid, dtype=torch.float32, device=gate_up.device)
    rows = gate_up.new_empty(m, n, dtype=VALUES)
    _swiglu_round[grid](gate_up, peaks, rows, peaks, n, writes=False, block=block)
    gain = gain_of(peaks.amax(), VALUES)
    _swiglu_round[grid](gate_up, gain, rows, peaks, n, writes=True, block=block)
    return rows, gain


@triton.jit
def _swiglu_round_backward(
    gate_up, grad, hidden_gain, gain, rows, gate_turned, up_turned, hidden, peaks, n_rows, n, n_padded,
    writes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """First the largest magnitude of each tile, then the values, as _swiglu_round."""
    m, f = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * block + tl.arange(0, block)
    inside = (m < n_rows)[:, None] & (f < n)[None, :]
    row = m.to(tl.int64)[:, None]
    place = row * 2 * n + f[None, :]
    gate = tl.load(gate_up + place, inside, 0).to(tl.float32)
    up = tl.load(gate_up + place + n, inside, 0).to(tl.float32)
    given = tl.load(grad + row * n + f[None, :], inside, 0).to(tl.float32)
    chance = 1 / (1 + tl.exp(-gate))
    silu = gate * chance
    into_gate, into_up = given * up * (chance * (1 + gate * (1 - chance))), given * silu
    if writes:
        factor, again = tl.load(gain), _load_again(gain)
        tl.store(rows + place, (into_gate * factor).to(rows.dtype.element_ty), inside)
        tl.store(rows + place + n, (into_up * factor).to(rows.dtype.element_ty), inside)
        _store_turned(gate_turned, (into_gate * again).to(rows.dtype.element_ty), m, f, n, n_padded)
        _store_turned(up_turned, (into_up * again).to(rows.dtype.element_ty), m, f, n, n_padded)
        _store_turned(hidden, (silu * up * tl.load(hidden_gain)).to(hidden.dtype.element_ty), m, f, n, n_padded)
    else:
        most = tl.max(tl.maximum(tl.abs(into_gate), tl.abs(into_up)))
        tl.store(peaks + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), most)


def swiglu_float8_backward(gate_up: Tensor, grad: Tensor, hidden_gain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float8_operators.swiglu_float8_backward."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    m, n = grad.shape
    wide = padded(m, TOKENS)
    grid = (triton.cdiv(wide, _TILE), triton.cdiv(n, _TILE))
    peaks = torch.empty(grid, dtype=torch.float32, device=grad.device)
    rows, turned = grad.new_empty(m, 2 * n, dtype=GRADIENTS), grad.new_empty(2 * n, wide, dtype=GRADIENTS)
    hidden = grad.new_empty(n, wide, dtype=VALUES)
    into = (rows, turned[:n], turned[n:], hidden, peaks, m, n, wide)
    _swiglu_round_backward[grid](gate_up, grad, hidden_gain, peaks, *into, writes=False, block=_TILE)
    gain = gain_of(peaks.amax(), GRADIENTS)
    _swiglu_round_backward[grid](gate_up, grad, hidden_gain, gain, *into, writes=True, block=_TILE)
    return rows, turned, gain, hidden
