"""Make one run: resume its training, measure it stage by stage, write its result. Each stage is kept once it is done.

runs/NAME/      the run folder of training; removed once the result is written, unless weights are kept
parts/NAME/     outcomes of stages, until the result is written
records/NAME.json
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from sinkdlm.checkpoint.directory import load
from sinkdlm.config.recipe import BUDGETS, Recipe, merge
from sinkdlm.config.toml import nest, overlay
from sinkdlm.evals.requests import Sheet
from sinkdlm.reproduce.inputs import Asked, Inputs
from sinkdlm.reproduce.matrix import ADAPT, SCALES, SFT, TRIAL_SHARE, VARIANTS, Job, Scale, stages_declared
from sinkdlm.reproduce.measuring import Found, Model, ask, ask_officially, score_answers, score_cuts, score_documents, watch
from sinkdlm.reproduce.results import RUN, TRIAL, Outcome, RunResult, provenance, write_result, write_text
from sinkdlm.training.health import read_lines, read_peaks
from sinkdlm.training.loop import train
from sinkdlm.training.setup import LoadParent


class Bench(NamedTuple):
    """What runs are made with. sheets: questions of each requested task."""

    asked: Asked
    inputs: Inputs
    load_parent: LoadParent
    sheets: Mapping[str, Sheet] = {}

    @property
    def scale(self) -> Scale:
        return SCALES[self.asked.scale]

    @property
    def quiet(self) -> bool:
        return self.asked.scale == "nano"

    @property
    def where(self) -> torch.device:
        return torch.device(self.asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def provenance(self) -> dict[str, Any]:
        """How a result was made: time, command, environment, data."""
        return {**provenance(self.where), "data": dict(self.inputs.about)}

    def folder(self, job: Job) -> Path:
        return self.asked.out / "runs" / job.name

    def parts(self, job: Job) -> Path:
        return self.asked.out / "parts" / job.name


def recipe_of(job: Job, bench: Bench, lr: float | None) -> Recipe:
    """The group's table, then the variant's changes, the job's seed and learning rate, data and parent, and --set on top."""
    inputs, base = bench.inputs, job.base
    changes = VARIANTS[job.variant].changes
    if "first" in changes.get("data", {}):
        changes = {} if job.group == SFT else {"data": {"first": inputs.eos}}
    rate = {} if lr is None else {"lr": lr, "min_lr": lr / 10}
    seeded: dict[str, Any] = {
        "train": {"seed": job.seed, **rate},
        "model": dict(inputs.shape),
        "data": {"sets": {str(inputs.sft if job.group == SFT else inputs.text): 1.0}},
    }
    if base is not None:
        seeded["init"] = {"from": str(bench.folder(base) / "model")}
    elif job.group == ADAPT:
        seeded["init"] = {"from": inputs.parent}
    table: dict[str, Any] = {}
    overrides = reduce(overlay, (nest(*change) for change in bench.asked.changes.items()), table)
    for part in (bench.scale.tables[job.group], changes, seeded, overrides):
        table = merge(table, part)
    if job.trial is not None:
        budget = next(name for name in BUDGETS if name in table["train"])
        share = table["train"][budget] * TRIAL_SHARE
        table["train"] = {**table["train"], budget: max(1, round(share)) if budget == "steps" else share}
    return Recipe.resolve(table)


def stages_of(job: Job, bench: Bench) -> list[str]:
    """The declared stages of the requested tasks."""
    found = []
    for stage in stages_declared(job, bench.scale):
        kind, _, task = stage.partition(" ")
        if (not task or task in bench.sheets) and (kind != "official" or bench.asked.official):
            found.append(stage)
    return found


