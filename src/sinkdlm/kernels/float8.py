"""Triton kernels of float8 training: one pass reads a matrix and writes it row-major and transposed.

float8_ops.py defines each function in plain torch. Imported only where a kernel runs: importing Triton is slow.

A kernel whose scale is unknown is launched twice. The first launch `seeks` the amax and stores it in the prediction's slots,
`_settle` computes the scale, and the second launch `writes`. With a predicted scale the first launch seeks and writes; the second
(`again`) writes only if the prediction missed.

M tokens, K columns, F width of SwiGLU's output.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkdlm.kernels.float8_format import EXPONENTS, GRADIENTS, LARGEST, ONE, SLOTS, TINY, TOKENS, VALUES, new_predictions, padded

_ROWS, _COLUMNS = 128, 64  # _round: a tile
_BACK_ROWS, _BACK_COLUMNS, _BACK_WARPS = 32, 128, 8  # _swiglu_round_backward, which needs more registers: a tile, and warps
_SWIGLU_ROWS, _SWIGLU_COLUMNS, _SWIGLU_WARPS = 16, 256, 4  # _swiglu_round: a tile, and warps
_WARPS = 8
_AGAIN = 1024  # programs of a second launch: each loops over tiles


@triton.jit
def _load_again(scale):
    """Load the scale again, so that transposed values are rounded separately from row-major ones. If the same bytes are stored and
    packed, CUDA 12.8's assembler for Hopper (in Triton 3.6) reads uninitialised registers."""
    return tl.load(scale, volatile=True)


@triton.jit
def _store_transposed(into, first, second, third, fourth, scale, quad, k, n_columns, n_quads):
    """Store four tiles (quads of tokens, columns), the first to fourth token of a quad, times scale, as (columns, padded tokens).
    Four bytes are packed into one number, so that the transpose exchanges a fourth of the data between threads."""
    kind: tl.constexpr = into.dtype.element_ty
    packed = (first * scale).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    packed |= (second * scale).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
    packed |= (third * scale).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
    packed |= (fourth * scale).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    inside = (k < n_columns)[:, None] & (quad < n_quads)[None, :]
    place = into.to(tl.pointer_type(tl.uint32), bitcast=True) + k.to(tl.int64)[:, None] * n_quads + quad[None, :]
    tl.store(place, tl.trans(packed), inside)


@triton.jit
def _settle(
    predicted, scale, inverse, largest, tiny: tl.constexpr, exponents: tl.constexpr, one: tl.constexpr, slots: tl.constexpr
):  # fmt: skip
    """Compute the scale from the amax in the slots, as float8_format.scale_of does, and whether the prediction missed."""
    place = predicted + 2 + tl.arange(0, slots)
    most = tl.div_rn(largest, tl.maximum(tl.max(tl.load(place), 0), tiny))
    bits = ((most.to(tl.int32, bitcast=True) + one) & exponents) - one
    found = tl.maximum(bits, 0).to(tl.float32, bitcast=True)
    tl.store(predicted + 1, (found != tl.load(predicted)).to(tl.float32))
    tl.store(predicted, found)
    tl.store(scale, found)
    tl.store(inverse, tl.div_rn(1.0, found))
    tl.store(place, tl.zeros([slots], tl.float32))


def _programs(n_tiles: int, *, again: bool, **_: bool) -> tuple[int]:
    """Return the grid: a program for each tile, or few programs where a second launch likely has nothing to write."""
    return (min(n_tiles, _AGAIN) if again else n_tiles,)


