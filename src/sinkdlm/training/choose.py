"""How the steps of a run are computed: the recipe's "auto", as it is read on this machine."""

import importlib.util
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from sinkdlm import fast
from sinkdlm.config.recipe import Recipe
from sinkdlm.distributed.world import World
from sinkdlm.errors import TrainError
from sinkdlm.model.model import DiffusionLM, run_plain
from sinkdlm.planning.formulas import Layout, fitting_micro_batch, settle_precision, training_flops
from sinkdlm.training.head_slots import plan_slots

# FLOPs of a layer in one micro-batch from which the host, launching each kernel by itself, is ahead of a device all the same: an
# H200 takes 10 ms for them, and the host 3 to 5 to launch a layer forward and backward. In float8 there is more to launch, and a
# device is done sooner.
_AHEAD = {"bf16": 3e12, "fp8": 6e12}


class Way(NamedTuple):
    """compile: what torch's compiler takes. flat: rows are full, and train as flat tokens of one matrix."""

    compile: Literal["none", "blocks", "whole"]
    micro_batch: int
    flat: bool
    ends_early: bool = False  # whether the last layer ends where the loss looks, which counts in FLOPs

    @property
    def compiled(self) -> bool:
        return self.compile != "none"

    @property
    def frugal(self) -> bool:
        """Whether blocks keep for the backward no more than they need."""
        return self.compiled or self.flat


def settle_runner(model: DiffusionLM, way: Way, recipe: Recipe, precision: str, say: Callable[[str], None]) -> None:
    """Gives a model the runner of its run, before its weights are on their device. precision: with "auto" settled."""
    train = recipe.train
    if train.runner == "plain":
        model.runner = run_plain
        return
    residual = torch.bfloat16 if train.residual == "bf16" else None
    plan = fast.Plan(float8=precision == "fp8", residual=residual, recompute=train.recompute, compile=way.compile)
    for line in fast.prepare(model, plan):
        say(line)


def settle_way(recipe: Recipe, world: World, layout: Layout | None = None, *, full_rows: bool) -> Way:
    """full_rows: every row is full and sees all of itself."""
    device = world.device
    recipe = settle_precision(recipe, on_gpu=device.type == "cuda")
    train, plain = recipe.train, recipe.train.runner == "plain"
    if train.compile == "whole" and not (device.type == "cpu" and world.alone):
        raise TrainError("train.compile = 'whole': for one process on a CPU; 'blocks' is the cure")
    if plain and (train.precision == "fp8" or train.recompute != "none" or train.residual == "bf16"):
        raise TrainError(
            "train.runner = 'plain': knows no fp8, no recomputation and no bf16 residual stream; train.runner = 'auto' is the cure"
        )
    flat = full_rows and train.precision in ("bf16", "fp8") and not plain
    flat = flat and fast.supports_flat(recipe.model, device.type, torch.bfloat16, recipe.data.length)
    compile_ = "none" if plain else train.compile
    if compile_ == "auto":
        compile_ = "blocks" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "none"
    share, frugal = world.largest_share(train.batch), flat or compile_ != "none"
    rows = train.micro_batch or fitting_micro_batch(recipe, world.memory, share, layout, compiled=frugal)
    if train.compile == "auto" and flat and world.alone and _needs_no_compiler(recipe, rows):
        compile_ = "none"
    early = not plain and (flat and world.alone if device.type != "cpu" else compile_ != "blocks")
    return Way(compile_, rows, flat, early)


def _needs_no_compiler(recipe: Recipe, micro_batch: int) -> bool:
    """Whether torch's compiler would not help: kernels leave it nothing to fuse, and the GPU is busy or replays captures."""
    config, train, length = recipe.model, recipe.train, recipe.data.length
    biased = train.precision == "fp8" and config.qkv_bias  # added beside the float8 matmuls
    if config.gate != "none" or train.anneal or biased:
        return False
    if micro_batch * length * training_flops(config, length) / config.n_layers >= _AHEAD[train.precision]:
        return True
    slots = plan_slots(train, micro_batch, length, torch.tensor([length - config.shift_logits]))
    return train.graphs == "on" or (train.graphs == "auto" and slots.pay(config))
