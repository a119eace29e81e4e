"""The cached lane of an inference scope.

Checks that cached lanes still match the weights, and keeps the rotary tables that CUDA graphs read. Uses a model's `embed` and
`blocks`; does not know how a lane is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinkdlm.model.lane import Lane

_MOST_TABLES = 64
# Adapters can switch on and off unnoticed: with foreign modules in a block, nothing is cached.
_OWN = tuple(
    f"sinkdlm.{own}" for own in ("model.model", "fast.blocks", "fast.quantized", "fast.weight_only", "fast.float8_training")
)


def arithmetic_of(model: Any) -> tuple[torch.device, torch.dtype, torch.dtype | None]:
    """Return a forward's device, dtype of the weights, and dtype of autocast where it is on."""
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
        self._stamps: tuple[list[int], ...] = ()
        self._children: list[int] = []
        self._fingerprints: list[Tensor] = []
        self._cacheable = False

    def table(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return make(), cached by key. A scope may stay open for weeks and meet every length, so only the first are cached. They
        are never evicted, because CUDA graphs read them in place."""
        if key in self._tables:
            return self._tables[key]
        made = make()
        if len(self._tables) < _MOST_TABLES:
            self._tables[key] = made
        return made

    def _stamp(self) -> tuple[list[int], ...]:
        """Return identities, storages and versions of the weights: flat lists, because it runs at every forward."""
        weights = self._weights()
        versions = [0 if p.is_inference() else p._version for p in weights]
        return list(map(id, weights)), list(map(Tensor.data_ptr, weights)), versions

    def _child_ids(self) -> list[int]:
        return [id(child) for table in self._module_tables for child in table.values()]

    def find(self, model: Any) -> list[Lane] | None:
        """Return the cached lanes while the same modules hold the same weights at the same versions."""
        if not self._stamps or self._children != self._child_ids() or self._stamps != self._stamp():
            self.verify()
            self._lanes.clear()
            modules = list(model.modules())
            self._module_tables = [module._modules for module in modules]
            self._weight_tables = [module._parameters for module in modules]
            self._stamps, self._children = self._stamp(), self._child_ids()
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
        """Raise if a weight was changed in place without a new version, as through `.data`."""
        if not self._lanes:
            return
        now, served = self._stamp(), self._stamps
        if len(now[0]) != len(served[0]):
            return  # parameters were added or removed, which `find` notices
        stamped = zip(zip(*now, strict=True), zip(*served, strict=True), strict=True)
        for weight, (new, old), mark in zip(self._weights(), stamped, self._fingerprints, strict=True):
            if new == old and not torch.allclose(_fingerprint(weight), mark, rtol=0, atol=0, equal_nan=True):
                self._lanes.clear()
                raise RuntimeError(
                    "weights were edited in place inside model.inference(): results after the edit used the old sinks; "
                    "close the scope before changing weights"
                )


def _fingerprint(weight: Tensor) -> Tensor:
    """Return a number per row that changes with any of its elements: one read of the weight, without a host sync."""
    precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
    rows = weight.detach().to(precise).reshape(-1, weight.shape[-1])
    probe = torch.linspace(1.0, 2.0, rows.shape[1], dtype=rows.dtype, device=rows.device) * torch.pi
    with torch.autocast(rows.device.type, enabled=False):  # autocast would change the numbers
        return rows @ probe
