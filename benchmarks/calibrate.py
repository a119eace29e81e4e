"""Fit the constants of `sinkdlm plan` to the results, and write them with the results' names.

    python -m benchmarks.calibrate              # refit, and print how well each result is predicted
    python -m benchmarks.calibrate --since 2026-12-01    # leave out earlier steps, of slower code

Needs no GPU. Reads train-*, train_step-* and checkpoint-* (steps of whole models), attention-* and loss-* (their parts). There are
few results, so the fit keeps each constant near a prior value.
"""

import argparse
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measuring import RESULTS
from sinkdlm.config.recipe import Recipe
from sinkdlm.planning.formulas import Chip, Layout, find_chip, fitting_micro_batch, training_memory
from sinkdlm.planning.step_time import CALIBRATION, Constants, fitted, head_seconds, step_seconds

# Prior values of the fit. matmuls: from the profile of a forward in findings.md; passes: six over memory in forward and backward.
# _STAY: the weight of the priors.
_FIRST = {"matmuls": 0.7, "attention": 0.45, "passes": 6.0, "logit": 40.0, "lane": 18.0, "block": 3e-4, "step": 3e-3}
_STAY = 0.15
_PART = 0.3  # weight of a part's result, relative to a whole step's
_TURNS, _TINY = 60, 1e-6  # most iterations of the fit, and the change that ends it
_OURS = ("vanilla", "sink", "gate")
_HALF = "-residual"  # suffix of forms with a bf16 residual stream


class Timed(NamedTuple):
    """A timed training step from a result, on one GPU."""

    result: str
    name: str
    recipe: Recipe
    rows: int  # of a forward
    forwards: int
    seconds: float
    peak: float | None  # bytes
    chip: Chip
    date: str

    @property
    def tokens(self) -> int:
        return self.rows * self.forwards * self.recipe.data.length

    def seconds_by(self, constants: Constants) -> float:
        return step_seconds(self.recipe, self.rows * self.forwards, self.forwards, self.chip, constants=constants).total

    @property
    def planned_seconds(self) -> float:
        return self.seconds_by(fitted())

    @property
    def planned_peak(self) -> int:
        return training_memory(self.recipe, self.rows, accumulates=self.forwards > 1).total


def entries(benchmark: str, folder: Path = RESULTS) -> Iterator[tuple[str, dict[str, Any], Chip]]:
    """Results of a benchmark on GPUs that `plan` knows."""
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        entry = json.loads(path.read_text())
        chip = find_chip(entry["hardware"].get("gpu", ""))
        if entry["benchmark"] == benchmark and chip is not None:
            yield path.name, entry, chip


def timed_steps(folder: Path = RESULTS) -> list[Timed]:
    """Every timed step of a whole model, of our own code."""
    return [*_runs(folder), *_forms(folder), *_saving_runs(folder)]


