"""Tensors of which each rank holds a part. Torch's packages for them take most of a second to load, and a process alone makes its
first step without them: here nothing is loaded, since without the package there is no such tensor either."""

import sys
from typing import Any

from torch import Tensor


def as_sharded(tensor: Tensor | None) -> Any:
    """The tensor where it is a DTensor, else None."""
    # A package that another thread is just loading may lack its names, and then nobody has made such a tensor either.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def own_part(tensor: Tensor) -> Tensor:
    """This rank's, which is all of a tensor that is not sharded."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()