def _find_scale(
    launch: Callable[..., None], predicted: Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Run both launches; return the scale and its inverse. launch: starts the kernel, given the prediction and its flags."""
    trusts = predicted is not None
    predicted = new_predictions(1, device)[0] if predicted is None else predicted
    launch(predicted, seeks=True, writes=trusts, again=False)
    scale, inverse = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    _settle[(1,)](
        predicted, scale, inverse, LARGEST[dtype], tiny=TINY, exponents=EXPONENTS[dtype], one=ONE, slots=SLOTS, num_warps=1
    )
    launch(predicted, seeks=False, writes=True, again=trusts)
    return scale, inverse


@triton.jit
def _note_amax(predicted, value, slots: tl.constexpr):
    """Store a program's amax in a slot by an atomic maximum: neither slot nor order changes the result."""
    tl.atomic_max(predicted + 2 + tl.program_id(0) % slots, value, sem="relaxed")


@triton.jit
def _largest(first, second, third, fourth):
    """Return the elementwise largest magnitude of four tiles."""
    return tl.maximum(tl.maximum(tl.abs(first), tl.abs(second)), tl.maximum(tl.abs(third), tl.abs(fourth)))


@triton.jit
def _round_fourth(x, scale, rows, m, k, n_rows, n, writes: tl.constexpr):
    """Load every fourth token of a tile; if `writes`, also round and store them row-major."""
    inside = (m < n_rows)[:, None] & (k < n)[None, :]
    place = m.to(tl.int64)[:, None] * n + k[None, :]
    value = tl.load(x + place, inside, 0).to(tl.float32)
    if writes:
        tl.store(rows + place, (value * tl.load(scale)).to(rows.dtype.element_ty), inside)
    return value


@triton.jit
def _round_tile(
    x, scale, rows, transposed, tile, n_rows, n, n_quads,
    has_rows: tl.constexpr, has_transposed: tl.constexpr, seeks: tl.constexpr, writes: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, block_k)
    quad, k = tile // across * (block_m // 4) + tl.arange(0, block_m // 4), tile % across * block_k + tl.arange(0, block_k)
    m = 4 * quad
    stores: tl.constexpr = writes and has_rows
    first = _round_fourth(x, scale, rows, m, k, n_rows, n, stores)
    second = _round_fourth(x, scale, rows, m + 1, k, n_rows, n, stores)
    third = _round_fourth(x, scale, rows, m + 2, k, n_rows, n, stores)
    fourth = _round_fourth(x, scale, rows, m + 3, k, n_rows, n, stores)
    if seeks:
        _note_amax(scale, tl.max(_largest(first, second, third, fourth)), slots)
    if writes and has_transposed:
        _store_transposed(transposed, first, second, third, fourth, _load_again(scale), quad, k, n, n_quads)


@triton.jit(do_not_specialize=["n_tiles"])
def _round(
    x, scale, rows, transposed, n_tiles, n_rows, n, n_quads,
    has_rows: tl.constexpr, has_transposed: tl.constexpr, seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr,
    slots: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Round tiles of x row-major and transposed. scale: a scale, or a prediction, whose first element is one."""
    if again:
        if tl.load(scale + 1) != 0:
            for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
                _round_tile(
                    x, scale, rows, transposed, tile, n_rows, n, n_quads,
                    has_rows, has_transposed, seeks, writes, slots, block_m, block_k,
                )  # fmt: skip
    else:  # no loop: it costs 2 % of a training step
        _round_tile(
            x, scale, rows, transposed, tl.program_id(0), n_rows, n, n_quads,
            has_rows, has_transposed, seeks, writes, slots, block_m, block_k,
        )  # fmt: skip


def round_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, transposed: int) -> tuple[Tensor, Tensor]:
    launch, flat, other = _rounding(x, dtype, rows, transposed)
    launch(scale, seeks=False, writes=True, again=False)
    return flat, other


def quantize(x: Tensor, predicted: Tensor | None, dtype: torch.dtype, transposed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    launch, flat, other = _rounding(x, dtype, True, transposed)
    return flat, other, *_find_scale(launch, predicted, dtype, x.device)


def _rounding(x: Tensor, dtype: torch.dtype, rows: bool, transposed: int) -> tuple[Callable[..., None], Tensor, Tensor]:
    """Return a function that launches `_round`, and the two matrices that it writes."""
    x = x.contiguous()
    m, k = x.shape
    wide = padded(m, transposed or 1)
    flat = x.new_empty((m, k) if rows else 0, dtype=dtype)
    other = x.new_empty((k, wide) if transposed else 0, dtype=dtype)

    n_tiles = triton.cdiv(wide, _ROWS) * triton.cdiv(k, _COLUMNS)

    def launch(scale: Tensor, **does: bool) -> None:
        _round[_programs(n_tiles, **does)](
            x, scale, flat, other, n_tiles, m, k, wide // 4, has_rows=rows, has_transposed=transposed > 0, **does, slots=SLOTS,
            block_m=_ROWS, block_k=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip

    return launch, flat, other


@triton.jit
def _swiglu_tile(
    gate_up, predicted, rows, tile, n_rows, n, seeks: tl.constexpr, writes: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, block_f)
    m, f = tile // across * block_m + tl.arange(0, block_m), tile % across * block_f + tl.arange(0, block_f)
    inside = (m < n_rows)[:, None] & (f < n)[None, :]
    row = m.to(tl.int64)[:, None]
    gate = tl.load(gate_up + row * 2 * n + f[None, :], inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + f[None, :], inside, 0).to(tl.float32)
    hidden = gate * (1 / (1 + tl.exp(-gate))) * up
    if seeks:
        _note_amax(predicted, tl.max(tl.abs(hidden)), slots)
    if writes:
        tl.store(rows + row * n + f[None, :], (hidden * tl.load(predicted)).to(rows.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_tiles"])
def _swiglu_round(
    gate_up, predicted, rows, n_tiles, n_rows, n, seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr,
    slots: tl.constexpr, block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    if again:
        if tl.load(predicted + 1) != 0:
            for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
                _swiglu_tile(gate_up, predicted, rows, tile, n_rows, n, seeks, writes, slots, block_m, block_f)
    else:
        _swiglu_tile(gate_up, predicted, rows, tl.program_id(0), n_rows, n, seeks, writes, slots, block_m, block_f)


def swiglu_float8(gate_up: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    rows = gate_up.new_empty(m, n, dtype=VALUES)
    n_tiles = triton.cdiv(m, _SWIGLU_ROWS) * triton.cdiv(n, _SWIGLU_COLUMNS)

    def launch(predicted: Tensor, **does: bool) -> None:
        _swiglu_round[_programs(n_tiles, **does)](
            gate_up, predicted, rows, n_tiles, m, n, **does, slots=SLOTS,
            block_m=_SWIGLU_ROWS, block_f=_SWIGLU_COLUMNS, num_warps=_SWIGLU_WARPS,
        )  # fmt: skip

    return rows, *_find_scale(launch, predicted, VALUES, gate_up.device)


@triton.jit
def _swiglu_slopes(gate_up, grad, predicted, rows, m, f, n_rows, n, writes: tl.constexpr):
    """Compute every fourth token of a tile: gradients of gate and up, also rounded row-major if `writes`, and swiglu's output."""
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
        factor = tl.load(predicted)
        tl.store(rows + place, (into_gate * factor).to(rows.dtype.element_ty), inside)
        tl.store(rows + place + n, (into_up * factor).to(rows.dtype.element_ty), inside)
    return into_gate, into_up, silu * up


@triton.jit
def _swiglu_backward_tile(
    gate_up, grad, hidden_scale, predicted, rows, gate_transposed, up_transposed, hidden, tile, n_rows, n, n_quads,
    seeks: tl.constexpr, writes: tl.constexpr, slots: tl.constexpr, block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, block_f)
    quad, f = tile // across * (block_m // 4) + tl.arange(0, block_m // 4), tile % across * block_f + tl.arange(0, block_f)
    m = 4 * quad
    gate0, up0, hidden0 = _swiglu_slopes(gate_up, grad, predicted, rows, m, f, n_rows, n, writes)
    gate1, up1, hidden1 = _swiglu_slopes(gate_up, grad, predicted, rows, m + 1, f, n_rows, n, writes)
    gate2, up2, hidden2 = _swiglu_slopes(gate_up, grad, predicted, rows, m + 2, f, n_rows, n, writes)
    gate3, up3, hidden3 = _swiglu_slopes(gate_up, grad, predicted, rows, m + 3, f, n_rows, n, writes)
    if seeks:
        most = tl.maximum(_largest(gate0, gate1, gate2, gate3), _largest(up0, up1, up2, up3))
        _note_amax(predicted, tl.max(most), slots)
    if writes:
        twice = _load_again(predicted)
        _store_transposed(gate_transposed, gate0, gate1, gate2, gate3, twice, quad, f, n, n_quads)
        _store_transposed(up_transposed, up0, up1, up2, up3, twice, quad, f, n, n_quads)
        _store_transposed(hidden, hidden0, hidden1, hidden2, hidden3, tl.load(hidden_scale), quad, f, n, n_quads)


@triton.jit(do_not_specialize=["n_tiles"])
def _swiglu_round_backward(
    gate_up, grad, hidden_scale, predicted, rows, gate_transposed, up_transposed, hidden, n_tiles, n_rows, n, n_quads,
    seeks: tl.constexpr, writes: tl.constexpr, again: tl.constexpr, slots: tl.constexpr,
    block_m: tl.constexpr, block_f: tl.constexpr,
):  # fmt: skip
    if again:
        if tl.load(predicted + 1) != 0:
            for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
                _swiglu_backward_tile(
                    gate_up, grad, hidden_scale, predicted, rows, gate_transposed, up_transposed, hidden, tile, n_rows, n, n_quads,
                    seeks, writes, slots, block_m, block_f,
                )  # fmt: skip
    else:
        _swiglu_backward_tile(
            gate_up, grad, hidden_scale, predicted, rows, gate_transposed, up_transposed, hidden, tl.program_id(0),
            n_rows, n, n_quads, seeks, writes, slots, block_m, block_f,
        )  # fmt: skip


def swiglu_float8_backward(
    gate_up: Tensor, grad: Tensor, hidden_scale: Tensor, predicted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    m, n = grad.shape
    wide = padded(m, TOKENS)
    rows, transposed = grad.new_empty(m, 2 * n, dtype=GRADIENTS), grad.new_empty(2 * n, wide, dtype=GRADIENTS)
    hidden = grad.new_empty(n, wide, dtype=VALUES)
    n_tiles = triton.cdiv(wide, _BACK_ROWS) * triton.cdiv(n, _BACK_COLUMNS)

    def launch(predicted: Tensor, **does: bool) -> None:
        _swiglu_round_backward[_programs(n_tiles, **does)](
            gate_up, grad, hidden_scale, predicted, rows, transposed[:n], transposed[n:], hidden, n_tiles,
            m, n, wide // 4, **does, slots=SLOTS, block_m=_BACK_ROWS, block_f=_BACK_COLUMNS, num_warps=_BACK_WARPS,
        )  # fmt: skip

    _, inverse = _find_scale(launch, predicted, GRADIENTS, grad.device)
    return rows, transposed, inverse, hidden
