"""The paper's claims as comparisons, declared before any run, and the rule that turns differences into a verdict. Data and judging.

A claim compares two variants of a group on the primary outcomes, or holds one quantity of one variant against a number. Verdicts:
holds, does not hold, cannot be told at this scale; or there are too few seeds to say.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from sinkdlm.reproduce.matrix import LABELS
from sinkdlm.reproduce.results import RUN, RunResult
from sinkdlm.reproduce.statistics import ALPHA, Paired, Spread, over_seeds, pair_items

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told at this scale"
FEW = "too few seeds so far"
MARGIN = 0.01  # nats a token: variants closer than this are the same
NELBO, LAMBADA, CHOICES, ANSWERS = "nelbo", "lambada_openai.nll", "choices.nll", "gsm8k.nll"
HEADS = "attention.sink_heads"
PRIMARY = (NELBO, LAMBADA, CHOICES)
OUTCOMES = {
    NELBO: "validation NELBO, nats a token",
    LAMBADA: "LAMBADA NLL, nats a token",
    CHOICES: "NLL of the right option, nats a token, mean over choice tasks",
    ANSWERS: "NELBO of held-out answers, nats a token",
    HEADS: "share of heads that rest on a token of the text",
}
LOWER, SAME, BELOW, ABOVE = "lower", "same", "below", "above"

# Target and name: group, what must be true of its variants, and on which outcome, by default the primary ones: the claim in words.
# (late): added after runs had been seen.
_DECLARED = f"""
table1 sink-helps: adapt sink < vanilla: A sink improves an adapted DLM
table1 gate-helps: adapt gate < vanilla: Gated attention improves an adapted DLM (0.5B in the paper)
table1 sink-beats-gate: adapt sink < gate: The sink improves it more than gated attention
table1 sink-beats-kept-gate: adapt sink < gate-keep: \
The sink improves it more than a gate that starts open and keeps the parent's function
table2 scratch-sink-helps: scratch sink < vanilla: A sink improves a DLM trained from scratch
table2 scratch-gate-helps: scratch gate < vanilla: Gated attention improves a DLM from scratch
table2 scratch-sink-beats-gate: scratch sink < gate: The sink improves it more than gated attention
table3 end-helps: adapt sink-end < vanilla: A sink at the end improves the DLM too
table3 position: adapt sink-end = sink: Front or end makes no difference
table4 one-enough-2: adapt sinks-2 = sink: One sink is enough: two are no different
table4 one-enough-4: adapt sinks-4 = sink: One sink is enough: four are no different
table5 zero-helps: adapt sink-zero < vanilla: A sink whose value is zero improves the DLM too
table5 value: adapt sink-zero = sink: A zero value is no different from a learned one
controls beats-register: adapt sink < register: The isolated sink is better than a register token
controls beats-logit: adapt sink < logit: The isolated sink is better than a sink logit, which has no value
controls beats-first: adapt sink < first: The isolated sink is better than an always visible first token
controls beats-at-its-rate: adapt sink < vanilla-sink-rate: A sink is better than none at the sink's own learning rate (late)
controls beats-at-their-rate: adapt sink-dlm-rate < vanilla: A sink is better than none at the DLM's own learning rate (late)
figure1 moving: adapt vanilla > 0.1 attention.turnover: \
Sinks of a DLM move: more than a tenth of them change from one step to the next
figure1 low-norm: adapt vanilla < 1 attention.norm_ratio: Its sink tokens have lower value norms than other tokens
figure1 tamed: adapt sink < vanilla {HEADS}: With a sink fewer heads rest on tokens of the text (late)
figure3 share: adapt sink > 10 attention.middle_sink_times: \
In the middle layers the sink receives more than an even share of attention, ten times and more
figure3 norm: adapt sink < 1 attention.middle_norm_ratio: In the middle layers the sink's value norm is below that of other tokens
figure3 norm-after: sft sink < 1 attention.middle_norm_ratio: \
After fine-tuning, too, its value norm there is below that of other tokens
figure3 share-after: sft sink > 10 attention.middle_sink_times: \
After fine-tuning, too, it receives ten times an even share of attention there and more (late)
gsm8k gsm8k-sink-helps: sft sink < vanilla {ANSWERS}: A sink improves the fine-tuned DLM
gsm8k gsm8k-gate-helps: sft gate < vanilla {ANSWERS}: Gated attention improves it
gsm8k gsm8k-sink-beats-gate: sft sink < gate {ANSWERS}: The sink improves it more than gated attention (late)
"""


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
    def of(cls, line: str) -> "Claim":
        place, test, said = line.split(": ", 2)
        (target, name), (group, variant, sign, other, *outcomes) = place.split(), test.split()
        chosen, text = tuple(outcomes) or PRIMARY, said.removesuffix(_LATE)
        if other in LABELS:
            kind = SAME if sign == "=" else LOWER
            return cls(name, target, text, kind, group, variant, other, 0.0, chosen, text != said)
        return cls(name, target, text, BELOW if sign == "<" else ABOVE, group, variant, "", float(other), chosen, text != said)


_LATE = " (late)"
CLAIMS = tuple(map(Claim.of, _DECLARED.strip().splitlines()))


def outcome_name(outcome: str) -> str:
    """Without its unit."""
    return OUTCOMES.get(outcome, outcome.removeprefix("attention.").replace("_", " ")).split(", nats")[0]


# -- differences ------------------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Two variants on one outcome: within each seed, over seeds, and over seeds at the level of two one-sided tests."""

    seeds: dict[int, Paired]
    spread: Spread
    one_sided: Spread


