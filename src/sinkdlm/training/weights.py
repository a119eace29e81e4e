"""Hold a model's weights on one rank: whole, or its rows of each (FSDP2). Optimizer, average and states work on these.

Blocks are sharded one by one. Embedding, final norm and head form the root group and stay gathered until the backward: the head's
chunks need no collective, and a rank may have no masked position. Parameters outside linear layers (norm weights, sink logits) stay
whole on every rank: they are tiny, and keep their precision where the block travels as bf16.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sinkdlm.distributed.world import World
from sinkdlm.model.model import DiffusionLM
from sinkdlm.planning.formulas import Layout


def as_sharded(tensor: Tensor) -> Any:
    """Return the tensor if it is a DTensor, else None. Imports nothing: torch's DTensor package takes most of a second."""
    # While another thread imports the package, its names may be missing: then nobody has made a DTensor yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor if kind is not None and isinstance(tensor, kind) else None


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of it where it is not sharded."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def _unsharded(block: nn.Module) -> set[nn.Parameter]:
    """A block's parameters that stay whole: all but the weights and biases of linear layers."""
    linear = {id(p) for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters(recurse=False)}
    return {p for p in block.parameters() if id(p) not in linear}


FirstWeight = Callable[[str, tuple[int, ...]], Tensor]


class Weights:
    """A model's weights on this rank. `local[name]` is its storage of a parameter that trains: the parameter itself where nothing
    is sharded, else its own rows. Updates change it in place. `frozen` holds the others."""

    def __init__(
        self,
        model: DiffusionLM,
        world: World,
        dtype: torch.dtype,
        first: FirstWeight | None = None,
        layout: Layout | None = None,
        *,
        reshard: bool = True,
        travels_as: torch.dtype | None = None,
    ) -> None:
        """Move a model from the host or the meta device to this rank's device, block by block: at most one block and the root are
        whole there at a time.

        first: initial weights by name and shape, for the meta device. layout: None for a single process. travels_as: the dtype in
        which blocks are gathered; None: the weights' own."""
        self.model, self.world, self.layout = model, world, layout
        self._groups: Any = () if layout is None else (model, *model.blocks)  # what fully_shard is called on
        self.mesh: DeviceMesh | None = None
        if layout is not None:
            names = ("shard",) if layout.copies == 1 else ("copy", "shard")
            self.mesh = init_device_mesh(world.device.type, tuple(layout)[-len(names) :], mesh_dim_names=names)
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # Inputs are not cast: the residual stream keeps the precision that it has in one process.
            reduce = None if dtype == torch.float64 else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=travels_as, reduce_dtype=reduce, cast_forward_inputs=False)
            whole: set[nn.Parameter] = set()
            for layer, block in enumerate(model.blocks):
                materialise(block, f"blocks.{layer}", world.device, dtype, first)
                kept = _unsharded(block)
                whole |= kept
                fully_shard(block, mesh=self.mesh, mp_policy=policy, ignored_params=kept, reshard_after_forward=reshard)
        materialise(model, "", world.device, dtype, first)
        if self.mesh is not None:
            own = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
            fully_shard(model, mesh=self.mesh, mp_policy=own, ignored_params=whole, reshard_after_forward=False)
            for group in self._groups:
                group.set_gradient_divide_factor(1.0)  # losses are divided by the global count: gradients add up
                group.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend has
        self._named: dict[str, nn.Parameter] = dict(model.named_parameters())
        held = {name: p if as_sharded(p) is None else own_part(p).detach() for name, p in self._named.items()}
        self.local = {name: part for name, part in held.items() if self._named[name].requires_grad}
        self.frozen = {name: part for name, part in held.items() if name not in self.local}
        self._copied = [name for name, p in self._named.items() if layout is not None and as_sharded(p) is None]

    def before_backward(self, *, last: bool) -> None:
        """Set when gradients are exchanged: between copies once a step, between shards after every backward, to save memory."""
        if self.layout is None:
            return
        if self.layout.shards == 1:
            self._groups[0].set_requires_gradient_sync(last)
        elif self.layout.copies > 1:
            self._groups[0].set_requires_all_reduce(last)

    def take_gradients(self) -> list[Tensor]:
        """After a step's last backward, return this rank's part of the gradient, summed over all ranks; `local` has it too."""
        if self.layout is not None:
            for name, part in self.local.items():
                gradient = self._named[name].grad
                part.grad = None if gradient is None else own_part(gradient)
            gradients = [p.grad for p in (self._named[name] for name in self._copied) if p.grad is not None]
            if gradients:
                flat = self.world.sum_(torch.cat([gradient.flatten() for gradient in gradients]))
                for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        return [part.grad for part in self.local.values() if part.grad is not None]

    def square_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm; over all ranks, each element is counted once."""
        counted = self.local
        if self.layout is not None and self.mesh is not None:
            first_copy = self.layout.copies == 1 or self.mesh.get_local_rank("copy") == 0
            counted = {n: part for n, part in self.local.items() if (self.world.first if n in self._copied else first_copy)}
        gradients = [part.grad for part in counted.values() if part.grad is not None and part.grad.numel()]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.world.device)
        return torch.nn.utils.get_total_norm(gradients).double().square()

    def clear_gradients(self) -> None:
        for name, part in self.local.items():
            self._named[name].grad = part.grad = None

    def settle(self) -> None:
        """Drop gathered weights after a forward without a backward, so that the next forward sees updates."""
        for group in self._groups:
            group.reshard()

    def spread(self, name: str, part: Tensor) -> Tensor:
        """Turn this rank's storage of a parameter, or a tensor of its shape, into a tensor over all ranks."""
        p = as_sharded(self._named[name])
        if p is None:
            return part.detach()
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def collect(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Gather whole tensors on rank 0's host, the frozen weights with them; None on the others. All ranks must call it."""
        found: dict[str, Tensor] = {}
        for name, part in {**self.frozen, **parts}.items():
            sharded = as_sharded(self.spread(name, part))
            whole = part.detach() if sharded is None else sharded.full_tensor()
            if self.world.first:
                found[name] = whole.cpu()
        return found if self.world.first else None


def materialise(module: nn.Module, prefix: str, device: torch.device, dtype: torch.dtype, first: FirstWeight | None) -> None:
    """Put a module on the device. Parameters on the meta device get initial weights from `first`, or stay unset without it."""
    for place, holder in module.named_modules(prefix=prefix):
        for key, p in holder._parameters.items():
            if p is None or not p.is_meta:
                continue
            if first is None:
                made = torch.empty(p.shape, dtype=dtype, device=device)
            else:
                made = first(f"{place}.{key}" if place else key, tuple(p.shape)).to(device, dtype)
            holder._parameters[key] = nn.Parameter(made)
    module.to(device)
