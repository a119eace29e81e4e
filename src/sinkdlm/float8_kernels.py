"""Triton kernels for training in float8: a matrix is read once and written in both layouts that products want.

Owns how, not what: float8_operators.py says what each computes, and the tests hold the two together. Imported only where it is
used, because Triton is.

A kernel that rounds by a gain which is to be found is launched twice, with a guess (float8_operators.new_guesses) and `_settle` in
between, which makes the gain of the largest magnitude: first it `seeks` that, and leaves it in the guess's slots, then it `writes`.
Where the gain is guessed, the first launch seeks and writes, and the second only where the guess was wrong (`again`).

M tokens, K columns, F half the columns of a gate and its input.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkdlm.float8_operators import GRADIENTS, LARGEST, SLOTS, TINY, TOKENS, VALUES, new_guesses, padded

_ROWS, _COLUMNS = 128, 128  # of a tile that is rounded
_TILE = 64  # sides of one of SwiGLU's backward, which holds more at a time
_SWIGLU_ROWS, _SWIGLU_COLUMNS = 16, 256  # of one of SwiGLU
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
def _settle(guess, gain, scale, largest, tiny: tl.constexpr, slots: tl.constexpr):
    """The gain by the largest that was seen, as float8_operators.gain_of has it, and whether it is another than was tried."""
    place = guess + 2 + tl.arange(0, slots)
    most = tl.div_rn(largest, tl.maximum(tl.max(tl.load(place), 0), tiny))
    found = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(guess + 1, (found != tl.load(guess)).to(tl.float32))
    tl.store(guess, found)
    tl.store(gain, found)
    tl.store(scale, tl.div_rn(1.0, found))
    tl.store(place, tl.zeros([slots], tl.float32))


def _find_gain(
    launch: Callable[..., None], guess: Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """launch: a kernel, given the guess and what it is to do. The gain and what undoes it. Values are guessed; gradients are not:
    their largest is that of the row with the least noise, whose weight differs from step to step by more than a power of two."""
    trusts = guess is not None and dtype == VALUES
    guess = new_guesses(1, device)[0] if guess is None else guess
    launch(guess, seeks=True, writes=trusts, again=False)
    gain, scale = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    _settle[(1,)](guess, gain, scale, LARGEST[dtype], tiny=TINY, slots=SLOTS, num_warps=1)
    launch(guess, seeks=False, writes=True, again=trusts)
    return gain, scale


@triton.jit
def _note_peak(guess, value, slots: tl.constexpr):
    """value: a program's largest magnitude. Which slot it goes to, and in what order, does not matter to the largest of all."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.atomic_max(guess + 2 + program % slots, value, sem="relaxed")


@triton.jit
def _round_tile(
    x, gain, rows, turned, n_rows, n, n_padded,
    has_rows: tl.constexpr, has_turned: tl.constexpr, seeks: tl.constexpr, writes: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0) * block_m + tl.arange(0, block_m), tl.program_id(1) * block_k + tl.arange(0, block_k)
    inside = (m < n_rows)[:, None] & (k < n)[None, :]
    place = m.to(tl.int64)[:, None] * n + k[None, :]
    value = tl.load(x + place, inside, 0).to(tl.float32)
    if seeks:
        _note_peak(gain, tl.max(tl.abs(value)), slots)
    if writes and has_rows:
        tl.store(rows + place, (value * tl.load(gain)).to(rows.dtype.element_ty), inside)
    if writes and has_turned:
        _store_turned(turned, (value * _load_again(gain)).to(rows.dtype.element_ty), m, k, n, n_padded)


