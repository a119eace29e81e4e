"""Float8 formats of training: dtypes, the scale of a tensor by its amax, and the padding of transposed matrices.

Values and weights are e4m3; gradients, whose range is wider, are e5m2. A tensor is multiplied by its scale before it is rounded,
so that its amax fits the type. Scales are powers of two, so a number is rounded alike whatever else its tensor holds. Gradients'
scales are powers of 2^8, so they rarely change while amax goes up and down: e5m2 has full precision over 29 powers of two, and
this much range to spare.
"""

import torch
from torch import Tensor

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of a matmul's summed dimension and of its columns
TOKENS = 128  # multiple of summed tokens: 131,088 take up to 1.6 times as long as 131,200 (H200, torch 2.11)
_FAR = 4096  # bytes: rows at multiples of it share few memory channels
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (VALUES, GRADIENTS)}
TINY = 1e-24  # the least amax, so that a tensor of zeros has a scale
SLOTS = 64  # places for the amax of a kernel's programs
ONE = 1 << 23  # the lowest bit of a float32's exponent
EXPONENTS = {VALUES: 0xFF * ONE, GRADIENTS: 0xF8 * ONE}  # of scales: every one, or every eighth, 0 included


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a tensor's scale from its amax, () -> (), on the device without a sync."""
    most = LARGEST[dtype] / amax.float().clamp_min(TINY)
    return ((((most.view(torch.int32) + ONE) & EXPONENTS[dtype]) - ONE).clamp_min(0)).view(torch.float32)


def new_predictions(count: int, device: torch.device) -> Tensor:
    """Allocate for each of a layer's tensors: its last scale, whether the prediction missed, and slots for amax."""
    return torch.zeros(count, 2 + SLOTS, dtype=torch.float32, device=device)


def padded(count: int, multiple: int) -> int:
    """Round up to a multiple; for TOKENS to one that is no multiple of _FAR."""
    whole = -(-count // multiple) * multiple
    return whole + TOKENS if multiple == TOKENS and whole % _FAR == 0 else whole
