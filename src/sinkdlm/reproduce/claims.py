"""The paper's claims as comparisons, declared before any run, and the rule that turns differences into a verdict. Data and judging.

A claim compares two variants of a group on the primary outcomes, or holds one quantity of one variant against a number. Verdicts:
holds, does not hold, cannot be told at this scale; or there are too few seeds to say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.reproduce.matrix import ADAPT, LABELS, SCRATCH, SFT
from sinkdlm.reproduce.results import RUN, Outcome, Record
from sinkdlm.reproduce.statistics import Equivalence, Paired, Spread, equivalence, over_seeds, pair_items

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


class Claim(NamedTuple):
    """LOWER: `variant` has lower values than `against`; SAME: within MARGIN of it; BELOW, ABOVE: a quantity against `bound`.

    late: added after runs had been seen.
    """

    name: str
    target: str
    text: str
    kind: str
    group: str
    variant: str
    against: str = ""
    outcomes: Sequence[str] = PRIMARY
    bound: float = 0.0
    late: bool = False


CLAIMS = (
    Claim("sink-helps", "table1", "A sink improves an adapted DLM", LOWER, ADAPT, "sink", "vanilla"),
    Claim("gate-helps", "table1", "Gated attention improves an adapted DLM (0.5B in the paper)", LOWER, ADAPT, "gate", "vanilla"),
    Claim("sink-beats-gate", "table1", "The sink improves it more than gated attention", LOWER, ADAPT, "sink", "gate"),
    Claim(
        "sink-beats-kept-gate",
        "table1",
        "The sink improves it more than a gate that starts open and keeps the parent's function",
        LOWER,
        ADAPT,
        "sink",
        "gate-keep",
    ),
    Claim("scratch-sink-helps", "table2", "A sink improves a DLM trained from scratch", LOWER, SCRATCH, "sink", "vanilla"),
    Claim("scratch-gate-helps", "table2", "Gated attention improves a DLM from scratch", LOWER, SCRATCH, "gate", "vanilla"),
    Claim("scratch-sink-beats-gate", "table2", "The sink improves it more than gated attention", LOWER, SCRATCH, "sink", "gate"),
    Claim("end-helps", "table3", "A sink at the end improves the DLM too", LOWER, ADAPT, "sink-end", "vanilla"),
    Claim("position", "table3", "Front or end makes no difference", SAME, ADAPT, "sink-end", "sink"),
    Claim("one-enough-2", "table4", "One sink is enough: two are no different", SAME, ADAPT, "sinks-2", "sink"),
    Claim("one-enough-4", "table4", "One sink is enough: four are no different", SAME, ADAPT, "sinks-4", "sink"),
    Claim("zero-helps", "table5", "A sink whose value is zero improves the DLM too", LOWER, ADAPT, "sink-zero", "vanilla"),
    Claim("value", "table5", "A zero value is no different from a learned one", SAME, ADAPT, "sink-zero", "sink"),
    Claim("beats-register", "controls", "The isolated sink is better than a register token", LOWER, ADAPT, "sink", "register"),
    Claim(
        "beats-logit",
        "controls",
        "The isolated sink is better than a sink logit, which has no value",
        LOWER,
        ADAPT,
        "sink",
        "logit",
    ),
    Claim(
        "beats-first", "controls", "The isolated sink is better than an always visible first token", LOWER, ADAPT, "sink", "first"
    ),
    Claim(
        "beats-at-its-rate",
        "controls",
        "A sink is better than none at the sink's own learning rate",
        LOWER,
        ADAPT,
        "sink",
        "vanilla-sink-rate",
        late=True,
    ),
    Claim(
        "beats-at-their-rate",
        "controls",
        "A sink is better than none at the DLM's own learning rate",
        LOWER,
        ADAPT,
        "sink-dlm-rate",
        "vanilla",
        late=True,
    ),
    Claim(
        "moving",
        "figure1",
        "Sinks of a DLM move: more than a tenth of them change from one step to the next",
        ABOVE,
        ADAPT,
        "vanilla",
        outcomes=("attention.turnover",),
        bound=0.1,
    ),
    Claim(
        "low-norm",
        "figure1",
        "Its sink tokens have lower value norms than other tokens",
        BELOW,
        ADAPT,
        "vanilla",
        outcomes=("attention.norm_ratio",),
        bound=1.0,
    ),
    Claim(
        "tamed",
        "figure1",
        "With a sink fewer heads rest on tokens of the text",
        LOWER,
        ADAPT,
        "sink",
        "vanilla",
        (HEADS,),
        late=True,
    ),
    Claim(
        "share",
        "figure3",
        "In the middle layers the sink receives more than an even share of attention, ten times and more",
        ABOVE,
        ADAPT,
        "sink",
        outcomes=("attention.middle_sink_times",),
        bound=10.0,
    ),
    Claim(
        "norm",
        "figure3",
        "In the middle layers the sink's value norm is below that of other tokens",
        BELOW,
        ADAPT,
        "sink",
        outcomes=("attention.middle_norm_ratio",),
        bound=1.0,
    ),
    Claim(
        "norm-after",
        "figure3",
        "After fine-tuning, too, its value norm there is below that of other tokens",
        BELOW,
        SFT,
        "sink",
        outcomes=("attention.middle_norm_ratio",),
        bound=1.0,
    ),
    Claim(
        "share-after",
        "figure3",
        "After fine-tuning, too, it receives ten times an even share of attention there and more",
        ABOVE,
        SFT,
        "sink",
        outcomes=("attention.middle_sink_times",),
        bound=10.0,
        late=True,
    ),
    Claim("gsm8k-sink-helps", "gsm8k", "A sink improves the fine-tuned DLM", LOWER, SFT, "sink", "vanilla", (ANSWERS,)),
    Claim("gsm8k-gate-helps", "gsm8k", "Gated attention improves it", LOWER, SFT, "gate", "vanilla", (ANSWERS,)),
    Claim(
        "gsm8k-sink-beats-gate",
        "gsm8k",
        "The sink improves it more than gated attention",
        LOWER,
        SFT,
        "sink",
        "gate",
        (ANSWERS,),
        late=True,
    ),
)


def outcome_name(outcome: str) -> str:
    """Without its unit."""
    return OUTCOMES.get(outcome, outcome.removeprefix("attention.").replace("_", " ")).split(", nats")[0]


# -- differences ------------------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Two variants on one outcome: within each seed, and over seeds."""

    outcome: str
    seeds: Mapping[int, Paired]
    spread: Spread
    same: Equivalence


