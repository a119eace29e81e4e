"""Write the tables of docs/reproduction.md and docs/reproduction-method.md, and draw their pictures.

    python -m benchmarks.reproduction [--records DIR] [--docs DIR]

The prose of the pages stays as it is. Pictures are drawn where there are results for them.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from studies.asking import read_beside
from studies.lengths import MIXED, PLAIN
from studies.steadiness import NAME as STEADINESS
from studies.steadiness import warmup_of

from benchmarks.measuring import RESULTS
from benchmarks.reproduction_page import (
    DOCS,
    METHOD,
    PAGE,
    PICTURES,
    SCALE,
    VERDICTS,
    declared_results,
    write_method,
    write_page,
)
from sinkdlm.reproduce.claims import runs_of
from sinkdlm.reproduce.figures import differences
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, SCALES, SFT
from sinkdlm.reproduce.measuring import ROWS, WRITES
from sinkdlm.reproduce.results import RunResult

RECORDS = RESULTS / "reproduction"
_STYLE: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "sinkdlm", "font.size": 8.0, "axes.spines.top": False}
_ONE, _TWO = "#0072B2", "#D55E00"  # Okabe and Ito


def draw_layers(results: Mapping[str, RunResult], figure: Any) -> bool:
    """Figure 3: mean over seeds, before and after fine-tuning."""
    groups = {"adapted": runs_of(results, ADAPT, "sink"), "fine-tuned": runs_of(results, SFT, "sink")}
    if not groups["adapted"]:
        return False
    figure.set_size_inches(7.2, 2.6)
    left, right = figure.subplots(1, 2)
    for (name, runs), style in zip(groups.items(), ("-", "--"), strict=True):
        if not runs:
            continue
        mean = {
            quantity: np.array([run.layers[quantity] for run in runs.values()], dtype=np.float64).mean(0) for quantity in _SHOWN
        }
        left.plot(mean["sink_value_norm"], style, color=_TWO, label=f"sink, {name}")
        left.plot(mean["normal_norm"], style, color=_ONE, label=f"other tokens, {name}")
        right.plot(100 * mean["sink_mass"], style, color=_TWO, label=name)
    for axes, label in ((left, "value norm"), (right, "attention on the sink, %")):
        axes.set(xlabel="layer", ylabel=label)
        axes.legend(frameon=False, fontsize=7)
    return True


_SHOWN = ("sink_value_norm", "normal_norm", "sink_mass")


def draw_sinks(results: Mapping[str, RunResult], figure: Any) -> bool:
    """Figure 1, first seed: value norms of content sinks and other tokens, and the top content sink step by step."""
    runs = runs_of(results, ADAPT, "vanilla")
    if not runs:
        return False
    seed, first = next(iter(runs.items()))
    norms, path = first.facts["norms"], first.facts["path"]
    figure.set_size_inches(7.2, 2.6)
    left, right = figure.subplots(1, 2)
    for name, label, colour in (("normal", "other tokens", _ONE), ("sink", "content sinks", _TWO)):
        if name in norms:
            counts = np.array(norms[name]["counts"], dtype=float)
            edges = np.linspace(0, norms["top"], len(counts) + 1)
            left.stairs(counts / counts.sum(), edges, color=colour, label=f"{label}, mean {norms[name]['mean']:g}")
    left.set(xlabel=f"value norm, seed {seed}", ylabel="share of tokens")
    left.legend(frameon=False, fontsize=7)
    right.plot(path["top"], ".", color=_TWO)
    right.set(xlabel=f"denoising step of one answer, seed {seed}", ylabel=f"most attended token, layer {path['layer']}")
    return True


def draw_lengths(results: Mapping[str, RunResult], figure: Any) -> bool:
    """Documents cut to several lengths: NELBO, and attention output norm."""
    cuts = SCALES[SCALE].cuts
    runs = {variant: runs_of(results, ADAPT, variant).get(FIRST_SEED) for variant in (*PLAIN, *MIXED)}
    made = {variant: run for variant, run in runs.items() if run is not None and f"{ROWS}.{cuts[0]}" in run.outcomes}
    if not set(PLAIN) <= set(made):
        return False
    figure.set_size_inches(7.2, 3.3)
    left, right = figure.subplots(1, 2)
    for variant, run in made.items():
        colour, style = (_TWO if variant in (PLAIN[1], MIXED[1]) else _ONE), ("-" if variant in PLAIN else "--")
        for axes, name in ((left, ROWS), (right, f"attention.{WRITES}")):
            axes.plot(cuts, [run.outcomes[f"{name}.{length}"].value for length in cuts], style, color=colour, marker=".")
        left.plot([], [], style, color=colour, marker=".", label=LABELS[variant])
    for axes, label in ((left, "NELBO of whole rows, nats/token"), (right, "attention output norm /\nmean value norm")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(cuts, map(str, cuts))
        axes.set(xlabel=f"tokens of a row, seed {FIRST_SEED}", ylabel=label)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=7)
    return True


def draw_steadiness(found: Mapping[str, Any] | None, figure: Any) -> bool:
    """Gradient norm and attention on the sink, of trainings with probes."""
    if found is None:
        return False
    figure.set_size_inches(7.2, 3.2)
    left, right = figure.subplots(1, 2)
    for number, form in enumerate(found["forms"].values()):
        colour, label = f"C{number}", f"{form['label']}, {form['lr']:g}, {warmup_of(form)} warm-up steps"
        norms = [np.nan if norm is None else norm for norm in form["gradient"]]
        left.plot(np.arange(1, len(norms) + 1), norms, color=colour, lw=0.7, label=label)
        shares = np.array(form["share"], dtype=float)  # looks x layers, nan without a sink
        right.plot(form["looks"], 100 * shares.mean(1), color=colour, marker=".", ms=2, lw=0.7)
    left.set(xlabel="step", ylabel="gradient norm", yscale="log")
    right.set(xlabel="step", ylabel="attention on the sink, %,\nmean over layers")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return True


_DRAWN = {"short": draw_lengths, "figure1": draw_sinks, "figure3": draw_layers}


def draw(results: Mapping[str, RunResult], watched: Mapping[str, Any] | None, assets: Path) -> None:
    for place, (name, _) in PICTURES.items():
        (assets / name).unlink(missing_ok=True)  # what has no results any more goes
        if place == VERDICTS:
            plate = differences(results)
            if plate.figure is not None:
                (assets / name).write_text(plate.svg, encoding="utf-8")
            continue
        with mpl.rc_context(_STYLE):
            figure = Figure(layout="constrained")
            if draw_steadiness(watched, figure) if place == STEADINESS else _DRAWN[place](results, figure):
                figure.savefig(assets / name, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    assets = asked.docs / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    draw(declared_results(asked.records), read_beside(asked.records, STEADINESS, SCALE), assets)
    (asked.docs / PAGE).write_text(write_page(asked.records, assets), encoding="utf-8")
    (asked.docs / METHOD).write_text(write_method(), encoding="utf-8")


if __name__ == "__main__":
    main()
