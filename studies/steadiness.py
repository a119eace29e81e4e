"""How a sink comes through training: gradient norms step by step, and what is left of the sink in each layer meanwhile.

An adapted sink is the parent's own resting place (inherited.py): a state that its vector and a few weights make, and on which heads
of all layers rely. Trials, and one run, are made again here, with a look at attention every few steps, to see whether a jump of
the gradient is the loss of that state. Their weights are not kept.
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
_LOOKS = 75  # at attention, in a run


class Form(NamedTuple):
    """A training that is made again. rate: which of the three; whole: not a trial but the run of the first seed; warmup: times what
    it has."""

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
    "sink-warm": Form("sink", 2, warmup=4),  # as long as that of a whole run, of which trials have a quarter
    "sink-warmer": Form("sink", 2, warmup=10),
    "sink-zero": Form("sink-zero", 2),
    "sink-end-slower": Form("sink-end", 1, whole=True),
    "sink-end": Form("sink-end", 2),
}


def measure_steadiness(bench: Bench) -> dict[str, Any]:
    """Each form is kept beside the results as it ends; those that are there, of the same recipe, are not made again."""
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
    """Loss and gradient norm of every step; of every look, by layer: attention on the sink, and its value norm, of others'."""
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
    """found: what `measure_steadiness` wrote. Of results, those that have kept their gradients' peaks."""
    blocks = [*_peaked(results), *([] if found is None else [*_watched(found), *picture])]
    return ["### Examined: runs whose gradients jump", *blocks] if blocks else []


def _peaked(results: Mapping[str, RunResult]) -> list[str]:
    kept = {name: result.facts["peaks"] for name, result in results.items() if "peaks" in result.facts}
    if not kept:
        return []
    rough = [
        f"{name}: {peaks['count']}, the largest {peaks['largest']:.1f} times the median, at step {peaks['at']}"
        for name, peaks in kept.items()
        if peaks["count"] and "at" in peaks
    ]
    told = (
        f"A peak is a gradient norm of more than {PEAK:g} times the run's median, both after the first {SETTLED:.0%} of the steps. "
        f"{len(kept)} results of the matrix have them counted (the first ones have not); "
    )
    return [told + "with peaks:", bullets(rough)] if rough else [told + "none has any."]


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
        f"Trials, and one whole run, made again with about {_LOOKS} looks at attention each. Trials see the same rows in the "
        "same order, so that their training losses can be compared; one run each, and a repeat on a GPU is not the same to the "
        "bit. Of the sink, at the first look and at the last, on held-out rows: attention on it, and its value norm over that "
        "of other tokens, in the lowest third of the layers and in the others. A layer counts as having lost its sink where "
        f"less than {LOST:.0%} is left of the most it had there, if that was {RESTS:.0%} of its attention at least; the sink "
        f"counts as lost from the look on at which more than {MANY:.0%} of the layers, and more than {FEW}, have lost it, and "
        f"all layers together have less than {HELD:.0%} of the most they had:"
    )
    training = ("learning rate", "steps", "to warm up", "loss, last tenth", "gradient norm, median")
    sink = ("attention, lowest layers", "others", "value norm, lowest layers", "others", "lost", "first look")
    return [told, table(["", *training, "the largest, in medians (step)", "peaks", *sink], rows)]


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
