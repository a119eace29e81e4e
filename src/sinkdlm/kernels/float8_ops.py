"""Operators of float8 training: each in plain torch, with a Triton kernel on a GPU.

A float8 matmul reads both factors along the axis that it sums over, so a matrix is needed row-major for one matmul and transposed
for another: one pass writes both. A transposed matrix is padded with columns of zeros.

A scale depends on amax, so without a prediction a matrix is read twice. The last scale predicts the next: one pass rounds by it
and finds the amax. On a miss the matrix is rounded again, bit for bit as without a prediction. `predicted` is a row of
float8_format.new_predictions, updated in place, or None, as under the compiler.

M tokens, K columns, F width of SwiGLU's output.
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
    """Transpose, round and pad with zeros: (M, K) float32 -> (K, padded M)."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, padded(x.shape[0], multiple) - x.shape[0]))
    return filled.mT.contiguous().to(dtype)


def _note(scale: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Update the prediction; return the scale and its inverse."""
    if predicted is not None:
        predicted[1] = scale != predicted[0]
        predicted[0] = scale
    return scale, scale.reciprocal()


@operator(_float8)
def round_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, multiple: int) -> tuple[Tensor, Tensor]:
    """Round x (M, K) times a known scale to float8, row-major and transposed (K, M padded to `multiple`, a multiple of 4). A form
    that is not wanted is empty; multiple 0 wants no transpose."""
    whole = x.float() * scale
    none = whole.new_empty(0, dtype=dtype)
    return whole.to(dtype) if rows else none, _transpose(whole, dtype, multiple) if multiple else none.clone()


@operator(_float8)
def quantize(x: Tensor, predicted: Tensor | None, dtype: torch.dtype, multiple: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round x by the scale of its amax, in both forms; also return the scale and its inverse. NaN stays NaN."""
    scale = scale_of(x.abs().amax(), dtype)
    return *round_float8.plain(x, scale, dtype, True, multiple), *_note(scale, predicted)


@operator(_float8)
def swiglu_float8(gate_up: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute silu(gate) * up, (M, 2 F) -> (M, F), in float8 (e4m3); also return its scale and the inverse."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    hidden = gate * torch.sigmoid(gate) * up
    scale = scale_of(hidden.abs().amax(), VALUES)
    return (hidden * scale).to(VALUES), *_note(scale, predicted)


@operator(_float8)
def swiglu_float8_backward(
    gate_up: Tensor, grad: Tensor, hidden_scale: Tensor, predicted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gate_up's gradient in float8 (e5m2), (M, 2 F) and transposed (2 F, padded M), and its inverse scale; and
    swiglu_float8's output once more, by its own scale, transposed (F, padded M): recomputing is cheaper than keeping it."""
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    chance = torch.sigmoid(gate)
    silu, given = gate * chance, grad.float()
    whole = torch.cat([given * up * (chance * (1 + gate * (1 - chance))), given * silu], dim=-1)
    scale, inverse = _note(scale_of(whole.abs().amax(), GRADIENTS), predicted)
    whole = whole * scale
    hidden = _transpose(silu * up * hidden_scale, VALUES, TOKENS)
    return whole.to(GRADIENTS), _transpose(whole, GRADIENTS, TOKENS), inverse, hidden
