"""The paper's claims as comparisons, declared before any run, and the rule that turns differences into a verdict. Data and judging.

A claim compares two variants of a group on the primary outcomes, or one quantity of one variant with a number.
Verdicts: holds, does not hold, cannot be told; or too few seeds.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from sinkdlm.reproduce.matrix import DECLARED, LABELS, difference
from sinkdlm.reproduce.results import RUN, RunResult
from sinkdlm.reproduce.statistics import ALPHA, Paired, Spread, over_seeds, pair_items

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
FEW = "too few seeds"
MARGIN = 0.01  # nats per token: a smaller difference does not matter
NELBO, LAMBADA, CHOICES, ANSWERS = "nelbo", "lambada_openai.nll", "choices.nll", "gsm8k.nll"
HEADS = "attention.sink_heads"
PRIMARY = (NELBO, LAMBADA, CHOICES)
OUTCOMES: Mapping[str, str] = DECLARED["outcomes"]
LOWER, SAME, BELOW, ABOVE = "lower", "same", "below", "above"


class Claim(NamedTuple):
    """LOWER: `variant` has lower values than `against`; SAME: within MARGIN of it; BELOW, ABOVE: a quantity against `bound`."""

    name: str
    target: str
    text: str
    kind: str
    group: str
    variant: str
    against: str
    bound: float
    outcomes: tuple[str, ...]  # hashable: claims are keys
    late: bool

    @classmethod
    def of(cls, target: str, line: str) -> "Claim":
        name, test, said = line.split(": ", 2)
        group, variant, sign, other, *outcomes = test.split()
        chosen, text = tuple(outcomes) or PRIMARY, said.removesuffix(_LATE)
        if other in LABELS:
            kind = SAME if sign == "=" else LOWER
            return cls(name, target, text, kind, group, variant, other, 0.0, chosen, text != said)
        return cls(name, target, text, BELOW if sign == "<" else ABOVE, group, variant, "", float(other), chosen, text != said)


_LATE = " (late)"
CLAIMS = tuple(Claim.of(target, line) for target, lines in DECLARED["claims"].items() for line in lines)


def outcome_name(outcome: str) -> str:
    """Without its unit."""
    return OUTCOMES.get(outcome, outcome.removeprefix("attention.").replace("_", " ")).split(", nats")[0]


class Difference(NamedTuple):
    """Two variants on one outcome: each seed, the interval over seeds, and the interval of the two one-sided tests."""

    seeds: dict[int, Paired]
    spread: Spread
    one_sided: Spread


def runs_of(results: Mapping[str, RunResult], group: str, variant: str) -> dict[int, RunResult]:
    """By seed."""
    found = [one for one in results.values() if (one.kind, one.group, one.variant) == (RUN, group, variant)]
    return {one.seed: one for one in sorted(found, key=lambda one: one.seed)}


def _parts(run: RunResult, outcome: str) -> list[str]:
    """Outcomes that it is the mean of: for CHOICES the NLL of each task that has options, else itself."""
    if outcome != CHOICES:
        return [outcome] if outcome in run.outcomes else []
    tasks = (name.removesuffix(".acc") for name in run.outcomes if name.endswith(".acc"))
    return sorted(f"{task}.nll" for task in tasks if f"{task}.nll" in run.outcomes)


def pair(one: RunResult, other: RunResult, outcome: str) -> Paired | None:
    """other - one; None where either has no such outcome."""
    found = []
    for name in _parts(one, outcome):
        if name in other.outcomes:
            ours, theirs = one.outcomes[name], other.outcomes[name]
            if ours.items is None or theirs.items is None:
                found.append(Paired(theirs.value - ours.value, math.nan, 1))
            elif ours.units != theirs.units or len(ours.items) != len(theirs.items):
                raise ValueError(f"{one.name} and {other.name}: {name}: scored on other items")
            else:
                found.append(pair_items(ours.values, theirs.values, ours.units))
    if not found:
        return None
    differences, errors, counts = zip(*found, strict=True)
    return Paired(fmean(differences), math.hypot(*errors) / len(found), sum(counts))


def compare(results: Mapping[str, RunResult], group: str, variant: str, against: str, outcome: str) -> Difference:
    """variant - against, of the seeds that both have."""
    ours, theirs = runs_of(results, group, variant), runs_of(results, group, against)
    known = {seed: one for seed in ours if seed in theirs and (one := pair(theirs[seed], ours[seed], outcome)) is not None}
    values = [one.difference for one in known.values()]
    return Difference(known, over_seeds(values), over_seeds(values, 1 - 2 * ALPHA))


def measured(results: Mapping[str, RunResult], group: str, variant: str, outcome: str) -> list[float]:
    """A value for each seed."""
    runs = runs_of(results, group, variant).values()
    return [fmean(run.outcomes[name].value for name in parts) for run in runs if (parts := _parts(run, outcome))]


class Judged(NamedTuple):
    """One outcome of a claim. spread: of the difference, or of quantity - bound. figures: what was measured, for a table's cell."""

    outcome: str
    verdict: str
    spread: Spread
    sentence: str
    figures: str = ""
    within: Mapping[int, Paired] = {}


