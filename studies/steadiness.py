"""Does training lose the sink where gradient norms peak? Trains trials and one run again, and probes attention every few steps.

An adapted sink is a state that its vector and a few of the parent's weights make (inherited.py); heads of all layers rely on it.
Weights are not kept.
"""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sinkdlm.reproduce.markdown import bullets, table
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, TRIAL_SEED, Job
from sinkdlm.reproduce.measuring import short
from sinkdlm.reproduce.results import RunResult
from sinkdlm.reproduce.running import Bench, recipe_of, train_job
from sinkdlm.training.health import FEW, HELD, LOST, MANY, PEAK, RESTS, SETTLED, SinkHealth, peaks_of, read_lines
from studies.asking import on_bench, read_beside, run_study, say, write_beside

NAME = "steadiness"
_LOOKS = 75  # probes of attention in a run


class Form(NamedTuple):
    """A training that is made again. rate: index of the three; whole: the run of the first seed, not a trial; warmup: a factor."""

    variant: str
    rate: int
    whole: bool = False
    warmup: int = 1

    @property
    def job(self) -> Job:
        return Job(ADAPT, self.variant, FIRST_SEED) if self.whole else Job(ADAPT, self.variant, TRIAL_SEED, self.rate)


FORMS = {
    "vanilla": Form("vanilla", 2),
    "vanilla-warmer": Form("vanilla", 2, warmup=10),
    "sink-slower": Form("sink", 1),
    "sink-slower-warmer": Form("sink", 1, warmup=10),
    "sink": Form("sink", 2),
    "sink-warm": Form("sink", 2, warmup=4),  # as many steps as a whole run has
    "sink-warmer": Form("sink", 2, warmup=10),
    "sink-zero": Form("sink-zero", 2),
    "sink-end-slower": Form("sink-end", 1, whole=True),
    "sink-end": Form("sink-end", 2),
}


