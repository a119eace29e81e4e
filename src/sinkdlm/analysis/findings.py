"""What captures say: what was found in each, and which claims of the paper show here. Numbers alone decide.

Sentences are templates over told numbers: one whose number was not measured is left out. Takes captures (as dictionaries) and
their differences; knows no file, figure or page.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.analysis.glossary import QUANTITIES, defined, write_interval, write_number, write_value
from sinkdlm.analysis.intervals import mean_interval
from sinkdlm.analysis.metrics import difference

Capture = Mapping[str, Any]
Estimate = Mapping[str, Any]
SHOWS, FAILS, UNDECIDED = "shows", "does not show", "undecided"
OF_SINKS = ("sink_mass", "lane_heads", "sink_value_norm", "lane_norm_ratio")  # quantities of the model's own sinks
KIND_NAMES = {"mask": "[MASK]", "punctuation": "punctuation", "space": "white space", "special": "special tokens", "word": "words"}
_NOTHING: Estimate = {"mean": None, "low": None, "high": None, "n": 0}

# Topic -> what is said where the first sentence has no number, then the sentences.
_TOPICS = {
    "Attention on the sink": (
        "The model has no sink of its own: all attention goes to tokens of the text.",
        "The {sink} receives {sink_mass} of attention; an even share would be {even}.{sink_mass_layers}",
        "In {lane_heads} of heads it receives more than the threshold of {threshold}.",
    ),
    "Content sinks": (
        "Content sinks were not measured.",
        "A head has {content_sinks} tokens of the text at a step that receive more than {threshold}.{content_sinks_layers}",
        "{sink_heads} of heads and steps have at least one.",
        "By the relative rule a head has {relative_sinks}.",
    ),
    "How they move": (
        "Whether content sinks move cannot be said: no two consecutive steps have one.",
        "From one step to the next the turnover of content sinks is {turnover}; in chance order it would be {turnover_null}.",
        "They {turnover_gap}.",
        "A content sink lasts {lifetime} steps.",
        "The top one moves in {move_rate} of steps, {moved} tokens on average over all steps.",
        "{anchored} of heads are anchored to one token.",
        "By the relative rule turnover is {relative_turnover}, in chance order {relative_turnover_null}:",
        "they {relative_turnover_gap}.",
    ),
    "Which tokens": ("", "Of content sinks (and, in brackets, of all tokens seen): {kinds}."),
    "Value norms": (
        "Without content sinks, the paper's claim that they have low value norms is not decidable here.",
        "Values of content sinks have {norm_ratio} times the norm of other tokens'{with_sinks}.",
        "The paper's claim that sinks have low norms {norm_ratio_verdict}.",
        "The value of the {sink} has {lane_norm_ratio} times the norm of other tokens'.",
    ),
    "Resting as a no-op": (
        "",
        "Attention writes {bound_ratio} of the most its weights allow (eq. 20).",
        "Its update has {update_ratio} times the norm of the residual stream (eq. 21, 22).",
        "Between queries that rest most and least on sinks the update differs by {noop}: {noop_verdict}.",
    ),
}
# What is said of an interval that lies below a border, above it, around it, or is not there.
_CHANCE = (
    *("move less than in chance order ({gap})", "move more than in chance order ({gap})"),
    *("move no differently than in chance order ({gap})", "may move as in chance order or not: there is no interval to decide it"),
)
_LOW_NORM = (
    *("holds here", "does not hold here: theirs are higher", "is not decidable here: the interval contains 1"),
    "is not decidable here: there is no interval",
)
_RESTING = (
    *("resting goes with smaller updates", "resting goes with larger updates", "resting goes with no clear difference"),
    "there is no interval to judge it by",
)
_NELBO = ("is lower", "is higher", "does not clearly change", "changes, by how much is not sure")


class Finding(NamedTuple):
    topic: str
    text: str


class Claim(NamedTuple):
    """A claim of the paper, and whether it shows here. rule: what would make it show."""

    claim: str
    verdict: str
    evidence: str
    rule: str


class Comparison(NamedTuple):
    """second minus first. cautions: what else differs between them than the model."""

    first: Capture
    second: Capture
    difference: Mapping[str, Any]
    cautions: list[str]


class _Rule(NamedTuple):
    """A claim shows where the interval of a quantity lies below the border; where it lies above, it does not show."""

    claim: str
    of: str  # whose quantity: "own", of the model with a sink; "reference", of the one without; "gap", the difference
    quantity: str
    border: float
    rule: str
    missing: str  # evidence where there is no number, instead of the first sentence
    evidence: Sequence[str]


_RULES = (
    _Rule(
        *("The sink token absorbs attention", "own", "sink_mass", 0.0),
        "it receives more than an even share, and more than {threshold} in some heads",
        "Attention on the {sink} was not measured.",
        (
            "It receives {sink_mass} of attention; an even share would be {even}.",
            "It receives more than {threshold} in {lane_heads} of heads.",
        ),
    ),
    _Rule(
        *("Content sinks become fewer", "gap", "content_sinks", 0.0, "the difference in content sinks lies below zero"),
        "Content sinks were not measured in both.",
        (
            "A head has {new_content_sinks} against {old_content_sinks}: {gap_content_sinks}.",
            "By the relative rule: {gap_relative_sinks}.",
        ),
    ),
    _Rule(
        *("Content sinks move less", "gap", "turnover", 0.0, "the difference in turnover lies below zero"),
        "No content sinks whose movement could be compared{without}.",
        (
            "Turnover is {new_turnover} against {old_turnover}: {gap_turnover} (n = {n} trajectories).{other_layers}",
            "By the relative rule: {gap_relative_turnover}.",
        ),
    ),
    _Rule(
        *("Content sinks have low value norms", "reference", "norm_ratio", 1.0, "the ratio of norms lies below 1"),
        "{old_name} has no content sinks by the threshold.",
        ("In {old_name} their values have {old_norm_ratio} times the norm of other tokens'.{higher}",),
    ),
    _Rule(
        *("The sink token has a low value norm", "own", "lane_norm_ratio", 1.0, "the ratio of norms lies below 1"),
        "The {sink} has no value whose norm could be taken.",
        ("Its value has {lane_norm_ratio} times the norm of other tokens'.{higher}",),
    ),
)


def total(capture: Capture, name: str) -> Estimate:
    return capture["quantities"].get(name, {}).get("total", _NOTHING)


def tell(estimate: Estimate, name: str, signed: bool = False) -> str:
    return write_interval(estimate, QUANTITIES[name].unit, signed)


def sink_name(capture: Capture) -> str:
    model = capture["model"]
    kind = {"isolated": "sink token", "register": "register token", "logit": "sink logit"}[model.get("sink_kind", "isolated")]
    return kind if model["n_sinks"] == 1 or kind == "sink logit" else f"{model['n_sinks']} {kind}s"


def compare(captures: Sequence[Capture], *, seed: int = 0) -> list[Comparison]:
    """Every other capture against the reference: the first one without sinks of its own, or else the first."""
    first = next((one for one in captures if not one["model"]["n_sinks"]), captures[0])
    others = [one for one in captures if one is not first]
    return [Comparison(first, one, difference(first, one, seed=seed), _cautions(first, one)) for one in others]


def _cautions(first: Capture, second: Capture) -> list[str]:
    told = []
    settings = ("inputs", "shares", "policy", "length", "steps", "seed", "threshold", "margin")
    for part, keys, differs in (
        ("settings", settings, "the setting {} differs"),
        ("model", ("n_layers", "n_heads", "d_model", "vocab_size", "gate"), "the models differ in {}"),
    ):
        for key in keys:
            old, new = (one[part].get(key) for one in (first, second))
            if old != new:
                told.append(f"{differs.format(key)}: {write_value(old)} in {first['name']}, {write_value(new)} in {second['name']}")
    if [row.get("prompt") for row in first["trajectories"]] != [row.get("prompt") for row in second["trajectories"]]:
        told.append("they were not given the same prompts")
    return told


def _fill(template: str, facts: Mapping[str, str]) -> str:
    """The sentence, or nothing where one of its numbers is missing."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""


