"""What of a model torch's compiler takes for training, and how it is asked to."""

import importlib.util
from typing import Any, NamedTuple

import torch

from sinkdlm.config.recipe import Compile, Recipe
from sinkdlm.distributed.world import World
from sinkdlm.errors import TrainError
from sinkdlm.kernels.available import has_kernels
from sinkdlm.model.model import DiffusionLM
from sinkdlm.planning.formulas import Layout, fitting_micro_batch, settle_precision, training_flops
from sinkdlm.training.head_slots import plan_places

# FLOPs of a layer in one micro-batch from which the host, launching each kernel by itself, is ahead of a device all the same: an
# H200 takes 10 ms for them, and the host 3 to 5 to launch a layer forward and backward. In float8 there is more to launch, and a
# device is done sooner.
_AHEAD = {"bf16": 3e12, "fp8": 6e12}


class Way(NamedTuple):
    """How the steps of a run are computed: the recipe's "auto" as it is read on this machine."""

    compile: Compile
    micro_batch: int
    as_rows: bool  # rows are full, and go through operators.py as those of one matrix, whose last layer ends where the loss looks
    keeps_rounded: bool = False  # from the forward to the backward each weight is held in bf16 as well, in a process of its own

    @property
    def compiled(self) -> bool:
        return self.compile != "none"

    @property
    def rounds(self) -> torch.dtype | None:
        """What updates round weights to, for the products of the next step; compiled blocks round for themselves."""
        return torch.bfloat16 if self.keeps_rounded and not self.compiled else None

    @property
    def frugal(self) -> bool:
        """Whether blocks keep for the backward no more than they need."""
        return self.compiled or self.as_rows


def settle_way(
    model: DiffusionLM, recipe: Recipe, world: World, layout: Layout | None = None, *, full_rows: bool, share: int | None = None
) -> Way:
    """full_rows: every row is full and sees all of itself. share: rows of a step on the rank that has most."""
    device = world.device
    recipe = settle_precision(recipe, on_gpu=device.type == "cuda")
    train = recipe.train
    by_kernels = full_rows and has_kernels() and train.precision in ("bf16", "fp8")
    as_rows = by_kernels and model.trains_as_rows(device.type, torch.bfloat16, recipe.data.length)
    keeps_rounded = as_rows and world.alone and train.precision == "bf16" and train.recompute == "none"
    way = Way("blocks" if train.compile == "auto" else train.compile, 0, as_rows, keeps_rounded)
    if not compiles(train.compile, device):
        way = way._replace(compile="none")
    rows = share or world.largest_share(train.batch)
    fitting = train.micro_batch or fitting_micro_batch(recipe, world.memory, rows, layout, compiled=way.frugal)
    way = way._replace(micro_batch=fitting)
    if train.compile == "auto" and way.as_rows and world.alone and _needs_no_compiler(recipe, way):
        return way._replace(compile="none")
    return way


def _needs_no_compiler(recipe: Recipe, way: Way) -> bool:
    """Whether nothing is left to fuse, and nobody waits for the host: it is ahead, or its launches are recorded."""
    config, train, length = recipe.model, recipe.train, recipe.data.length
    if config.gate != "none" or train.anneal or (train.precision == "fp8" and config.qkv_bias):  # which float8 products leave
        return False
    if way.micro_batch * length * training_flops(config, length) / config.n_layers >= _AHEAD[train.precision]:
        return True
    places = plan_places(train, way.micro_batch, length, torch.tensor([length - config.shift_logits]))
    return train.graphs == "on" or (train.graphs == "auto" and places.pay(config))


def compiles(wanted: Compile, device: torch.device) -> bool:
    if wanted == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return wanted != "none"


def compile_model(model: DiffusionLM, wanted: Compile, world: World, *, as_rows: bool = False) -> None:
    """In place. Also says whether the last layer ends where the loss looks: on a GPU where full rows go as rows of one matrix, on a
    CPU unless blocks are compiled, which want few shapes."""
    on_cpu = world.device.type == "cpu"
    model.picks_early = wanted != "blocks" if on_cpu else as_rows and world.alone
    if wanted == "whole":
        if not (on_cpu and world.alone):
            raise TrainError("train.compile = 'whole': for one process on a CPU; 'blocks' is the cure")
        _compile_whole(model)
    elif compiles(wanted, world.device):
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # its arithmetic: hooks that gather its weights stay outside


def _compile_whole(model: DiffusionLM) -> None:
    """All blocks as one function without Python inside, which a small model spends much of its time in."""
    plain = model.run_blocks
    compiled = torch.compile(plain, dynamic=True, options={"cpp_wrapper": True})

    def run_blocks(*args: Any, **given: Any) -> Any:
        # Validation and probes would be compiled once more, and are short.
        return (compiled if torch.is_grad_enabled() else plain)(*args, **given)

    model.run_blocks = run_blocks  # type: ignore[method-assign]