def verdict_of(kind: str, spread: Spread, one_sided: Spread | None = None) -> str:
    """one_sided: of the same values, for SAME. LOWER also fails where the whole interval lies within MARGIN of 0."""
    if not spread.known:
        return FEW
    low, high = spread.low, spread.high
    holds, fails = {
        LOWER: (high < 0, low > 0 or max(-low, high) < MARGIN),
        SAME: (one_sided is not None and one_sided.within(MARGIN), low > MARGIN or high < -MARGIN),
        BELOW: (high < 0, low >= 0),
        ABOVE: (low > 0, high <= 0),
    }[kind]
    return HOLDS if holds else FAILS if fails else OPEN


def judge(claim: Claim, results: Mapping[str, RunResult]) -> list[Judged]:
    """Judge each outcome, also those that no run has yet. Where nothing was measured, return the first alone."""
    found = [_judge(claim, results, outcome) for outcome in claim.outcomes]
    return found if any(one.spread.n for one in found) else found[:1]


def overall(judged: Sequence[Judged]) -> str:
    """Combine the outcomes: HOLDS only if all hold, FAILS if any fails."""
    verdicts = {one.verdict for one in judged}
    return next(one for one in (FAILS, FEW, OPEN, HOLDS) if one in verdicts)


def _judge(claim: Claim, results: Mapping[str, RunResult], outcome: str) -> Judged:
    label, seeds, one_sided, bound, more = LABELS[claim.variant], dict[int, Paired](), None, "", ""
    if claim.against:
        seeds, spread, one_sided = compare(results, claim.group, claim.variant, claim.against, outcome)
        figures = write_interval(spread)
        subject = f"{difference(claim.variant, claim.against)}, {outcome_name(outcome)}"
    else:
        values = measured(results, claim.group, claim.variant, outcome)
        spread = over_seeds([value - claim.bound for value in values])
        figures, subject = write_interval(over_seeds(values), ""), f"{label}, {outcome_name(outcome)}"
        bound = f" against {claim.bound:g}"
    verdict = verdict_of(claim.kind, spread, one_sided)
    if not spread.n:
        return Judged(outcome, verdict, spread, f"{subject}: not measured yet.")
    if claim.kind == SAME and one_sided is not None and spread.n > 1:
        inside = "inside" if one_sided.within(MARGIN) else "not inside"
        more = f"; 90% interval [{one_sided.low:+.4f}, {one_sided.high:+.4f}] {inside} \N{PLUS-MINUS SIGN}{MARGIN}"
    if errors := [one.stderr for one in seeds.values() if not math.isnan(one.stderr)]:
        more += f"; standard error over a seed's items {fmean(errors):.4f}"
    text = f"{subject}: {figures} ({spread.n} seed{'s' if spread.n > 1 else ''}){bound}{more}. {verdict.capitalize()}."
    return Judged(outcome, verdict, spread, text, figures + bound, seeds)


def write_interval(spread: Spread, sign: str = "+") -> str:
    mean = f"{spread.mean:{sign}.4f}"
    return mean if math.isnan(spread.low) else f"{mean} [{spread.low:{sign}.4f}, {spread.high:{sign}.4f}]"


def as_json(found: Spread | Paired) -> dict[str, Any]:
    return {name: None if math.isnan(value) else value for name, value in found._asdict().items()}
