"""Float8 formats of training: which dtype holds what, how a tensor's scale follows from its largest magnitude, and how transposed
matrices are padded.

Values and weights are rounded to e4m3, gradients, whose sizes differ more, to e5m2. A scale multiplies a tensor before it
is rounded, so that its amax comes below the largest number of the type. It is a power of two, so that a number is rounded alike
whatever stands beside it. Scales of gradients are powers of 2^8, so that one is seldom another while their amax goes up and down:
e5m2 rounds all numbers alike over 29 powers of two, and has this much of its range to spare.
"""

import torch
from torch import Tensor

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of what a matmul sums over, and of its columns
TOKENS = 128  # multiple of tokens, where they are summed over: 131,088 take up to 1.6 times as long as 131,200 (H200, torch 2.11)
_FAR = 4096  # bytes: rows that begin a multiple of it apart share the same few channels of memory
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (VALUES, GRADIENTS)}
TINY = 1e-24  # the least amax: a tensor of zeros has a scale too
SLOTS = 64  # for the largest magnitudes that programs of a kernel find
ONE = 1 << 23  # of a float32's exponent, as it lies in its bits
EXPONENTS = {VALUES: 0xFF * ONE, GRADIENTS: 0xF8 * ONE}  # of scales: every one, or every eighth, of which 0 is one


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """() -> (): on the device, so that nobody waits for it."""
    most = LARGEST[dtype] / amax.float().clamp_min(TINY)
    return ((((most.view(torch.int32) + ONE) & EXPONENTS[dtype]) - ONE).clamp_min(0)).view(torch.float32)


def new_predictions(count: int, device: torch.device) -> Tensor:
    """For each tensor of a layer: the scale found last, whether it was another than before, and slots for largest magnitudes."""
    return torch.zeros(count, 2 + SLOTS, dtype=torch.float32, device=device)


def padded(count: int, multiple: int) -> int:
    """The next multiple; of TOKENS one that is no multiple of _FAR."""
    whole = -(-count // multiple) * multiple
    return whole + TOKENS if multiple == TOKENS and whole % _FAR == 0 else whole
