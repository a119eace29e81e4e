"""Figures of a reproduction: differences with their intervals, and attention and value norms by layer. Reads results alone."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from sinkdlm.analysis.capture import RULES
from sinkdlm.analysis.figures import FAINT, NORMAL, SINK, Plate, add_legend, drawn, figure3
from sinkdlm.analysis.findings import OF_SINKS
from sinkdlm.analysis.glossary import write_count
from sinkdlm.reproduce.claims import ANSWERS, CLAIMS, MARGIN, NELBO, PRIMARY, SAME, judge, outcome_name, runs_of
from sinkdlm.reproduce.matrix import ADAPT, LABELS, SCRATCH, SFT, TARGETS
from sinkdlm.reproduce.results import RunResult
from sinkdlm.reproduce.statistics import LEVEL, MIN_SEEDS

Results = Mapping[str, RunResult]
TWINS = {LABELS[variant]: variant for variant in ("vanilla", "sink")}
_BY_LAYER = ("sink_mass", "sink_heads", "sink_value_norm", "normal_norm")
_PANELS = {**{name: name for name in PRIMARY}, ANSWERS: NELBO}  # outcome -> where it is drawn
_ALSO = {NELBO: "\nsft: of held-out answers"}


@drawn
def differences(results: Results, targets: Sequence[str] = tuple(TARGETS)) -> Plate:
    """Forest plot of the targets' comparisons with a verdict, one panel per outcome."""
    from matplotlib.figure import Figure

    rows = {
        claim: {one.outcome: one for one in judge(claim, results) if one.spread.known and one.outcome in _PANELS}
        for claim in CLAIMS
        if claim.against and claim.target in targets
    }
    rows = {claim: found for claim, found in rows.items() if found}
    if not rows:
        return Plate(None, f"Differences: no comparison has {MIN_SEEDS} seeds, which an interval takes.")
    figure = Figure(figsize=(7.2, 1.1 + 0.2 * len(rows)), layout="constrained")
    panels = dict(zip(PRIMARY, figure.subplots(1, len(PRIMARY), sharey=True), strict=True))
    for outcome, axes in panels.items():
        axes.axvline(0, color=FAINT, lw=0.8)
        axes.axvspan(-MARGIN, MARGIN, color=FAINT, alpha=0.2, lw=0)
        axes.set_xlabel(outcome_name(outcome) + _ALSO.get(outcome, ""))
        axes.locator_params(axis="x", nbins=4)
    for place, (claim, found) in enumerate(rows.items()):
        colour = SINK if claim.kind == SAME else NORMAL
        for outcome, one in found.items():
            axes = panels[_PANELS[outcome]]
            axes.plot([one.spread.low, one.spread.high], [-place, -place], color=colour, lw=1.2)
            axes.plot(one.spread.mean, -place, "o", color=colour, ms=3)
    names = [f"{claim.group}: {claim.variant} \N{MINUS SIGN} {claim.against}" for claim in rows]
    panels[NELBO].set_yticks([-place for place in range(len(rows))], names)
    look: dict[str, Any] = {"marker": "o", "ms": 3, "lw": 1.2}
    add_legend(figure, [("claimed to be lower", {"color": NORMAL, **look}), ("claimed to be the same", {"color": SINK, **look})])
    caption = f"Differences in nats/token, with {LEVEL:.0%} intervals over seeds. Shaded: the margin, {MARGIN:g}."
    return Plate(figure, caption)


def layers(results: Results) -> Plate:
    """Draw figure 3 of the analysis: the twins of the first group that has any, and the fine-tuned model with a sink."""
    captures: list[dict[str, Any]] = []
    for group in (ADAPT, SCRATCH):
        captures = captures or layer_captures(results, group, TWINS)
    captures += layer_captures(results, SFT, {f"{LABELS['sink']}, fine-tuned": "sink"})
    plate = figure3(captures)
    seeds = ", ".join(f"{write_count(one['n']['trajectories'], 'seed')} ({one['name']})" for one in captures)
    about = f"By layer: mean over {seeds}, with bands from the lowest to the highest. Value norms are those of eq. 16."
    return plate._replace(caption=about) if plate.figure else plate


def layer_captures(results: Results, group: str, variants: Mapping[str, str], seeds: Sequence[int] = ()) -> list[dict[str, Any]]:
    """What figure 3 of the analysis draws: means over seeds with the lowest and highest, by layer. variants: name -> variant;
    seeds: () for all."""
    found = []
    for name, variant in variants.items():
        runs = [run for seed, run in runs_of(results, group, variant).items() if (not seeds or seed in seeds) and run.layers]
        if runs:
            n_sinks = int(any(runs[0].layers["sink_mass"]))
            about = {"name": name, "model": {"n_sinks": n_sinks}, "settings": {"threshold": RULES.threshold}}
            shown = [one for one in _BY_LAYER if n_sinks or one not in OF_SINKS]
            rows = {one: zip(*(run.layers[one] for run in runs), strict=True) for one in shown if one in runs[0].layers}
            quantities = {one: {"layers": [_ends(values) for values in own]} for one, own in rows.items()}
            found.append({**about, "n": {"trajectories": len(runs)}, "quantities": quantities})
    return found


def _ends(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return dict.fromkeys(("mean", "low", "high"))
    return {"mean": round(fmean(known), 5), "low": min(known), "high": max(known)}
