"""Operators for training in float8 that torch's compiler takes as they are, with a Triton kernel each on a GPU.

What an operator computes stands here in torch's own operations, which run wherever there is no GPU. Float8 products read both
factors along the axis that is summed over, so a matrix is wanted row by row, for one product, and turned, for another: both come of
one reading. A turned matrix is filled up with columns of zeros, which add nothing, to a multiple by which products are fast.

Values and weights are rounded to e4m3, gradients, whose sizes differ more, to e5m2. A gain is what a tensor is multiplied by before
it is rounded, so that its largest magnitude comes below the largest number of the type: a power of two, by which a number is
rounded alike whatever stands beside it. It is a tensor (), so that nobody waits for it. Of values the largest comes just below. Of
gradients it comes within a factor of 256 of it, because theirs are powers of 2^8: the gain is then seldom another while peaks go up
and down. e5m2 rounds all numbers alike over 29 powers of two, so that this much of its range is to spare.

To find a gain, a matrix is read before it is rounded. It is seldom another than it was a step before, so it can be guessed, and a
matrix is read twice only where the guess was wrong: what comes is the same bit for bit, whatever was guessed. Guesses are kept by
whoever calls, outside the compiler, one for each tensor of a layer.

M tokens, N and K columns, F half the columns of a gate and its input.
"""

import torch
from torch import Tensor

from sinkdlm.kernels.operator import operator

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of what a product sums over, and of its columns
TOKENS = (
    128  # and of tokens, where they are summed over: 131,088 of them take up to 1.6 times as long as 131,200 (H200, torch 2.11)
)
_FAR = 4096  # bytes, and multiples of it: so far apart rows should not begin
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (VALUES, GRADIENTS)}
TINY = 1e-24  # the least peak: a tensor of zeros has a gain too
SLOTS = 64  # of a guess
ONE = 1 << 23  # of a float32's exponent, as it lies in its bits
# Exponents of gains: every one, or every eighth, of which 0 is one.
EXPONENTS = {VALUES: 0xFF * ONE, GRADIENTS: 0xF8 * ONE}


