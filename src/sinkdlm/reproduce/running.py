"""One run: trained where it was left, measured stage by stage, and its record. Each stage is kept as soon as it is done.

runs/NAME/      the run folder of training; gone once the record is written, unless weights are kept
parts/NAME/     what stages found, until the record is written
records/NAME.json
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sinkdlm.checkpoint.directory import load
from sinkdlm.config.recipe import BUDGETS, Recipe
from sinkdlm.config.toml import nest, overlay, parse_override
from sinkdlm.evals.requests import Sheet
from sinkdlm.evals.settings import settings_for
from sinkdlm.reproduce.inputs import Inputs
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, OFFICIAL, SFT, VARIANTS, Job, Scale
from sinkdlm.reproduce.measuring import Found, Model, Stage, ask, score_answers, score_cuts, score_documents, watch
from sinkdlm.reproduce.results import RUN, TRIAL, Outcome, Record, provenance, write_record, write_text
from sinkdlm.training.gradient_spikes import read_lines, read_peaks
from sinkdlm.training.loop import train
from sinkdlm.training.setup import LoadParent

_TWINS = tuple(Job(ADAPT, variant, FIRST_SEED) for variant in OFFICIAL)


@dataclass(frozen=True)
class Bench:
    """Where runs are made, and with what."""

    scale: Scale
    inputs: Inputs
    out: Path
    records: Path
    load_parent: LoadParent
    device: str | None = None
    overrides: tuple[str, ...] = ()
    sheets: Mapping[str, Sheet] = field(default_factory=dict)  # of each task that is asked
    quiet: bool = False
    keep_weights: bool = False
    official: bool = False

    @property
    def changes(self) -> dict[str, Any]:
        """--set of this command: a record of other settings must not pass for one of the declared ones."""
        return dict(parse_override(override) for override in self.overrides)

    @property
    def where(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def provenance(self) -> dict[str, Any]:
        """What a file of numbers says about how it came to be."""
        return {**provenance(self.where), "data": dict(self.inputs.about)}

    def folder(self, job: Job) -> Path:
        return self.out / "runs" / job.name

    def parts(self, job: Job) -> Path:
        return self.out / "parts" / job.name


def recipe_of(job: Job, bench: Bench, lr: float | None) -> Recipe:
    """The group's table, the variant's changes, this run's seed and learning rate, what data and parent say, and --set on top."""
    scale, inputs = bench.scale, bench.inputs
    changes = VARIANTS[job.variant]
    if changes.get("data", {}).get("first") == "eos":
        changes = {} if job.group == SFT else {"data": {"first": inputs.eos}}
    seeded: dict[str, Any] = {"train": {"seed": job.seed}, "model": dict(inputs.shape)}
    if lr is not None:
        seeded["train"] |= {"lr": lr, "min_lr": lr / 10}
    sets = inputs.sft if job.group == SFT else inputs.text
    seeded["data"] = {"sets": {str(sets): 1.0}}
    base = job.base
    if base is not None:
        seeded["init"] = {"from": str(bench.folder(base) / "model")}
    elif job.group == ADAPT:
        seeded["init"] = {"from": inputs.parent}
    table: dict[str, Any] = {key: dict(value) for key, value in scale.tables[job.group].items()}
    for part in (changes, seeded, *(nest(*parse_override(override)) for override in bench.overrides)):
        if any(name in part.get("train", {}) for name in BUDGETS):  # a budget replaces the one that stood there
            table["train"] = {name: value for name, value in table["train"].items() if name not in BUDGETS}
        table = overlay(table, part)
    if job.trial is not None:
        budget = next(name for name in BUDGETS if name in table["train"])
        share = table["train"][budget] * scale.trial_share
        table["train"] = {**table["train"], budget: max(1, round(share)) if budget == "steps" else share}
    return Recipe.resolve(table)


def stages_of(job: Job, bench: Bench) -> dict[str, Stage]:
    """What is measured after training, in order. Trials are for the learning rate alone."""
    scale, inputs = bench.scale, bench.inputs
    length = recipe_of(job, bench, None).data.length
    if job.group == SFT:
        found: dict[str, Stage] = {"answers": lambda model: score_answers(model, inputs, scale)}
    else:
        found = {"validation": lambda model: score_documents(model, inputs, scale, length)}
    if job.trial is not None:
        return found
    for task, sheet in bench.sheets.items():
        if (job.group == SFT) == task.startswith("gsm8k"):
            found[f"task {task}"] = _asking(sheet, task)
            if bench.official and job in _TWINS:
                found[f"official {task}"] = _asking_officially(sheet, task, scale.official[task])
    if job.group == ADAPT and job.seed == FIRST_SEED:
        found["cuts"] = lambda model: score_cuts(model, inputs, scale)
    found["capture"] = lambda model: watch(model, inputs, scale)
    return found


