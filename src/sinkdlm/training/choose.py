"""Decide how a run computes its steps: what each "auto" of the recipe means on this machine."""

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

# FLOPs of one layer in a micro-batch above which the host stays ahead of the GPU without CUDA graphs. In bf16 an H200 takes 10 ms
# for them; the host launches a layer's forward and backward in 3 to 5 ms. float8 launches more kernels, and the GPU is done sooner.
_AHEAD = {"bf16": 3e12, "fp8": 6e12}


class Way(NamedTuple):
    """How steps are computed. compile: what torch.compile covers. flat: full rows train as one matrix of flat tokens."""

    compile: Literal["none", "blocks", "whole"]
    micro_batch: int
    flat: bool
    ends_early: bool = False  # after attention, the last layer computes scored positions only

    @property
    def compiled(self) -> bool:
        return self.compile != "none"

    @property
    def frugal(self) -> bool:
        """Whether blocks keep only what their backward needs."""
        return self.compiled or self.flat


def settle_runner(model: DiffusionLM, way: Way, recipe: Recipe, precision: str, say: Callable[[str], None]) -> None:
    """Set the model's runner; call it before the weights are on their device. precision: with "auto" settled."""
    train = recipe.train
    if train.runner == "plain":
        model.runner = run_plain
        return
    residual = torch.bfloat16 if train.residual == "bf16" else None
    plan = fast.Plan(float8=precision == "fp8", residual=residual, recompute=train.recompute, compile=way.compile)
    for line in fast.prepare(model, plan):
        say(line)


def settle_way(recipe: Recipe, world: World, layout: Layout | None = None, *, full_rows: bool) -> Way:
    """Decide how steps are computed. full_rows: every row is full and attends to all of itself."""
    device = world.device
    recipe = settle_precision(recipe, on_gpu=device.type == "cuda")
    train, plain = recipe.train, recipe.train.runner == "plain"
    if train.compile == "whole" and not (device.type == "cpu" and world.alone):
        raise TrainError("train.compile = 'whole': works for one process on a CPU only; set train.compile = 'blocks'")
    if plain and (train.precision == "fp8" or train.recompute != "none" or train.residual == "bf16"):
        raise TrainError(
            "train.runner = 'plain': supports no fp8, no recomputation and no bf16 residual stream; set train.runner = 'auto'"
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
    """Whether torch.compile would not help: our kernels leave nothing to fuse, and the GPU is busy or replays CUDA graphs."""
    config, train, length = recipe.model, recipe.train, recipe.data.length
    biased = train.precision == "fp8" and config.qkv_bias  # the bias is added outside the float8 matmuls
    if config.gate != "none" or config.qk_norm or train.anneal or biased:
        return False
    if micro_batch * length * training_flops(config, length) / config.n_layers >= _AHEAD[train.precision]:
        return True
    slots = plan_slots(train, micro_batch, length, torch.tensor([length - config.shift_logits]))
    return train.graphs == "on" or (train.graphs == "auto" and slots.pay(config))
