"""How fast a step was: tokens and operations a second, and memory, of one device."""

from typing import Any

import torch

from sinkdlm.config.recipe import Recipe
from sinkdlm.distributed.world import World
from sinkdlm.planning.formulas import count_held, peak_flops, training_flops
from sinkdlm.training.choose import Way


def speed_of(
    recipe: Recipe, way: Way, world: World, precision: str, step: int, n_masked: int, seconds: float, waited: float
) -> dict[str, Any]:
    """step: counted from 0. seconds: of the whole step, the wait for its rows included."""
    tokens, halves = recipe.train.batch * recipe.data.length, 1 + recipe.blocks.complementary
    size = recipe.blocks.size_at(step)
    model = recipe.model if size is None else recipe.model.replace(block_size=size)
    trained = None if recipe.adapter.kind == "none" else count_held(recipe)[1]
    given = (model, recipe.data.length, n_masked / tokens / halves)
    flops = halves * tokens * training_flops(*given, ends_early=way.ends_early, trained=trained) / world.size
    found: dict[str, Any] = {
        "seconds": seconds,
        "data_seconds": waited,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": flops / seconds,
    }
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device))
        found["mfu"] = flops / seconds / peak if peak and precision == "bf16" else None
        found["memory_gb"] = torch.cuda.max_memory_allocated(world.device) / 1e9
    return found