def _runs(folder: Path) -> Iterator[Timed]:
    for name, entry, chip in entries("train", folder):
        recipe = Recipe.resolve(tomllib.loads(entry["settings"]["resolved"]))
        memory = int(entry["hardware"]["gpu_memory_gib"] * 2**30)
        batch, figures = recipe.train.batch, entry["figures"]
        rows = recipe.train.micro_batch or fitting_micro_batch(recipe, memory, batch)
        seconds = batch * recipe.data.length / figures["tokens_per_second"]["p50"]
        peak = figures["memory_gb"] * 1e9
        yield Timed(name, entry["settings"]["recipe"], recipe, rows, -(-batch // rows), seconds, peak, chip, entry["date"])


def _recipe(preset: str, length: int, residual: str = "float32", **flags: Any) -> Recipe:
    train = {"precision": "bf16", "residual": residual, "compile": "blocks", "steps": 1}
    return Recipe.resolve({"model": {"preset": preset, **flags}, "data": {"length": length}, "train": train})


def _forms(folder: Path) -> Iterator[Timed]:
    """Steps of train_step results and their sweeps. Peak memory is kept only for forms that were alone or first."""
    flags: dict[str, dict[str, Any]] = {"vanilla": {}, "sink": {"n_sinks": 1}, "gate": {"gate": "elementwise"}}
    for name, entry, chip in entries("train_step", folder):
        given, figures = entry["settings"], entry["figures"]
        if is_launched(entry):
            continue
        for number, (form, row) in enumerate(figures["forms"].items()):
            kind = form.removesuffix(_HALF)
            if kind in _OURS:
                residual = "bf16" if form.endswith(_HALF) else "float32"
                recipe = _recipe(given["model"], given["length"], residual, **flags[kind])
                peak = row["peak_gb"] * 1e9 if given["alone"] or number == 0 else None
                what = f"{given['model']} {form}, {given['rows']} x {given['length']}"
                yield Timed(name, what, recipe, given["rows"], 1, row["ms_step"]["p50"] / 1000, peak, chip, entry["date"])
        for row in figures.get("sweep", []):
            recipe = _recipe(given["model"], row["length"], n_sinks=1)
            what = f"{given['model']} sink, {row['rows']} x {row['length']}"
            yield Timed(name, what, recipe, row["rows"], 1, row["ms_step"]["p50"] / 1000, None, chip, entry["date"])


def _saving_runs(folder: Path) -> Iterator[Timed]:
    for name, entry, chip in entries("checkpoint", folder):
        given = entry["settings"]
        if given["ranks"] == 1:
            recipe = _recipe(given["model"], given["length"], n_sinks=1)
            seconds = entry["figures"]["before"]["step_ms"]["p50"] / 1000
            yield Timed(name, f"{given['model']} sink", recipe, given["rows"], 1, seconds, None, chip, entry["date"])


class Peak(NamedTuple):
    """Peak memory of one rank from a result, and as planned."""

    result: str
    name: str
    measured: float
    planned: int


def peaks(folder: Path = RESULTS, since: str = "") -> list[Peak]:
    """Measured peaks beside today's formula. since: leaves out earlier steps, but no result of benchmarks.memory."""
    steps = [step for step in timed_steps(folder) if step.date >= since]
    found = [Peak(step.result, step.name, step.peak, step.planned_peak) for step in steps if step.peak is not None]
    for result, entry, _ in entries("memory", folder):
        for name, figure in entry["figures"].items():
            recompute, place, forwards = name.split(", ")
            kind, ranks = place.split()
            layout = {"alone": None, "shard": Layout(1, int(ranks)), "replicate": Layout(int(ranks), 1)}[kind]
            given = entry["settings"]
            table = _recipe(given["model"], given["length"], n_sinks=1).to_dict()
            table["train"]["recompute"] = recompute
            plan = training_memory(Recipe.resolve(table), given["rows"], layout, accumulates=forwards != "1 forwards")
            found.append(Peak(result, f"{given['model']}, {name}", figure["peak"], plan.total))
    return found


class Part(NamedTuple):
    """A part of a step that was timed alone; `planned` gives its seconds by the constants."""

    result: str
    name: str
    seconds: float
    chip: Chip
    sizes: tuple[int, ...]

    def planned(self, constants: Constants) -> float:
        if self.name == "head":
            scored, width, vocab = self.sizes
            return head_seconds(scored, width, vocab, self.chip, constants)
        batch, length, heads, _, width = self.sizes
        if self.name == "attention":
            return 12 * batch * length * length * heads * width / (constants.attention * self.chip.flops)
        return constants.lane * batch * length * heads * width / self.chip.bandwidth


def timed_parts(folder: Path = RESULTS) -> list[Part]:
    found = []
    for result, entry, chip in entries("attention", folder):
        for shape, row in entry["figures"].items():
            sizes = tuple(map(int, shape.split("x")))
            took = {form: timed["p50"] / 1000 for form, timed in row["ms_forward_backward"].items()}
            found.append(Part(result, "attention", took["plain"], chip, sizes))
            found.append(Part(result, "lane", took["trained"] - took["trained-plain"], chip, sizes))
    for result, entry, chip in entries("loss", folder):
        for shape, row in entry["figures"].items():
            seconds = row["ms_forward_backward"]["chunked"]["p50"] / 1000
            found.append(Part(result, "head", seconds, chip, tuple(map(int, shape.split("x")))))
    return found


def host_seconds(folder: Path = RESULTS) -> float:
    """Seconds that the host needs to launch a block, forward and backward: the least time of a block in results whose kernels were
    launched one by one."""
    found = []
    for _, entry, _ in entries("train_step", folder):
        if is_launched(entry):
            layers = _recipe(entry["settings"]["model"], entry["settings"]["length"]).model.n_layers
            found += [row["ms_step"]["p50"] / 1000 / layers for form, row in entry["figures"]["forms"].items() if form in _OURS]
    return min(found)


def is_launched(entry: dict[str, Any]) -> bool:
    """Whether the steps of a result were launched kernel by kernel, and so are bound by the host."""
    return entry["settings"].get("graphs", "off") == "off"


def fit(steps: list[Timed], parts: list[Part], launch: float) -> Constants:
    """Fit the constants: least squares of log ratios, by Gauss-Newton over the constants' logarithms."""
    names, first = list(_FIRST), np.log(list(_FIRST.values()))

    def misses(point: Any) -> Any:
        constants = Constants(**dict(zip(names, np.exp(point), strict=True)), launch=launch)
        whole = [
            np.log(step_seconds(s.recipe, s.rows * s.forwards, s.forwards, s.chip, constants=constants).total / s.seconds)
            for s in steps
        ]
        apart = [_PART * np.log(part.planned(constants) / part.seconds) for part in parts]
        return np.array([*whole, *apart, *(_STAY * (point - first))])

    point = first
    for _ in range(_TURNS):
        here = misses(point)
        slopes = np.stack([(misses(point + _TINY * unit) - here) / _TINY for unit in np.eye(len(names))], 1)
        change = np.clip(np.linalg.lstsq(slopes, -here, rcond=None)[0], -0.5, 0.5)
        point = point + change
        if np.abs(change).max() < _TINY:
            break
    found = {name: float(f"{value:.4g}") for name, value in zip(names, np.exp(point), strict=True)}
    return Constants(**found, launch=float(f"{launch:.4g}"))


def foretold(steps: list[Timed], folder: Path = RESULTS) -> list[float]:
    """Seconds of each step, by constants fitted without its result (cross-validation)."""
    parts, launch = timed_parts(folder), host_seconds(folder)
    without = {
        name: fit([step for step in steps if step.result != name], parts, launch) for name in {step.result for step in steps}
    }
    return [step.seconds_by(without[step.result]) for step in steps]


def table(folder: Path = RESULTS, since: str = "") -> dict[str, Any]:
    """The content of calibration.json."""
    steps = timed_steps(folder)
    used = [step for step in steps if step.date >= since]
    parts = timed_parts(folder)
    constants = fit(used, parts, host_seconds(folder))
    devices = sorted({step.chip.name for step in used})
    results = sorted({step.result for step in used} | {part.result for part in parts})
    return {"device": devices, "since": since, "records": results, "constants": constants._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default=None, metavar="DATE", help="leave out earlier steps; default: the last --since")
    given = parser.parse_args()
    before = json.loads(CALIBRATION.read_text()) if CALIBRATION.exists() else {"since": ""}
    found = table(since=before["since"] if given.since is None else given.since)
    CALIBRATION.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    constants = Constants(**found["constants"])
    for step in timed_steps():
        planned = step.seconds_by(constants)
        rates = f"{step.tokens / step.seconds:12,.0f} tokens/s, planned {step.tokens / planned:12,.0f}"
        note = "" if step.date >= found["since"] else " (left out)"
        print(f"{step.seconds / planned - 1:+7.1%}  {rates}  {step.name} ({step.result}){note}")
    for part in timed_parts():
        print(f"{part.seconds / part.planned(constants) - 1:+7.1%}  {part.name} of {part.sizes} ({part.result})")
    for peak in peaks(since=found["since"]):
        print(f"{peak.planned / peak.measured - 1:+7.1%}  {peak.measured / 1e9:6.1f} GB  {peak.name} ({peak.result})")


if __name__ == "__main__":
    main()
