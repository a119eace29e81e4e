"""Measure the cost of saving states: time lost for each save, written before the next step or in the background.

    python -m benchmarks.checkpoint --model smdm-472m --rows 8 --length 2048 --out benchmarks/results
    torchrun --standalone --nproc-per-node 4 -m benchmarks.checkpoint --device cpu --model nano --rows 8 --length 64

Each way is a real training run on synthetic tokens. Lost time is the steps' time beyond the median step of the same run,
so background writing is charged for the steps that it slows.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.kills import write_set
from benchmarks.measuring import quantiles, result, write
from sinkdlm import Recipe
from sinkdlm.distributed.world import World, joined
from sinkdlm.training import loop
from sinkdlm.training.gradients import StepResult
from sinkdlm.training.monitor import Monitor
from sinkdlm.training.run import RunFolder

_WARM = 5  # untimed steps: compilation, pinned buffers


class Timed(loop.Trainer):
    """A trainer that notes when each step begins."""

    def __init__(self, *arguments: Any) -> None:
        self.begins: list[float] = []
        super().__init__(*arguments)

    def _make_step(self, *arguments: Any) -> StepResult:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.begins.append(time.perf_counter())
        return super()._make_step(*arguments)


def run_way(recipe: Recipe, out: Path, world: World) -> dict[str, Any]:
    folder = RunFolder(out, recipe, world)
    monitor = Monitor(out, recipe.log, Console(stderr=True)) if world.first else None
    trainer = Timed(recipe, folder, None, world, monitor)
    try:
        trainer.run()
    finally:
        folder.close()
    spans = [after - before for before, after in zip(trainer.begins, trainer.begins[1:], strict=False)][_WARM:]
    middle = statistics.median(spans)
    saves = sum(step % recipe.save.every == 0 for step in range(_WARM + 1, recipe.train.steps or 0))
    state = sum(part.numel() * part.element_size() for part in trainer._tensors().values())
    return {
        "step_ms": quantiles([1000 * span for span in spans]),
        "saves": saves,
        "lost_ms_per_save": 1000 * (sum(spans) - middle * len(spans)) / max(1, saves),
        "lost_ms_per_step": 1000 * (sum(spans) - middle * len(spans)) / len(spans),
        "longest_step_ms": 1000 * max(spans),
        "state_gb": state / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=65)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--mode", default="shard")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with joined(given.device) as world:
        place = world.from_first(lambda: tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
        if world.first:
            write_set(Path(place) / "data", tokens=max(20_000, given.length * 2000))
        world.wait()
        for way in ("before", "behind"):
            recipe = Recipe.resolve(
                {
                    "model": {"preset": given.model, "n_sinks": 1},
                    "data": {"length": given.length, "sets": {str(Path(place) / "data"): 1.0}},
                    "train": {"steps": given.steps, "batch": given.rows * world.size, "micro_batch": given.rows},
                    "parallel": {"mode": given.mode},
                    "eval": {"every": 0},
                    "log": {"probe_every": 0},
                    "save": {"every": given.every, "background": way == "behind"},
                }
            )
            figures[way] = run_way(recipe, Path(place) / way, world)
        if world.first:
            settings = {name: value for name, value in vars(given).items() if name not in ("out", "device")} | {"ranks": world.size}
            subject = f"{given.model}-{world.size}-ranks" if world.size > 1 else given.model
            write(result("checkpoint", figures, device=given.device, settings=settings), given.out, subject=subject)


if __name__ == "__main__":
    main()