def runs_of(records: Mapping[str, Record], group: str, variant: str) -> dict[int, Record]:
    """By seed."""
    found = (one for one in records.values() if (one.kind, one.group, one.variant) == (RUN, group, variant))
    return {record.seed: record for record in sorted(found, key=lambda one: one.seed)}


def choice_tasks(record: Record) -> list[str]:
    """Tasks whose questions have options; their right option's NLL is kept."""
    tasks = [name.removesuffix(".acc") for name in record.outcomes if name.endswith(".acc")]
    return sorted(task for task in tasks if f"{task}.nll" in record.outcomes)


def pair(one: Record, other: Record, outcome: str) -> Paired | None:
    """other - one; None where either has no such outcome."""
    if outcome == CHOICES:
        tasks = [task for task in choice_tasks(one) if task in choice_tasks(other)]
        parts = [pair(one, other, f"{task}.nll") for task in tasks]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        stderr = math.sqrt(math.fsum(part.stderr**2 for part in known)) / len(known)
        return Paired(math.fsum(part.difference for part in known) / len(known), stderr, sum(part.n for part in known))
    ours, theirs = one.outcomes.get(outcome), other.outcomes.get(outcome)
    if ours is None or theirs is None:
        return None
    return _pair_outcomes(ours, theirs, f"{one.name} and {other.name}: {outcome}")


def _pair_outcomes(ours: Outcome, theirs: Outcome, place: str) -> Paired:
    if ours.items is None or theirs.items is None:
        return Paired(theirs.value - ours.value, math.nan, 1)
    if ours.units != theirs.units or len(ours.items) != len(theirs.items):
        raise ValueError(f"{place}: scored on other items")
    return pair_items(ours.values, theirs.values, ours.units)


def value_of(record: Record, outcome: str) -> float | None:
    if outcome == CHOICES:
        values = [record.outcomes[f"{task}.nll"].value for task in choice_tasks(record)]
        return math.fsum(values) / len(values) if values else None
    found = record.outcomes.get(outcome)
    return None if found is None else found.value


def compare(records: Mapping[str, Record], group: str, variant: str, against: str, outcome: str) -> Difference:
    """variant - against, of the seeds that both have."""
    ours, theirs = runs_of(records, group, variant), runs_of(records, group, against)
    pairs = {seed: pair(theirs[seed], ours[seed], outcome) for seed in ours if seed in theirs}
    known = {seed: one for seed, one in pairs.items() if one is not None}
    values = [one.difference for one in known.values()]
    return Difference(outcome, known, over_seeds(values), equivalence(values, MARGIN))