def measure_steadiness(bench: Bench) -> dict[str, Any]:
    """Write each form beside the results as it ends; skip those that are there with the same recipe."""
    known = (read_beside(bench.asked.folder, NAME, bench.scale.name) or {"forms": {}})["forms"]
    found: dict[str, Any] = {**bench.provenance(), "forms": {}}
    made = {name: found[name] for name in ("made", "command", "environment")}
    for name, form in FORMS.items():
        lr = bench.scale.lrs[ADAPT][form.rate]
        recipe = recipe_of(form.job, bench, lr)
        every = max(1, (recipe.train.steps or 1) // _LOOKS)
        plan = {**recipe.train.to_dict(), "warmup": min(1.0, recipe.train.warmup * form.warmup)}
        recipe = recipe.replace(train=plan, log={**recipe.log.to_dict(), "probe_every": every})
        told = recipe.to_toml()
        if known.get(name, {}).get("recipe") == told:
            found["forms"][name] = known[name]
            continue
        folder = bench.asked.out / "runs" / f"{NAME}-{name}"
        train_job(recipe, folder, bench)
        found["forms"][name] = {"label": LABELS[form.variant], "lr": lr, "recipe": told, **made, **_read(folder)}
        shutil.rmtree(folder)
        write_beside(bench.asked, NAME, {**found, "forms": {**known, **found["forms"]}})
        say(f"{len(found['forms'])} of {len(FORMS)} trainings: {name}")
    return write_beside(bench.asked, NAME, found)


def _read(folder: Path) -> dict[str, Any]:
    """Loss and gradient norm of every step; of every probe and layer, attention on the sink and its value norm / others'."""
    steps, looks = read_lines(folder, "train"), read_lines(folder, "probe")
    return {
        "loss": [short(line["loss"]) for line in steps],
        "gradient": [short(line["grad_norm"]) for line in steps],
        "looks": [line["step"] for line in looks],
        "share": [[short(layer.get("sink_share")) for layer in line["layers"]] for line in looks],
        "norm": [[short(_beside(layer)) for layer in line["layers"]] for line in looks],
    }


def _beside(layer: Mapping[str, float]) -> float | None:
    return layer["sink_value_norm"] / layer["content_value_norm"] if "sink_value_norm" in layer else None


def thirds_of(layers: list[float | None]) -> tuple[float, float] | None:
    """Means over the lowest third of layers, and over the others; None without a sink."""
    known = [value for value in layers if value is not None]
    third = max(1, len(known) // 3)
    return (fmean(known[:third]), fmean(known[third:])) if known else None


def steadiness_blocks(found: Mapping[str, Any] | None, results: Mapping[str, RunResult], picture: Sequence[str]) -> list[str]:
    """found: what `measure_steadiness` wrote. results: those with their gradient spikes counted."""
    return [*_peaked(results), *([] if found is None else [*_watched(found), *picture])]


def _peaked(results: Mapping[str, RunResult]) -> list[str]:
    kept = {name: result.facts["peaks"] for name, result in results.items() if "peaks" in result.facts}
    if not kept:
        return []
    rough = [
        f"{name}: {peaks['count']}, the largest at {peaks['largest']:.1f} times the median, at step {peaks['at']}"
        for name, peaks in kept.items()
        if peaks["count"] and "at" in peaks
    ]
    told = (
        f"A gradient spike is a norm over {PEAK:g} times the run's median, both after the first {SETTLED:.0%} of the steps. "
        f"Counted in {len(kept)} results; {len(rough)} have some{':' if rough else '.'}"
    )
    return [told, bullets(rough)] if rough else [told]


def _watched(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for form in found["forms"].values():
        peaks = peaks_of(form["gradient"])
        losses = [value for value in form["loss"] if value is not None]
        loss = fmean(losses[-max(1, len(losses) // 10) :])
        numbers = [f"{form['lr']:g}", len(form["loss"]), warmup_of(form), f"{loss:.3f}", f"{peaks.median:.2f}"]
        numbers += [f"{peaks.largest:.1f} ({peaks.at})", len(peaks.steps)]
        course = [_course(form[name], part, style) for name, style in (("share", ".0%"), ("norm", ".2f")) for part in (0, 1)]
        rows.append([form["label"], *map(str, numbers), *course, _lost(form), f"step {form['looks'][0]}"])
    told = (
        f"Trained again with about {_LOOKS} probes each. A layer has lost its sink where attention on it is below {LOST:.0%} "
        f"of its maximum, if that was {RESTS:.0%} or more. The sink is lost once more than {MANY:.0%} of the layers (and more than "
        f"{FEW}) have lost it, and attention on it over all layers is below {HELD:.0%} of its maximum:"
    )
    training = ("learning rate", "steps", "warm-up", "loss, last tenth")
    gradient = ("gradient norm, median", "largest / median (step)", "spikes")
    sink = ("attention, lowest third", "attention, others", "value norm, lowest third", "value norm, others", "lost", "first probe")
    return [told, table(["", *training, *gradient, *sink], rows)]


def warmup_of(form: Mapping[str, Any]) -> int:
    """Steps."""
    plan = tomllib.loads(form["recipe"])["train"]
    return max(round(plan["warmup"] * len(form["loss"])), plan["min_warmup"])


def _lost(form: Mapping[str, Any]) -> str:
    kept = SinkHealth()
    for step, shares in zip(form["looks"], form["share"], strict=True):
        kept.look(step, shares)
    loss = kept.loss
    return "" if loss is None else f"step {loss.step}: {loss.layers} of {loss.of} layers"


def _course(looks: list[list[float | None]], part: int, style: str) -> str:
    first, last = thirds_of(looks[0]), thirds_of(looks[-1])
    return "" if first is None or last is None else f"{first[part]:{style}} \N{RIGHTWARDS ARROW} {last[part]:{style}}"


def main(words: Sequence[str] | None = None) -> None:
    run_study(__doc__ or "", on_bench(measure_steadiness), lambda _, found: steadiness_blocks(found, {}, []), words)


if __name__ == "__main__":
    main()
