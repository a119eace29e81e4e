"""The lane of an inference scope, computed once.

Owns the question whether cached lanes still are those of the weights, and the rotary tables that captured steps read. Takes a model
by its parts (`embed`, `blocks`); does not know how a lane is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinkdlm.model.lane import Lane

_MOST_TABLES = 64
# Adapters switch on and off without a trace: with modules of others in a block, the lane is computed every time.
_OWN = ("sinkdlm.model.model", "sinkdlm.fast.blocks", "sinkdlm.fast.quantized", "sinkdlm.fast.float8_training")


def arithmetic_of(model: Any) -> tuple[torch.device, torch.dtype, torch.dtype | None]:
    """Where and in what precision a forward computes: device, dtype of the weights, dtype of autocast where it is on."""
    weight = model.embed.weight
    kind = weight.device.type
    return weight.device, weight.dtype, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class LaneCache:
    """The lanes of one inference scope, per device and arithmetic. The scope's first forward fills it."""

    def __init__(self) -> None:
        self._lanes: dict[Any, list[Lane]] = {}
        self._tables: dict[Any, Any] = {}  # what depends on shapes alone: rotary angles
        self._module_tables: list[dict[str, nn.Module | None]] = []
        self._weight_tables: list[dict[str, nn.Parameter | None]] = []
        self._stamps: list[tuple[int, int, int]] = []
        self._children: list[int] = []
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._counting: list[Tensor] = []
        self._versions: list[int] = []
        self._fingerprints: list[Tensor] = []
        self._cacheable = False

    def table(self, key: Any, make: Callable[[], Any]) -> Any:
        """What make() gives for this shape. A scope may stay open for weeks and meet every length, so only the first are kept;
        and those for good, because captured steps read them where they are."""
        if key in self._tables:
            return self._tables[key]
        made = make()
        if len(self._tables) < _MOST_TABLES:
            self._tables[key] = made
        return made

    def _stamp(self) -> list[tuple[int, int, int]]:
        """Identity, storage and version of every weight."""
        return [(id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._weights()]

    def _unchanged(self) -> bool:
        """Whether the same modules hold the same weights at the same versions. It runs in every forward: walks over flat lists."""
        if self._children != [id(child) for table in self._module_tables for child in table.values()]:
            return False
        weights = self._weights()
        if self._ids != list(map(id, weights)) or self._pointers != list(map(Tensor.data_ptr, weights)):
            return False
        return self._versions == [weight._version for weight in self._counting]  # the same objects, as their identities say

    def _watch(self, model: Any) -> None:
        modules = list(model.modules())
        self._module_tables = [module._modules for module in modules]
        self._weight_tables = [module._parameters for module in modules]
        self._stamps = self._stamp()
        self._children = [id(child) for table in self._module_tables for child in table.values()]
        self._ids, self._pointers = [stamp[0] for stamp in self._stamps], [stamp[1] for stamp in self._stamps]
        self._counting = [weight for weight in self._weights() if not weight.is_inference()]  # those count no versions
        self._versions = [weight._version for weight in self._counting]

    def find(self, model: Any) -> list[Lane] | None:
        if not self._stamps or not self._unchanged():
            self.verify()
            self._lanes.clear()
            self._watch(model)
            own = (*_OWN, "torch.nn.modules.linear")
            self._cacheable = all(type(module).__module__ in own for block in model.blocks for module in block.modules())
        return self._lanes.get(arithmetic_of(model))

    def keep(self, model: Any, lanes: list[Lane]) -> None:
        if not self._cacheable:
            return
        if not self._lanes:
            self._fingerprints = [_fingerprint(p) for p in self._weights()]
        self._lanes[arithmetic_of(model)] = lanes

    def _weights(self) -> list[Tensor]:
        return [weight for table in self._weight_tables for weight in table.values() if weight is not None]

    def verify(self) -> None:
        """Raises if a weight was changed in place without a new version, as through `.data`."""
        if not self._lanes:
            return
        now, served = self._stamp(), self._stamps
        if len(now) != len(served):
            return  # other parameters than those served: the change is seen
        for weight, new, old, mark in zip(self._weights(), now, served, self._fingerprints, strict=True):
            if new == old and not torch.allclose(_fingerprint(weight), mark, rtol=0, atol=0, equal_nan=True):
                self._lanes.clear()
                raise RuntimeError(
                    "weights were edited in place inside model.inference(): results after the edit used the old sinks; "
                    "close the scope before changing weights"
                )


def _fingerprint(weight: Tensor) -> Tensor:
    """A number per row that moves with any element of it: one read of the weight, on its device, without waiting for it."""
    precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
    rows = weight.detach().to(precise).reshape(-1, weight.shape[-1])
    probe = torch.linspace(1.0, 2.0, rows.shape[1], dtype=rows.dtype, device=rows.device) * torch.pi
    with torch.autocast(rows.device.type, enabled=False):  # else the same weights would give another number outside it
        return rows @ probe