def measured(records: Mapping[str, Record], group: str, variant: str, outcome: str) -> list[float]:
    found = (value_of(record, outcome) for record in runs_of(records, group, variant).values())
    return [value for value in found if value is not None]


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


def judge_lower(spread: Spread) -> str:
    """Does not hold: the difference points the other way, or the whole interval is too close to none to matter."""
    if not spread.known:
        return FEW
    if spread.high < 0:
        return HOLDS
    return FAILS if spread.low > 0 or max(abs(spread.low), abs(spread.high)) < MARGIN else OPEN


def judge_same(spread: Spread, same: Equivalence) -> str:
    """Holds where two one-sided tests say so; does not where the interval lies wholly outside the margin."""
    if not spread.known:
        return FEW
    if same.shown:
        return HOLDS
    return FAILS if spread.low > same.margin or spread.high < -same.margin else OPEN


def judge_bound(spread: Spread, kind: str) -> str:
    if not spread.known:
        return FEW
    if kind == BELOW:
        return HOLDS if spread.high < 0 else FAILS if spread.low >= 0 else OPEN
    return HOLDS if spread.low > 0 else FAILS if spread.high <= 0 else OPEN


def judge(claim: Claim, records: Mapping[str, Record]) -> list[Judged]:
    """A verdict on each of its outcomes, also on those that no run has yet: a part of them cannot speak for all. Where nothing was
    measured, the first one says so."""
    judge_one: Callable[[Claim, Mapping[str, Record], str], Judged] = (
        _judge_quantity if claim.kind in (BELOW, ABOVE) else _judge_difference
    )
    found = [judge_one(claim, records, outcome) for outcome in claim.outcomes]
    return found if any(one.spread.n for one in found) else found[:1]


def overall(judged: Sequence[Judged]) -> str:
    """Holds where every outcome says so, does not where any says that."""
    verdicts = {one.verdict for one in judged}
    return next(one for one in (FAILS, FEW, OPEN, HOLDS) if one in verdicts)


def _judge_difference(claim: Claim, records: Mapping[str, Record], outcome: str) -> Judged:
    found = compare(records, claim.group, claim.variant, claim.against, outcome)
    spread = found.spread
    verdict = judge_same(spread, found.same) if claim.kind == SAME else judge_lower(spread)
    subject = f"{LABELS[claim.variant]} \N{MINUS SIGN} {LABELS[claim.against]}, {OUTCOMES.get(outcome, outcome)}: "
    if not spread.n:
        return Judged(outcome, verdict, spread, subject + "not measured yet.")
    text = subject + write_spread(spread)
    if claim.kind == SAME and found.same.low == found.same.low:
        inside = "inside" if found.same.shown else "not inside"
        text += f"; 90 % interval [{found.same.low:+.4f}, {found.same.high:+.4f}] {inside} \N{PLUS-MINUS SIGN}{MARGIN}"
    errors = [one.stderr for one in found.seeds.values() if not math.isnan(one.stderr)]
    if errors:
        text += f"; standard error over a seed's items {math.fsum(errors) / len(errors):.4f}"
    return Judged(outcome, verdict, spread, f"{text}. {verdict.capitalize()}.", write_interval(spread), found.seeds)


def _judge_quantity(claim: Claim, records: Mapping[str, Record], outcome: str) -> Judged:
    values = measured(records, claim.group, claim.variant, outcome)
    spread = over_seeds([value - claim.bound for value in values])
    verdict = judge_bound(spread, claim.kind)
    subject = f"{LABELS[claim.variant]}, {outcome.removeprefix('attention.').replace('_', ' ')}: "
    if not values:
        return Judged(outcome, verdict, spread, subject + "not measured yet.")
    own = over_seeds(values)
    text = f"{subject}{write_spread(own, '')} against {claim.bound:g}. {verdict.capitalize()}."
    return Judged(outcome, verdict, spread, text, f"{write_interval(own, '')} against {claim.bound:g}")


def write_spread(spread: Spread, sign: str = "+") -> str:
    return f"{write_interval(spread, sign)} ({spread.n} seed{'s' if spread.n > 1 else ''})" if spread.n else ""


def write_interval(spread: Spread, sign: str = "+") -> str:
    if math.isnan(spread.low):
        return f"{spread.mean:{sign}.4f}"
    return f"{spread.mean:{sign}.4f} [{spread.low:{sign}.4f}, {spread.high:{sign}.4f}]"


def as_json(spread: Spread) -> dict[str, Any]:
    return {name: value if isinstance(value, int) or np.isfinite(value) else None for name, value in spread._asdict().items()}
