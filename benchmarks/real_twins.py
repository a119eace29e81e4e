"""Writes src/sinkdlm/demo/real_twins.json, which opens the demo's report: recorded twins of SmolLM2-135M by layer.

    python -m benchmarks.real_twins

The twins have one learning rate, the same rows and the same masks, and differ in the sink token alone. Measures nothing.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measuring import RESULTS
from benchmarks.reproduction_page import declared_results
from sinkdlm.analysis.glossary import write_number
from sinkdlm.reproduce.claims import runs_of
from sinkdlm.reproduce.figures import layer_captures
from sinkdlm.reproduce.matrix import ADAPT

FILE = Path(__file__).parents[1] / "src" / "sinkdlm" / "demo" / "real_twins.json"
TWINS = {"SmolLM2": "vanilla-sink-rate", "SmolLM2 with a sink": "sink"}


def content() -> dict[str, Any]:
    results = declared_results(RESULTS / "reproduction")
    runs = {variant: runs_of(results, ADAPT, variant) for variant in TWINS.values()}
    seeds = sorted(set.intersection(*(set(own) for own in runs.values())))
    used = {variant: [own[seed] for seed in seeds] for variant, own in runs.items()}
    (rate,), (tokens,), (device,) = (
        {fact(run) for own in used.values() for run in own}
        for fact in (lambda run: run.lr, lambda run: run.tokens, lambda run: run.facts["environment"]["device"])
    )

    def mean(variant: str, name: str, unit: str = "share") -> str:
        return write_number(fmean(run.outcomes[f"attention.{name}"].value for run in used[variant]), unit)

    without, sink = TWINS.values()
    notes = [
        f"The demo did not train these: SmolLM2-135M, adapted to diffusion for {tokens / 1e6:.1f}M tokens on {device}, with and "
        f"without a sink token. Learning rate ({rate:g}), rows and masks are the same; {len(seeds)} seeds each.",
        f"With the sink token, {mean(sink, 'sink_mass')} of attention rests on it, and {mean(sink, 'sink_heads')} of heads and "
        f"steps have a content sink; without it {mean(without, 'sink_heads')} have one. The value norm of the sink token is "
        f"{mean(sink, 'lane_norm_ratio', '')} times that of other tokens.",
        "One claim of the paper does not show in them: the few content sinks that remain move more "
        f"(turnover {mean(sink, 'turnover')}, without the sink token {mean(without, 'turnover')}).",
    ]
    caption = (
        f"SmolLM2-135M, recorded: by layer, means over {len(seeds)} seeds, with bands from the lowest to the highest. "
        f"Records: {', '.join(run.name for own in used.values() for run in own)} in benchmarks/results/reproduction."
    )
    captures = layer_captures(results, ADAPT, TWINS, seeds)
    return {"title": "Recorded: twins large enough for a sink", "notes": notes, "caption": caption, "captures": captures}


def to_text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_text(content()), encoding="utf-8")