def _join(instead: str, templates: Sequence[str], facts: Mapping[str, str]) -> str:
    first, *more = (_fill(template, facts) for template in templates)
    return " ".join(filter(None, (first or _fill(instead, facts), *more)))


def _side(estimate: Estimate, border: float) -> int | None:
    """-1: the interval lies below the border; 1: above; 0: it contains it; None: there is no interval."""
    if not all(defined(estimate.get(part)) for part in ("mean", "low", "high")):
        return None
    return -1 if estimate["high"] < border else 1 if estimate["low"] > border else 0


def _word(words: Sequence[str], estimate: Estimate, border: float = 0.0) -> str:
    side = _side(estimate, border)
    return words[3 if side is None else (-1, 1, 0).index(side)]


def findings(capture: Capture, *, interventions: bool = True) -> list[Finding]:
    facts = _facts(capture)
    found = [Finding(topic, _join(instead, templates, facts)) for topic, (instead, *templates) in _TOPICS.items()]
    found += [_intervention(one) for one in capture["interventions"] if interventions]
    reasons: dict[str, list[str]] = {}
    for what, why in capture["omitted"].items():
        reasons.setdefault(why, []).append(what)
    found += [Finding("Not measured", f"{', '.join(what)}: {why}.") for why, what in reasons.items()]
    return [one for one in found if one.text]