def runs_of(results: Mapping[str, RunResult], group: str, variant: str) -> dict[int, RunResult]:
    """By seed."""
    found = [one for one in results.values() if (one.kind, one.group, one.variant) == (RUN, group, variant)]
    return {one.seed: one for one in sorted(found, key=lambda one: one.seed)}


def _parts(run: RunResult, outcome: str) -> list[str]:
    """What it is the mean of; the mean over choice tasks is over tasks with options, whose right option's NLL is kept."""
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


# -- verdicts ---------------------------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """One outcome of a claim. spread: of the difference, or of the quantity less its bound; figures: what was measured, for a cell
    of a table."""

    outcome: str
    verdict: str
    spread: Spread
    sentence: str
    figures: str = ""
    within: Mapping[int, Paired] = {}


def verdict_of(kind: str, spread: Spread, one_sided: Spread | None = None) -> str:
    """one_sided: of the same values, for SAME. LOWER fails, too, where the whole interval is too close to none to matter."""
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
    """A verdict on each of its outcomes, also on those that no run has yet: a part of them cannot speak for all. Where nothing was
    measured, the first one says so."""
    found = [_judge(claim, results, outcome) for outcome in claim.outcomes]
    return found if any(one.spread.n for one in found) else found[:1]


def overall(judged: Sequence[Judged]) -> str:
    """Holds where every outcome says so, does not where any says that."""
    verdicts = {one.verdict for one in judged}
    return next(one for one in (FAILS, FEW, OPEN, HOLDS) if one in verdicts)


def _judge(claim: Claim, results: Mapping[str, RunResult], outcome: str) -> Judged:
    label, seeds, one_sided, bound, more = LABELS[claim.variant], dict[int, Paired](), None, "", ""
    if claim.against:
        seeds, spread, one_sided = compare(results, claim.group, claim.variant, claim.against, outcome)
        figures = write_interval(spread)
        subject = f"{label} \N{MINUS SIGN} {LABELS[claim.against]}, {OUTCOMES.get(outcome, outcome)}"
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
        more = f"; 90 % interval [{one_sided.low:+.4f}, {one_sided.high:+.4f}] {inside} \N{PLUS-MINUS SIGN}{MARGIN}"
    if errors := [one.stderr for one in seeds.values() if not math.isnan(one.stderr)]:
        more += f"; standard error over a seed's items {fmean(errors):.4f}"
    text = f"{subject}: {figures} ({spread.n} seed{'s' if spread.n > 1 else ''}){bound}{more}. {verdict.capitalize()}."
    return Judged(outcome, verdict, spread, text, figures + bound, seeds)


def write_interval(spread: Spread, sign: str = "+") -> str:
    mean = f"{spread.mean:{sign}.4f}"
    return mean if math.isnan(spread.low) else f"{mean} [{spread.low:{sign}.4f}, {spread.high:{sign}.4f}]"


def as_json(found: Spread | Paired) -> dict[str, Any]:
    return {name: None if math.isnan(value) else value for name, value in found._asdict().items()}
