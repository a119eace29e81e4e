"""One run: trained where it was left, measured stage by stage, and its result. Each stage is kept as soon as it is done.

runs/NAME/      the run folder of training; gone once the result is written, unless weights are kept
parts/NAME/     what stages found, until the result is written
records/NAME.json
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from sinkdlm.checkpoint.directory import load
from sinkdlm.config.recipe import BUDGETS, Recipe
from sinkdlm.config.toml import nest, overlay, parse_override
from sinkdlm.evals.requests import Sheet
from sinkdlm.reproduce.inputs import Given, Inputs
from sinkdlm.reproduce.matrix import ADAPT, SCALES, SFT, VARIANTS, Job, Scale, stages_declared
from sinkdlm.reproduce.measuring import Found, Model, ask, ask_officially, score_answers, score_cuts, score_documents, watch
from sinkdlm.reproduce.results import RUN, TRIAL, Outcome, RunResult, provenance, write_result, write_text
from sinkdlm.training.health import read_lines, read_peaks
from sinkdlm.training.loop import train
from sinkdlm.training.setup import LoadParent


class Asked(NamedTuple):
    """What the command line asks. seeds: None for the scale's own number."""

    target: str
    scale: str
    out: Path
    seeds: int | None = None
    records: Path | None = None
    given: Given = Given()
    only: Sequence[str] = ()
    tasks: Sequence[str] | None = None
    overrides: Sequence[str] = ()
    time_limit: float | None = None
    keep_weights: bool = False
    official: bool = False
    device: str | None = None

    @property
    def folder(self) -> Path:
        """Of results."""
        return self.records or self.out / "records"

    @property
    def changes(self) -> dict[str, Any]:
        """--set: a result of other settings must not pass for one of the declared ones."""
        return dict(parse_override(override) for override in self.overrides)


@dataclass(frozen=True)
class Bench:
    """Where runs are made, and with what. sheets: of each task that is asked."""

    asked: Asked
    inputs: Inputs
    load_parent: LoadParent
    sheets: Mapping[str, Sheet] = field(default_factory=dict)

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
        """What a file of numbers says about how it came to be."""
        return {**provenance(self.where), "data": dict(self.inputs.about)}

    def folder(self, job: Job) -> Path:
        return self.asked.out / "runs" / job.name

    def parts(self, job: Job) -> Path:
        return self.asked.out / "parts" / job.name


def recipe_of(job: Job, bench: Bench, lr: float | None) -> Recipe:
    """The group's table, the variant's changes, this run's seed and learning rate, what data and parent say, and --set on top."""
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
    table: dict[str, Any] = {key: dict(value) for key, value in bench.scale.tables[job.group].items()}
    for part in (changes, seeded, *(nest(*parse_override(override)) for override in bench.asked.overrides)):
        if any(name in part.get("train", {}) for name in BUDGETS):  # a budget replaces the one that stood there
            table["train"] = {name: value for name, value in table["train"].items() if name not in BUDGETS}
        table = overlay(table, part)
    if job.trial is not None:
        budget = next(name for name in BUDGETS if name in table["train"])
        share = table["train"][budget] * bench.scale.trial_share
        table["train"] = {**table["train"], budget: max(1, round(share)) if budget == "steps" else share}
    return Recipe.resolve(table)


def stages_of(job: Job, bench: Bench) -> list[str]:
    """Those that are declared, of the tasks that are asked."""
    found = []
    for stage in stages_declared(job, bench.scale):
        kind, _, task = stage.partition(" ")
        if (not task or task in bench.sheets) and (kind != "official" or bench.asked.official):
            found.append(stage)
    return found


def measure(stage: str, model: Model, bench: Bench, recipe: Recipe) -> Found:
    kind, _, task = stage.partition(" ")
    match kind:
        case "validation":
            return score_documents(model, bench.inputs, bench.scale, recipe.data.length)
        case "answers":
            return score_answers(model, bench.inputs, bench.scale)
        case "task":
            return ask(model, bench.sheets[task], task)
        case "official":
            return ask_officially(model, bench.sheets[task], task, bench.scale.official[task])
        case "cuts":
            return score_cuts(model, bench.inputs, bench.scale)
        case _:
            return watch(model, bench.inputs, bench.scale)


class TimeUp(Exception):  # noqa: N818  (no error: it was asked for)
    """What is done is kept; the same command goes on."""


def run_job(
    job: Job, bench: Bench, lr: float | None, told: Mapping[str, Any], say: Callable[[str], None], is_late: Callable[[], bool]
) -> RunResult:
    """Trains what is left to train, measures what is left to measure, and writes the result. Raises TimeUp between stages."""
    recipe = recipe_of(job, bench, lr)
    folder = bench.folder(job)
    parts = _Parts(bench.parts(job), recipe)
    missing = [stage for stage in stages_of(job, bench) if stage not in parts.done]
    if missing:
        trained = train_job(recipe, folder, bench)
        parts.keep("train", Found(told=trained), sum(line["timing"]["seconds"] for line in read_lines(folder, "train")))
        dtype = torch.bfloat16 if bench.where.type == "cuda" else torch.float32
        model = Model(load(folder / "model", device=bench.where, dtype=dtype), recipe.data.first)
        for stage in missing:
            if is_late():
                raise TimeUp(job.name)
            began = time.monotonic()
            found = measure(stage, model, bench, recipe)
            parts.keep(stage, found, time.monotonic() - began)
            say(f"{job.name}: {stage} in {time.monotonic() - began:.1f} s")
    result = _assemble(job, recipe, parts.done, bench, told)
    write_result(bench.asked.folder, result)
    return result


def train_job(recipe: Recipe, folder: Path, bench: Bench) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.compiler.reset()  # variants are recompilations of the same blocks, and after some of these the compiler gives up
    _give_back()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=bench.quiet)
    found = train(recipe, folder, load_parent=bench.load_parent, device=bench.asked.device, console=console)
    _give_back()
    return {**{name: found[name] for name in ("steps", "tokens", "skipped")}, "peaks": read_peaks(folder)}


def _give_back() -> None:
    """The device's memory: a micro-batch is chosen for the whole of it, and other processes may share it."""
    gc.collect()  # a run leaves cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clear(job: Job, bench: Bench) -> None:
    """Once there is a result: weights are large, and it says how to make them again."""
    shutil.rmtree(bench.parts(job), ignore_errors=True)
    if not bench.asked.keep_weights:
        shutil.rmtree(bench.folder(job), ignore_errors=True)


class _Parts:
    """What stages found, a file each; those of another recipe are thrown away."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        mark = folder / "recipe.toml"
        if folder.is_dir() and (not mark.exists() or mark.read_text() != recipe.to_toml()):
            shutil.rmtree(folder)
        write_text(mark, recipe.to_toml())
        self.done = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}

    def keep(self, stage: str, found: Found, seconds: float) -> None:
        outcomes = {name: outcome.to_json() for name, outcome in found.outcomes.items()}
        text = json.dumps({"outcomes": outcomes, "layers": found.layers, "told": found.told, "seconds": round(seconds, 2)})
        write_text(self.folder / f"{stage}.json", text)
        self.done[stage] = json.loads(text)


def _assemble(job: Job, recipe: Recipe, done: Mapping[str, Any], bench: Bench, told: Mapping[str, Any]) -> RunResult:
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
    return RunResult(job.name, kind, bench.scale.name, job.group, job.variant, job.seed, recipe.train.lr, outcomes, layers, facts)