def _facts(capture: Capture) -> dict[str, str]:
    """What templates name: quantities that were measured, and what follows from them."""
    model, settings = capture["model"], capture["settings"]
    n_layers, seed = model["n_layers"], settings.get("seed", 0)
    totals = {name: total(capture, name) for name in QUANTITIES if model["n_sinks"] or name not in OF_SINKS}
    facts = {name: tell(one, name, signed=name == "noop") for name, one in totals.items() if defined(one["mean"])}
    facts |= {f"{name}_layers": _range(capture, name) for name in ("sink_mass", "content_sinks")}
    facts |= {"name": capture["name"], "threshold": f"{settings['threshold']:g}"}
    if model["n_sinks"]:
        facts |= {"sink": sink_name(capture), "even": write_number(even_share(capture), "share")}
    for name in ("turnover", "relative_turnover"):
        gap = against_chance(capture, name, seed=seed)
        facts[f"{name}_gap"] = _word(_CHANCE, gap).format(gap=tell(gap, name, signed=True))
    if "turnover" not in facts:
        del facts["turnover_gap"]
    if capture["kinds"] and capture["kinds"]["absolute"]:
        among = sorted(capture["kinds"]["absolute"].items(), key=lambda item: -item[1])
        of_all = {kind: write_number(share, "share") for kind, share in capture["kinds"]["all"].items()}
        facts["kinds"] = ", ".join(f"{KIND_NAMES[kind]} {write_number(share, 'share')} ({of_all[kind]})" for kind, share in among)
    if "norm_ratio" in facts:
        having = len(layers_of(capture, "norm_ratio"))
        facts["with_sinks"] = f" in the {having} of {n_layers} layers that have them" if having < n_layers else ""
        facts["norm_ratio_verdict"] = _word(_LOW_NORM, totals["norm_ratio"], 1.0)
    return facts | {"noop_verdict": _word(_RESTING, totals["noop"])}


def layers_of(capture: Capture, name: str) -> dict[int, float]:
    """Means of the layers that have a quantity."""
    layers = capture["quantities"].get(name, {}).get("layers", [])
    return {layer: one["mean"] for layer, one in enumerate(layers) if defined(one["mean"])}


def even_share(capture: Capture) -> float:
    """What the model's own sinks would receive if every key received the same."""
    n_sinks = capture["model"]["n_sinks"]
    return n_sinks / (n_sinks + float(np.mean([row["length"] for row in capture["trajectories"]])))


def _range(capture: Capture, name: str) -> str:
    """From the weakest to the strongest layer."""
    means = layers_of(capture, name)
    if len(means) < 2 or not any(means.values()):
        return ""
    ends = [
        f"{write_number(means[layer], QUANTITIES[name].unit)} (layer {layer})" for layer in sorted(means, key=means.__getitem__)
    ]
    return f" By layer: from {ends[0]} to {ends[-1]}."


def against_chance(capture: Capture, name: str = "turnover", *, seed: int = 0) -> Estimate:
    """Turnover less that of steps in shuffled order, trajectory by trajectory."""
    rows = [[row["values"][one]["total"] for one in (name, f"{name}_null")] for row in capture["trajectories"]]
    found = np.array(rows, dtype=float).reshape(-1, 2)
    return mean_interval(found[:, 0] - found[:, 1], seed=seed)