def measure(stage: str, model: Model, bench: Bench, recipe: Recipe) -> Found:
    kind, _, task = stage.partition(" ")
    if kind == "task":
        return ask(model, bench.sheets[task], task)
    if kind == "official":
        return ask_officially(model, bench.sheets[task], task, bench.scale.official[task])
    if kind == "validation":
        return score_documents(model, bench.inputs, bench.scale, recipe.data.length)
    return {"answers": score_answers, "cuts": score_cuts, "capture": watch}[kind](model, bench.inputs, bench.scale)


class TimeUp(Exception):  # noqa: N818  (no error: it was asked for)
    """What is done is kept; the same command goes on."""


def run_job(
    job: Job, bench: Bench, lr: float | None, told: Mapping[str, Any], say: Callable[[str], None], is_late: Callable[[], bool]
) -> RunResult:
    """Train and measure what is left, and write the result. Raises TimeUp between stages."""
    recipe = recipe_of(job, bench, lr)
    folder, parts = bench.folder(job), bench.parts(job)
    mark = parts / "recipe.toml"
    if parts.is_dir() and (not mark.exists() or mark.read_text() != recipe.to_toml()):  # outcomes of another recipe
        shutil.rmtree(parts)
    write_text(mark, recipe.to_toml())
    done = {path.stem: json.loads(path.read_text()) for path in sorted(parts.glob("*.json"))}

    def keep(stage: str, found: Found, seconds: float) -> None:
        outcomes = {name: outcome.to_json() for name, outcome in found.outcomes.items()}
        done[stage] = {"outcomes": outcomes, "layers": found.layers, "told": found.told, "seconds": round(seconds, 2)}
        write_text(parts / f"{stage}.json", json.dumps(done[stage]))

    missing = [stage for stage in stages_of(job, bench) if stage not in done]
    if missing:
        trained = train_job(recipe, folder, bench)
        keep("train", Found(told=trained), sum(line["timing"]["seconds"] for line in read_lines(folder, "train")))
        dtype = torch.bfloat16 if bench.where.type == "cuda" else torch.float32
        model = Model(load(folder / "model", device=bench.where, dtype=dtype), recipe.data.first)
        for stage in missing:
            if is_late():
                raise TimeUp(job.name)
            began = time.monotonic()
            keep(stage, measure(stage, model, bench, recipe), time.monotonic() - began)
            say(f"{job.name}: {stage} in {done[stage]['seconds']:.1f} s")
    outcomes = {name: Outcome.from_json(said) for part in done.values() for name, said in part["outcomes"].items()}
    layers = {name: values for part in done.values() for name, values in part["layers"].items()}
    facts = {
        **done["train"]["told"],
        **told,
        "seconds": {stage: part["seconds"] for stage, part in done.items()},
        **bench.provenance(),
        "changes": bench.asked.changes,
        "recipe": recipe.to_toml(),
        **{name: value for stage, part in done.items() if stage != "train" for name, value in part["told"].items()},
    }
    kind = RUN if job.trial is None else TRIAL
    place = (job.name, kind, bench.scale.name, job.group, job.variant, job.seed, recipe.train.lr)
    result = RunResult(*place, outcomes, layers, facts)
    write_result(bench.asked.folder, result)
    return result


def train_job(recipe: Recipe, folder: Path, bench: Bench) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.compiler.reset()  # each variant recompiles the same blocks, and the compiler gives up after some recompilations
    _give_back()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=bench.quiet)
    found = train(recipe, folder, load_parent=bench.load_parent, device=bench.asked.device, console=console)
    _give_back()
    return {**{name: found[name] for name in ("steps", "tokens", "skipped")}, "peaks": read_peaks(folder)}


def _give_back() -> None:
    """Free the device's cached memory: micro-batches are chosen for all of it, and other processes may share it."""
    gc.collect()  # a run leaves reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clear(job: Job, bench: Bench) -> None:
    """Remove a run's files once there is a result: weights are large, and its recipe can make them again."""
    shutil.rmtree(bench.parts(job), ignore_errors=True)
    if not bench.asked.keep_weights:
        shutil.rmtree(bench.folder(job), ignore_errors=True)
