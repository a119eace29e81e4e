"""Weights rounded once for many products: a copy in half precision that the update writes as it writes the weight.

Owns when such a copy may stand for its weight: while the weight has not been written to since. Knows nothing of layers.
"""

import torch
from torch import Tensor

_KEPT = "_sinkdlm_rounded"


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight.to(dtype), which may be a copy that others read as well. Compiled code rounds for itself."""
    if torch.compiler.is_compiling():
        return weight.to(dtype)
    kept: tuple[Tensor, int] | None = getattr(weight, _KEPT, None)
    if kept is None or kept[0].dtype != dtype or kept[1] != weight._version:
        return weight.to(dtype)
    return kept[0]


def copy_to_update(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight's copy, as the weight is now, for an update to write. `mark_updated` is due after it."""
    kept: tuple[Tensor, int] | None = getattr(weight, _KEPT, None)
    if kept is None or kept[0].dtype != dtype:
        return weight.detach().to(dtype, copy=True)
    if kept[1] != weight._version:  # written to by someone else
        kept[0].copy_(weight.detach())
    return kept[0]


def mark_updated(weight: Tensor, copy: Tensor) -> None:
    """The copy is the weight's as it is now."""
    setattr(weight, _KEPT, (copy, weight._version))