@triton.jit
def _round(
    x, gain, rows, turned, n_rows, n, n_padded,
    has_rows: tl.constexpr, has_turned: tl.constexpr, seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr,
    slots: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """gain: that, or a guess, which begins with one."""
    if again:
        if tl.load(gain + 1) != 0:
            _round_tile(
                x, gain, rows, turned, n_rows, n, n_padded, has_rows, has_turned, seeks, writes, slots, block_m, block_k
            )  # fmt: skip
    else:
        _round_tile(x, gain, rows, turned, n_rows, n, n_padded, has_rows, has_turned, seeks, writes, slots, block_m, block_k)


def round_float8(x: Tensor, gain: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Tensor, Tensor]:
    """float8_operators.round_float8."""
    launch, flat, other = _rounding(x, dtype, rows, turned)
    launch(gain, seeks=False, writes=True, again=False)
    return flat, other


def round_by_guess(x: Tensor, guess: Tensor, dtype: torch.dtype, turned: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float8_operators.round_by_guess."""
    launch, flat, other = _rounding(x, dtype, True, turned)
    return flat, other, *_find_gain(launch, guess, dtype, x.device)


def _rounding(x: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Callable[..., None], Tensor, Tensor]:
    """What launches the kernel, and what it writes to."""
    x = x.contiguous()
    m, k = x.shape
    wide = padded(m, turned or 1)
    flat = x.new_empty((m, k) if rows else 0, dtype=dtype)
    other = x.new_empty((k, wide) if turned else 0, dtype=dtype)

    def launch(gain: Tensor, **does: bool) -> None:
        _round[(triton.cdiv(wide, _ROWS), triton.cdiv(k, _COLUMNS))](
            x, gain, flat, other, m, k, wide, has_rows=rows, has_turned=turned > 0, **does, slots=SLOTS,
            block_m=_ROWS, block_k=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip

    return launch, flat, other


@triton.jit
def _swiglu_tile(
    gate_up, guess, rows, n_rows, n, seeks: tl.constexpr, writes: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    m, f = tl.program_id(0) * block_m + tl.arange(0, block_m), tl.program_id(1) * block_f + tl.arange(0, block_f)
    inside = (m < n_rows)[:, None] & (f < n)[None, :]
    row = m.to(tl.int64)[:, None]
    gate = tl.load(gate_up + row * 2 * n + f[None, :], inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + f[None, :], inside, 0).to(tl.float32)
    hidden = gate * (1 / (1 + tl.exp(-gate))) * up
    if seeks:
        _note_peak(guess, tl.max(tl.abs(hidden)), slots)
    if writes:
        tl.store(rows + row * n + f[None, :], (hidden * tl.load(guess)).to(rows.dtype.element_ty), inside)


@triton.jit
def _swiglu_round(
    gate_up, guess, rows, n_rows, n, seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    if again:
        if tl.load(guess + 1) != 0:
            _swiglu_tile(gate_up, guess, rows, n_rows, n, seeks, writes, slots, block_m, block_f)
    else:
        _swiglu_tile(gate_up, guess, rows, n_rows, n, seeks, writes, slots, block_m, block_f)


def swiglu_float8(gate_up: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """float8_operators.swiglu_float8, and what undoes the gain."""
    gate_up = gate_up.contiguous()
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    rows = gate_up.new_empty(m, n, dtype=VALUES)

    def launch(guess: Tensor, **does: bool) -> None:
        _swiglu_round[(triton.cdiv(m, _SWIGLU_ROWS), triton.cdiv(n, _SWIGLU_COLUMNS))](
            gate_up, guess, rows, m, n, **does, slots=SLOTS, block_m=_SWIGLU_ROWS, block_f=_SWIGLU_COLUMNS, num_warps=_WARPS
        )

    return rows, *_find_gain(launch, guess, VALUES, gate_up.device)


@triton.jit
def _swiglu_round_backward(
    gate_up, grad, hidden_gain, guess, rows, gate_turned, up_turned, hidden, n_rows, n, n_padded,
    seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr, slots: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not again, "gradients are not guessed")
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
    if seeks:
        _note_peak(guess, tl.max(tl.maximum(tl.abs(into_gate), tl.abs(into_up))), slots)
    if writes:
        factor, twice = tl.load(guess), _load_again(guess)
        tl.store(rows + place, (into_gate * factor).to(rows.dtype.element_ty), inside)
        tl.store(rows + place + n, (into_up * factor).to(rows.dtype.element_ty), inside)
        _store_turned(gate_turned, (into_gate * twice).to(rows.dtype.element_ty), m, f, n, n_padded)
        _store_turned(up_turned, (into_up * twice).to(rows.dtype.element_ty), m, f, n, n_padded)
        _store_turned(hidden, (silu * up * tl.load(hidden_gain)).to(hidden.dtype.element_ty), m, f, n, n_padded)


def swiglu_float8_backward(
    gate_up: Tensor, grad: Tensor, hidden_gain: Tensor, guess: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float8_operators.swiglu_float8_backward, and what undoes the gain."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    m, n = grad.shape
    wide = padded(m, TOKENS)
    rows, turned = grad.new_empty(m, 2 * n, dtype=GRADIENTS), grad.new_empty(2 * n, wide, dtype=GRADIENTS)
    hidden = grad.new_empty(n, wide, dtype=VALUES)

    def launch(guess: Tensor, **does: bool) -> None:
        _swiglu_round_backward[(triton.cdiv(wide, _TILE), triton.cdiv(n, _TILE))](
            gate_up, grad, hidden_gain, guess, rows, turned[:n], turned[n:], hidden, m, n, wide, **does, slots=SLOTS, block=_TILE
        )

    gain, scale = _find_gain(launch, guess, GRADIENTS, grad.device)
    return rows, turned, gain, hidden, scale