def _intervention(one: Mapping[str, Any]) -> Finding:
    change = {**one["nelbo"], "mean": one["nelbo"]["change"]}
    text = f"The NELBO of {change['n']} texts of {one['text_tokens']:.0f} tokens on average {_word(_NELBO, change)}: "
    text += f"{write_interval(change, signed=True)} nats per token"
    changed = one.get("changed") or _NOTHING
    if defined(changed["mean"]):
        text += f"; {write_interval(changed, 'share')} of generated tokens differ"
    return Finding(f"Intervention: {one['label']}", f"{text}.")


def claims(capture: Capture, comparison: Comparison | None = None) -> list[Claim]:
    """For one capture, alone or as the second of a comparison with a model without sinks."""
    old = capture if comparison is None else comparison.first
    gaps = {} if comparison is None else {name: one["total"] for name, one in comparison.difference["quantities"].items()}
    facts = _facts(capture)
    facts |= {f"new_{name}": text for name, text in facts.items()} | {f"old_{name}": text for name, text in _facts(old).items()}
    facts |= {f"gap_{name}": tell(one, name, signed=True) for name, one in gaps.items() if defined(one["mean"])}
    without = [one["name"] for one in (old, capture) if not layers_of(one, "turnover")]
    facts |= {"without": f" in {without[0]}" if len(without) == 1 else "", "other_layers": _other_layers(old, capture, "turnover")}
    found = []
    for one in _RULES:
        if (one.of == "gap" and comparison is None) or (one.of == "own" and not capture["model"]["n_sinks"]):
            continue
        of = old if one.of == "reference" else capture
        estimate = gaps.get(one.quantity, _NOTHING) if one.of == "gap" else total(of, one.quantity)
        verdict = _absorbs(of) if one.quantity == "sink_mass" else _word((SHOWS, FAILS, UNDECIDED, UNDECIDED), estimate, one.border)
        known = facts | {"n": str(estimate["n"]), "higher": _higher(of, one.quantity)}
        evidence = _join(one.missing, one.evidence, known)
        if defined(estimate["mean"]) and not defined(estimate["low"]):
            evidence += f" There is no interval with n = {estimate['n']}."
        found.append(Claim(one.claim, verdict, evidence, one.rule.format_map(facts)))
    return found


def _absorbs(capture: Capture) -> str:
    """Two borders: an even share for its attention, none for the heads that use it."""
    mass, users = _side(total(capture, "sink_mass"), even_share(capture)), total(capture, "lane_heads")
    if mass == -1 or users["mean"] == 0:
        return FAILS
    return SHOWS if mass == 1 and _side(users, 0.0) == 1 else UNDECIDED


def _other_layers(old: Capture, new: Capture, name: str) -> str:
    """Each total is over the layers that have content sinks, and those may be others in the other model."""
    layers = [set(layers_of(one, name)) for one in (old, new)]
    if layers[0] == layers[1]:
        return ""
    told = " and ".join(f"{len(own)} in {one['name']}" for own, one in zip(layers, (old, new), strict=True))
    return f" Not the same layers have content sinks: {told}, {len(layers[0] & layers[1])} of them in both."


def _higher(capture: Capture, name: str) -> str:
    """A mean over layers may hide some that say otherwise."""
    means = layers_of(capture, name).values()
    above = sum(mean > 1 for mean in means)
    return f" It is above 1 in {above} of {len(means)} layers." if above else ""


def headline(captures: Sequence[Capture], judged: Mapping[str, Sequence[Claim]]) -> str:
    """judged: the name of a capture with a sink that was compared with one without -> its claims."""
    if len(judged) > 2:
        return f"{len(judged)} checkpoints with a sink against one without"
    if judged:
        counts = {name: sum(one.verdict == SHOWS for one in told) for name, told in judged.items()}
        return "; ".join(f"{name}: {n} of {len(judged[name])} claims of the paper show" for name, n in counts.items())
    capture = captures[0]
    mass, heads = (total(capture, name)["mean"] for name in ("sink_mass", "sink_heads"))
    if capture["model"]["n_sinks"] and defined(mass):
        return f"{capture['name']}: {write_number(mass, 'share')} of attention rests on its {sink_name(capture)}"
    return f"{capture['name']}: {write_number(heads, 'share') if heads else 'none'} of heads and steps have a content sink"
