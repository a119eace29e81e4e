"""Measure GPU memory of one rank by layout and recomputation, beside the formula of planning/formulas.py.

    python -m benchmarks.memory --model smdm-472m --rows 8 --ranks 1,2,4,8,64 --out benchmarks/results

One GPU stands for one rank of many: with torch's fake process group, rank 0 holds its shards and buffers without other ranks. The
computed numbers are meaningless, but the allocations are those of a real rank.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import result, write
from sinkdlm import DiffusionLM, Recipe
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss
from sinkdlm.distributed.world import World
from sinkdlm.fast import compile_blocks
from sinkdlm.fast.objective import chunked_nll
from sinkdlm.planning.formulas import Layout, training_memory
from sinkdlm.training.choose import settle_runner, settle_way
from sinkdlm.training.optimizer import Optimizer
from sinkdlm.training.weights import Weights

_STEPS = 3


def pretend(ranks: int, device: torch.device) -> World:
    """The world of rank 0 among `ranks`, of which the others are fake."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    world = World(device)
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        world.size = ranks
    return world


def measure_rank(recipe: Recipe, rows: int, layout: Layout | None, forwards: int, device: torch.device) -> dict[str, int]:
    """Peak bytes of a training step, and bytes held between steps."""
    ranks = 1 if layout is None else layout.ranks
    world = pretend(ranks, device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = DiffusionLM(recipe.model)
    way = settle_way(recipe, world, layout, full_rows=True)
    settle_runner(model, way, recipe, "bf16", print)
    weights = Weights(
        model,
        world,
        dtype=torch.float32,
        first=lambda name, shape: torch.zeros(shape),
        layout=layout,
        reshard=recipe.parallel.reshard,
        travels_as=torch.bfloat16,
    )
    if way.compile == "blocks":
        compile_blocks(model)
    optimizer = Optimizer(weights.local, recipe.train)
    tokens = torch.randint(0, recipe.model.vocab_size, (rows, recipe.data.length), device=device)
    samples = torch.arange(rows, device=device)
    for step in range(_STEPS):
        if step == _STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        for forward in range(forwards):
            noisy = corrupt(tokens, samples, seed=0, mask_id=recipe.model.mask_id, schedule=Schedule())
            with torch.autocast("cuda", torch.bfloat16):
                loss = denoising_loss(weights.model, tokens, noisy, denominator=1.0, nll=chunked_nll)
            weights.before_backward(last=forward == forwards - 1)
            loss.total.backward()
            del loss
        weights.take_gradients()
        optimizer.step(1e-4)
        weights.clear_gradients()
    torch.cuda.synchronize()
    found = {"peak": torch.cuda.max_memory_allocated() - before, "between": torch.cuda.memory_allocated() - before}
    del weights, optimizer, model
    torch._dynamo.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smdm-472m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ranks", default="1,2,8,64")
    parser.add_argument("--recompute", default="none,selective,full")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    device = torch.device("cuda")
    figures: dict[str, Any] = {}
    for how in given.recompute.split(","):
        for ranks in map(int, given.ranks.split(",")):
            layouts = [None] if ranks == 1 else [Layout(1, ranks)] + ([Layout(ranks, 1)] if ranks == 8 else [])
            for layout in layouts:
                for forwards in (1, 2) if how == "none" else (1,):
                    train = {"batch": given.rows * ranks * forwards, "recompute": how, "steps": 1, "precision": "bf16"}
                    model = {"preset": given.model, "n_sinks": 1}
                    recipe = Recipe.resolve({"model": model, "data": {"length": given.length}, "train": train})
                    measured = measure_rank(recipe, given.rows, layout, forwards, device)
                    plan = training_memory(recipe, given.rows, layout, accumulates=forwards > 1)
                    name = f"{how}, {layout.name if layout else 'alone'} {ranks}, {forwards} forwards"
                    planned = {**plan._asdict(), "total": plan.total}
                    figures[name] = {**measured, "planned": planned, "ratio": plan.total / measured["peak"]}
                    print(name, measured, plan.total, round(plan.total / measured["peak"], 3), flush=True)
    settings = {"model": given.model, "rows": given.rows, "length": given.length, "compile": "auto", "precision": "bf16"}
    write(result("memory", figures, device="cuda", settings=settings), given.out, subject=given.model)


if __name__ == "__main__":
    main()
