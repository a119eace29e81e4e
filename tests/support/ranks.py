"""What the tests run on several ranks: a list of trainings, one after the other, in one process group.

    torchrun --nproc-per-node 2 tests/support/ranks.py JOBS.json

Each job is {"recipe": tables, "out": folder} and, if wanted, "stop": {"rank", "step"}: that rank gets SIGTERM as it checks for
signals after that step; "chunks": true: a chunk of the head for each position; "full": true: rank 0's disk is full at the first
state. Or {"validate": file, "model": folder, "recipe": tables, "shard": whether}; or {"held": file, "recipe": tables}. Warnings are
errors. Beside each run every rank writes down which samples it read, and how they were masked.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console

from sinkdlm import DiffusionLM, Recipe, load
from sinkdlm.cli.loading import load_parent
from sinkdlm.data.rows import open_rows
from sinkdlm.diffusion import Schedule
from sinkdlm.distributed.world import joined
from sinkdlm.fast import objective
from sinkdlm.planning.formulas import Layout
from sinkdlm.training import evaluate, loop
from sinkdlm.training.evaluate import VALIDATION_SEED
from sinkdlm.training.optimizer import Optimizer
from sinkdlm.training.weights import Weights


def run(job: dict) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    seen: dict[int, str] = {}
    look, corrupt = loop.Trainer._look_around, evaluate.corrupt

    def note(tokens, samples, **settings):
        noisy = corrupt(tokens, samples, **settings)
        trains = settings["seed"] != VALIDATION_SEED
        if trains and (settings["maskable"] is None or bool(settings["maskable"].any())):  # else the row is padding of the batch
            for sample, masked, t in zip(samples.tolist(), noisy.masked.tolist(), noisy.t.tolist(), strict=True):
                places = [place for place, bit in enumerate(masked) if bit]  # whatever the row's padding
                times = dict.fromkeys([t] if isinstance(t, float) else [t[place] for place in places or [0]])  # of row or blocks
                seen[sample] = " ".join([*(time.hex() for time in times), *map(str, places)])
        return noisy

    def stop(self):
        look(self)
        if job.get("stop") == {"rank": rank, "step": self.step}:
            os.kill(os.getpid(), signal.SIGTERM)

    scalars, full = loop.Trainer._scalars, [rank == 0 and bool(job.get("full"))]

    def scalars_or_not(self):
        no_room = mock.patch.object(self.monitor.metrics, "flush", side_effect=OSError("No space left on device"))
        with no_room if full and full.pop() else nullcontext():
            return scalars(self)

    loop.Trainer._look_around, evaluate.corrupt, loop.Trainer._scalars = stop, note, scalars_or_not
    small = mock.patch.object(objective, "head_chunk", return_value=1) if job.get("chunks") else nullcontext()
    try:
        with warnings.catch_warnings(), small:
            warnings.simplefilter("error" if job["recipe"]["train"].get("compile") != "blocks" else "ignore")  # torch's own, then
            console = Console(file=sys.stderr)
            loop.train(Recipe.resolve(job["recipe"]), Path(job["out"]), load_parent=load_parent, console=console, device="cpu")
    except loop.Stopped:
        pass
    finally:
        loop.Trainer._look_around, evaluate.corrupt, loop.Trainer._scalars = look, corrupt, scalars
    record = Path(f"{job['out']}.seen") / f"{dist.get_world_size() if dist.is_initialized() else 1}-{rank}.json"
    record.parent.mkdir(exist_ok=True)
    before = json.loads(record.read_text()) if record.exists() else {}
    record.write_text(json.dumps({**before, **seen}))


def validate(job: dict) -> None:
    """Compute a checkpoint's validation loss, with weights whole on every rank or sharded."""
    recipe = Recipe.resolve(job["recipe"])
    few = 2 * recipe.data.length  # tokens a forward: several forwards a rank, and one rank with fewer
    with mock.patch.object(evaluate, "_VALIDATION_TOKENS", few), joined("cpu") as world:
        ids = {"vocab_size": recipe.model.vocab_size, "mask_id": recipe.model.mask_id}
        rows = open_rows(recipe.data, "validation", seed=VALIDATION_SEED, **ids)
        layout = Layout(1, world.size) if job["shard"] else None
        weights = Weights(load(job["model"]).model, world, dtype=torch.float64, layout=layout)
        found = evaluate.validate(weights.model, rows, 13, Schedule(), nullcontext, world)
        if world.first:
            Path(job["validate"]).write_text(json.dumps(found))


def held(job: dict) -> None:
    """Count the bytes of weights and moments that each rank holds, sharded over all."""
    recipe = Recipe.resolve(job["recipe"])
    with joined("cpu") as world, torch.device("meta"):
        model = DiffusionLM(recipe.model)
    weights = Weights(model, world, dtype=torch.float32, layout=Layout(1, world.size))
    moments = Optimizer(weights.local, recipe.train)
    parts = [*weights.local.values(), *moments.moments["exp_avg"].values(), *moments.moments["exp_avg_sq"].values()]
    found = world.gather(sum(part.numel() * part.element_size() for part in parts))
    if world.first:
        Path(job["held"]).write_text(json.dumps({"recipe": job["recipe"], "bytes": found}))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        validate(job) if "validate" in job else held(job) if "held" in job else run(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
