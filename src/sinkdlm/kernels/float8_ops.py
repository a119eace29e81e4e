"""Operators of training in float8: what each computes, in torch's own operations, and the Triton kernel that does it on a GPU.

A float8 matmul reads both factors along the axis that it sums over, so a matrix is needed row-major for one matmul and transposed
for another: one pass writes both. A transposed matrix is filled up with columns of zeros, which add nothing.

A scale depends on the amax of what is rounded, so a matrix is read twice. The last scale predicts the next: it is used while the
amax is found, and on a miss the matrix is rounded again, with the same bits as without a prediction. `predicted` is a row of
float8_format.new_predictions, written in place, or None, as under the compiler.

M tokens, K columns, F half the columns of a gate and its input.
"""

from types import ModuleType

import torch
from torch import Tensor

from sinkdlm.kernels.float8_format import GRADIENTS, TOKENS, VALUES, padded, scale_of
from sinkdlm.kernels.operator import operator


def _float8() -> ModuleType:
    from sinkdlm.kernels import float8

    return float8


def _transpose(x: Tensor, dtype: torch.dtype, multiple: int) -> Tensor:
    """(M, K) float32 -> (K, M and zeros)."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[0], multiple) - x.shape[0]))
    return filled.mT.contiguous().to(dtype)


def _note(scale: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scale and its inverse, with the prediction brought up to date."""
    if predicted is not None:
        predicted[1] = scale != predicted[0]
        predicted[0] = scale
    return scale, scale.reciprocal()


@operator(_float8)
def round_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, multiple: int) -> tuple[Tensor, Tensor]:
    """x (M, K) times a known scale in float8: row-major, and transposed (K, M and zeros) to a multiple, one of 4. Either is empty
    where it is not asked for; multiple 0: not transposed."""
    whole = x.float() * scale
    none = whole.new_empty(0, dtype=dtype)
    return whole.to(dtype) if rows else none, _transpose(whole, dtype, multiple) if multiple else none.clone()


@operator(_float8)
def quantize(x: Tensor, predicted: Tensor | None, dtype: torch.dtype, multiple: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """round_float8 both ways by the scale of x's amax; that scale, and its inverse. What is no number stays none."""
    scale = scale_of(x.abs().amax(), dtype)
    return *round_float8.plain(x, scale, dtype, True, multiple), *_note(scale, predicted)


@operator(_float8)
def swiglu_float8(gate_up: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 2 F) -> silu of the first half times the second, (M, F), as values in float8; their scale, and its inverse."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    hidden = gate * torch.sigmoid(gate) * up
    scale = scale_of(hidden.abs().amax(), VALUES)
    return (hidden * scale).to(VALUES), *_note(scale, predicted)


@operator(_float8)
def swiglu_float8_backward(
    gate_up: Tensor, grad: Tensor, hidden_scale: Tensor, predicted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of gate_up as gradients in float8, (M, 2 F) and transposed (2 F, M and zeros), and its inverse scale; and once
    more what swiglu_float8 gave, with the scale that it gave, transposed (F, M and zeros): cheaper to compute than to keep."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    silu, given = gate * chance, grad.float()
    whole = torch.cat([given * up * (chance * (1 + gate * (1 - chance))), given * silu], dim=-1)
    scale, inverse = _note(scale_of(whole.abs().amax(), GRADIENTS), predicted)
    whole = whole * scale
    hidden = _transpose(silu * up * hidden_scale, VALUES, TOKENS)
    return whole.to(GRADIENTS), _transpose(whole, GRADIENTS, TOKENS), inverse, hidden