def gain_of(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """peak: the largest magnitude, ()."""
    most = LARGEST[dtype] / peak.float().clamp_min(TINY)
    return ((((most.view(torch.int32) + ONE) & EXPONENTS[dtype]) - ONE).clamp_min(0)).view(torch.float32)


def new_guesses(count: int, device: torch.device) -> Tensor:
    """Each the gain that was found last, whether it was another than before, and slots for the largest magnitudes."""
    return torch.zeros(count, 2 + SLOTS, dtype=torch.float32, device=device)


def padded(count: int, multiple: int) -> int:
    """The next multiple. Of TOKENS one that is not among those of _FAR, too: rows that lie so far apart go to the same few channels
    of memory. (Other sides must be as long as what they are multiplied with.)"""
    whole = -(-count // multiple) * multiple
    return whole + TOKENS if multiple == TOKENS and whole % _FAR == 0 else whole


def _turn(x: Tensor, dtype: torch.dtype, multiple: int) -> Tensor:
    """(M, K) float32 -> (K, M and zeros)."""
    return torch.nn.functional.pad(x.T, (0, padded(x.shape[0], multiple) - x.shape[0])).to(dtype).contiguous()


@operator("peak")
def peak(x: Tensor) -> Tensor:
    """The largest magnitude, () in float32. Where x holds what is no number, that or the largest of the others: rounding by either
    leaves it no number."""
    return x.abs().amax().float()


@peak.fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@peak.kernel
def _(x: Tensor) -> Tensor:
    from sinkdlm.kernels import float8 as float8_kernels

    return float8_kernels.peak(x)


@operator("round_float8")
def round_float8(x: Tensor, gain: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Tensor, Tensor]:
    """x (M, K) times gain in float8: as it lies, and turned (K, M and zeros), `padded` to `turned`, a multiple of 4. What
    is not wanted is empty; 0: turned is not."""
    whole = x.float() * gain
    return (whole.to(dtype) if rows else whole.new_empty(0, dtype=dtype),
            _turn(whole, dtype, turned) if turned else whole.new_empty(0, dtype=dtype))  # fmt: skip


@round_float8.fake
def _(x: Tensor, gain: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Tensor, Tensor]:
    (m, k), none = x.shape, x.new_empty(0, dtype=dtype)
    return (x.new_empty(m, k, dtype=dtype) if rows else none,
            x.new_empty(k, padded(m, turned), dtype=dtype) if turned else torch.empty_like(none))  # fmt: skip


@round_float8.kernel
def _(x: Tensor, gain: Tensor, dtype: torch.dtype, rows: bool, turned: int) -> tuple[Tensor, Tensor]:
    from sinkdlm.kernels import float8 as float8_kernels

    return float8_kernels.round_float8(x, gain, dtype, rows, turned)


@operator("swiglu_float8")
def swiglu_float8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(M, 2 F) -> silu of the first half times the second, (M, F), as values in float8; and their gain."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    hidden = gate * torch.sigmoid(gate) * up
    gain = gain_of(hidden.abs().amax(), VALUES)
    return (hidden * gain).to(VALUES), gain


@swiglu_float8.fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    m, both = gate_up.shape
    return gate_up.new_empty(m, both // 2, dtype=VALUES), gate_up.new_empty((), dtype=torch.float32)


@swiglu_float8.kernel
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    from sinkdlm.kernels import float8 as float8_kernels

    return float8_kernels.swiglu_float8(gate_up)[:2]


@operator("swiglu_float8_backward")
def swiglu_float8_backward(gate_up: Tensor, grad: Tensor, hidden_gain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of gate_up as gradients in float8, (M, 2 F) and turned (2 F, M and zeros), and its gain; and once more what
    swiglu_float8 gave, with the gain that it gave, turned (F, M and zeros): cheaper to compute here than to keep."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    silu, given = gate * chance, grad.float()
    whole = torch.cat([given * up * (chance * (1 + gate * (1 - chance))), given * silu], dim=-1)
    gain = gain_of(whole.abs().amax(), GRADIENTS)
    whole = whole * gain
    return whole.to(GRADIENTS), _turn(whole, GRADIENTS, TOKENS), gain, _turn(silu * up * hidden_gain, VALUES, TOKENS)


@swiglu_float8_backward.fake
def _(gate_up: Tensor, grad: Tensor, hidden_gain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, both = gate_up.shape
    rows = gate_up.new_empty(m, both, dtype=GRADIENTS)
    turned = gate_up.new_empty(both, padded(m, TOKENS), dtype=GRADIENTS)
    gain = gate_up.new_empty((), dtype=torch.float32)
    return rows, turned, gain, gate_up.new_empty(both // 2, padded(m, TOKENS), dtype=VALUES)


@swiglu_float8_backward.kernel
def _(gate_up: Tensor, grad: Tensor, hidden_gain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sinkdlm.kernels import float8 as float8_kernels

    return float8_kernels.swiglu_float8_backward(gate_up, grad, hidden_gain)[:4]


def round_by_guess(x: Tensor, guess: Tensor, dtype: torch.dtype, turned: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """round_float8, both ways, by the gain of x's peak; that gain, and what undoes it."""
    if x.is_cuda:
        from sinkdlm.kernels import float8 as float8_kernels

        return float8_kernels.round_by_guess(x, guess, dtype, turned)
    gain = gain_of(peak.plain(x), dtype)
    return *round_float8.plain(x, gain, dtype, True, turned), *_note(gain, guess)


def swiglu_by_guess(gate_up: Tensor, guess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """swiglu_float8, and what undoes the gain."""
    if gate_up.is_cuda:
        from sinkdlm.kernels import float8 as float8_kernels

        return float8_kernels.swiglu_float8(gate_up, guess)
    rows, gain = swiglu_float8.plain(gate_up)
    return rows, *_note(gain, guess)


def swiglu_backward_by_guess(
    gate_up: Tensor, grad: Tensor, hidden_gain: Tensor, guess: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """swiglu_float8_backward, and what undoes the gain."""
    if gate_up.is_cuda:
        from sinkdlm.kernels import float8 as float8_kernels

        return float8_kernels.swiglu_float8_backward(gate_up, grad, hidden_gain, guess)
    rows, turned, gain, hidden = swiglu_float8_backward.plain(gate_up, grad, hidden_gain)
    gain, scale = _note(gain, guess)
    return rows, turned, gain, hidden, scale


def _note(gain: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    guess[1] = gain != guess[0]
    guess[0] = gain
    return gain, gain.reciprocal()