def _asking(sheet: Sheet, task: str) -> Stage:
    return lambda model: ask(model, sheet, task)


def _asking_officially(sheet: Sheet, task: str, most: int) -> Stage:
    """The first questions with the official estimator and guidance. Guided values are scores: what they rank is kept, not they."""
    settings = {task: settings_for(task, {}).replace(greedy=sheet.settings[task].greedy)}
    official = replace(sheet, requests=[request for request in sheet.requests if request.doc < most], settings=settings)

    def stage(model: Model) -> Found:
        kept = ask(model, official, task).outcomes
        return Found({f"official.{name}": one for name, one in kept.items() if not name.endswith(".nll")})

    return stage


class TimeUp(Exception):  # noqa: N818  (no error: it was asked for)
    """What is done is kept; the same command goes on."""


def run_job(
    job: Job, bench: Bench, lr: float | None, told: Mapping[str, Any], say: Callable[[str], None], is_late: Callable[[], bool]
) -> Record:
    """Trains what is left to train, measures what is left to measure, and writes the record. Raises TimeUp between stages."""
    recipe = recipe_of(job, bench, lr)
    folder = bench.folder(job)
    stages = stages_of(job, bench)
    parts = _Parts(bench.parts(job), recipe)
    missing = [stage for stage in stages if stage not in parts.done]
    if missing:
        trained = train_job(recipe, folder, bench)
        parts.keep("train", Found(told=trained), sum(line["timing"]["seconds"] for line in read_lines(folder, "train")))
        model = _load(folder / "model", recipe, bench)
        for stage in missing:
            if is_late():
                raise TimeUp(job.name)
            began = time.monotonic()
            found = stages[stage](model)
            parts.keep(stage, found, time.monotonic() - began)
            say(f"{job.name}: {stage} in {time.monotonic() - began:.1f} s")
    record = _assemble(job, recipe, parts, bench, told)
    write_record(bench.records, record)
    return record


def train_job(recipe: Recipe, folder: Path, bench: Bench) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.compiler.reset()  # variants are recompilations of the same blocks, and after some of these the compiler gives up
    _give_back()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=bench.quiet)
    found = train(recipe, folder, load_parent=bench.load_parent, device=bench.device, console=console)
    _give_back()
    return {**{name: found[name] for name in ("steps", "tokens", "skipped")}, "peaks": read_peaks(folder)}


def _give_back() -> None:
    """The device's memory: a micro-batch is chosen for the whole of it, and other processes may share it."""
    gc.collect()  # a run leaves cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clear(job: Job, bench: Bench) -> None:
    """Once there is a record: weights are large, and it says how to make them again."""
    shutil.rmtree(bench.parts(job), ignore_errors=True)
    if not bench.keep_weights:
        shutil.rmtree(bench.folder(job), ignore_errors=True)


def _load(path: Path, recipe: Recipe, bench: Bench) -> Model:
    dtype = torch.bfloat16 if bench.where.type == "cuda" else torch.float32
    return Model(load(path, device=bench.where, dtype=dtype), recipe.data.first)


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
        said = {"outcomes": outcomes, "layers": found.layers, "told": found.told, "seconds": round(seconds, 2)}
        write_text(self.folder / f"{stage}.json", json.dumps(said))
        self.done[stage] = json.loads(json.dumps(said))


def _assemble(job: Job, recipe: Recipe, parts: _Parts, bench: Bench, told: Mapping[str, Any]) -> Record:
    done = parts.done
    outcomes = {name: Outcome.from_json(said) for part in done.values() for name, said in part["outcomes"].items()}
    layers = {name: values for part in done.values() for name, values in part["layers"].items()}
    figures = {name: value for stage, part in done.items() if stage != "train" for name, value in part["told"].items()}
    facts = {
        **done["train"]["told"],
        **told,
        "seconds": {stage: part["seconds"] for stage, part in done.items()},
        **bench.provenance(),
        "changes": bench.changes,
        "recipe": recipe.to_toml(),
        **figures,
    }
    kind = TRIAL if job.trial is not None else RUN
    return Record(job.name, kind, bench.scale.name, job.group, job.variant, job.seed, recipe.train.lr, outcomes, layers, facts)
