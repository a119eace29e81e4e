"""Writes docs/reproduction.md and its pictures from the records of reproduction runs.

    python -m benchmarks.reproduction [--records DIR] [--docs DIR]

Pictures are drawn where there are records for them; the page holds tables of every number in them.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import RESULTS
from sinkdlm.reproduce.claims import CLAIMS, MARGIN, SAME, judge, runs_of
from sinkdlm.reproduce.matrix import ADAPT, SFT
from sinkdlm.reproduce.page import PICTURES, declared_records, write_page
from sinkdlm.reproduce.records import Record

RECORDS = RESULTS / "reproduction"
DOCS = Path(__file__).parents[1] / "docs"
_STYLE: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "sinkdlm", "font.size": 8.0, "axes.spines.top": False}
_ONE, _TWO = "#0072B2", "#D55E00"  # Okabe and Ito


def draw_differences(records: Mapping[str, Record], figure: Any) -> bool:
    """A forest of all comparisons that have an interval."""
    rows = []
    for claim in CLAIMS:
        if claim.against:
            rows += [(claim, one) for one in judge(claim, records) if one.spread.n > 1]
    if not rows:
        return False
    figure.set_size_inches(7.2, 0.6 + 0.22 * len(rows))
    axes = figure.subplots()
    axes.axvline(0, color="#8a8a8a", lw=0.8)
    axes.axvspan(-MARGIN, MARGIN, color="#8a8a8a", alpha=0.15, lw=0)
    for place, (claim, one) in enumerate(rows):
        colour = _TWO if claim.kind == SAME else _ONE
        axes.plot([one.spread.low, one.spread.high], [-place, -place], color=colour, lw=1.2)
        axes.plot(one.spread.mean, -place, "o", color=colour, ms=3)
    names = [f"{claim.group}: {claim.variant} \N{MINUS SIGN} {claim.against}, {one.outcome}" for claim, one in rows]
    axes.set_yticks([-place for place in range(len(rows))], names)
    axes.set_xlabel("difference, nats a token (shaded: the margin)")
    axes.locator_params(axis="x", nbins=6)
    return True


def draw_layers(records: Mapping[str, Record], figure: Any) -> bool:
    """Figure 3: mean over seeds, before and after fine-tuning."""
    groups = {"adapted": runs_of(records, ADAPT, "sink"), "fine-tuned": runs_of(records, SFT, "sink")}
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


def draw_sinks(records: Mapping[str, Record], figure: Any) -> bool:
    """Figure 1, of the first seed that there is: norms of content sinks against others, and the top content sink step by step."""
    runs = runs_of(records, ADAPT, "vanilla")
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


_DRAWN = dict(zip(PICTURES, (draw_differences, draw_layers, draw_sinks), strict=True))


def draw(records: Mapping[str, Record], assets: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    for name, make in _DRAWN.items():
        with mpl.rc_context(_STYLE):
            figure = Figure(layout="constrained")
            if make(records, figure):
                figure.savefig(assets / name, metadata={"Date": None})
            else:
                (assets / name).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    assets = asked.docs / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    draw(declared_records(asked.records), assets)
    (asked.docs / "reproduction.md").write_text(write_page(asked.records, assets), encoding="utf-8")


if __name__ == "__main__":
    main()
