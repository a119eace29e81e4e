"""Turn captures (dictionaries) into sentences: findings, and verdicts on the paper's claims. Numbers alone decide."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.analysis.glossary import QUANTITIES, defined, quoted, write_interval, write_number, write_value
from sinkdlm.analysis.intervals import mean_interval
from sinkdlm.analysis.metrics import difference

Capture = Mapping[str, Any]
Estimate = Mapping[str, Any]
SHOWS, FAILS, UNDECIDED = "shows", "does not show", "undecided"
OF_SINKS = ("sink_mass", "lane_heads", "sink_value_norm", "lane_norm_ratio")  # quantities of the model's own sinks
KIND_NAMES = {"mask": "[MASK]", "punctuation": "punctuation", "space": "white space", "special": "special tokens", "word": "words"}
_NOTHING: Estimate = {"mean": None, "low": None, "high": None, "n": 0}

# Topic -> the text where the first sentence lacks its number, then the sentences; one that lacks a number is left out.
_TOPICS = {
    "Attention on the sink": (
        "The model has no sink token: all attention goes to tokens of the text.",
        "The {sink} receives {sink_mass} of attention; an even share would be {even}.{sink_mass_layers}",
        "It receives more than the threshold of {threshold} in {lane_heads} of heads and steps.",
    ),
    "Content sinks": (
        "Content sinks were not measured.",
        "A head has {content_sinks} content sinks at a step: tokens that receive more than {threshold}.{content_sinks_layers}",
        "{sink_heads} of heads and steps have at least one.",
        "By the relative rule a head has {relative_sinks}.",
    ),
    "Movement of content sinks": (
        "Movement cannot be judged: there are no content sinks, or there is only one step.",
        "Turnover between consecutive steps is {turnover}; with the steps in random order it would be {turnover_null}.",
        "Content sinks {turnover_gap}.",
        "One lasts {lifetime} steps on average.",
        "A head's top content sink moves in {move_rate} of steps, by {moved} tokens on average, counting 0 where it stays.",
        "{anchored} of heads are anchored: their top content sink is nearly always the same token.",
        "By the relative rule turnover is {relative_turnover}, in random order {relative_turnover_null}:",
        "content sinks {relative_turnover_gap}.",
    ),
    "Kinds of content sinks": ("", "Share of each kind among content sinks, and in brackets among all tokens seen: {kinds}."),
    "Value norms": (
        "There are no content sinks, so the paper's claim that they have low value norms cannot be decided here.",
        "The value norm of content sinks is {norm_ratio} times that of other tokens{with_sinks}.",
        "The paper's claim that content sinks have low value norms {norm_ratio_verdict}.",
        "The value norm of the {sink} is {lane_norm_ratio} times that of other tokens.",
    ),
    "Attention as a no-op": (
        "",
        "The norm of a head's output is {bound_ratio} times its bound, the attention-weighted mean of value norms (eq. 20).",
        "The norm of attention's update is {update_ratio} times that of the residual stream (eq. 21, 22).",
        "From queries that attend least to sinks to those that attend most, this ratio changes by {noop}: {noop_verdict}.",
    ),
}
# Words for an interval that lies below a border, above it, around it, or is missing.
_CHANCE = (
    *("move less than in random order ({gap})", "move more than in random order ({gap})"),
    *("move no differently than in random order ({gap})", "cannot be compared with random order: there is no interval"),
)
_LOW_NORM = (
    *("holds here", "does not hold here: theirs are higher", "cannot be decided here: the interval contains 1"),
    "cannot be decided here: there is no interval",
)
_RESTING = (
    *("attending to sinks goes with smaller updates", "attending to sinks goes with larger updates", "no clear difference"),
    "there is no interval to judge it by",
)
_NELBO = ("is lower", "is higher", "does not clearly change", "changes (no interval)")


class Finding(NamedTuple):
    topic: str
    text: str


class Claim(NamedTuple):
    """A claim of the paper, and whether it shows here. rule: the condition for "shows"."""

    claim: str
    verdict: str
    evidence: str
    rule: str


class Comparison(NamedTuple):
    """second minus first. cautions: differences beside the one that is studied."""

    first: Capture
    second: Capture
    difference: Mapping[str, Any]
    cautions: list[str]


class _Rule(NamedTuple):
    """A claim shows where the interval of its quantity lies below the border, and does not show where it lies above."""

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
        "the sink token receives more than an even share, and more than {threshold} in some heads",
        "Attention on the {sink} was not measured.",
        (
            "It receives {sink_mass} of attention; an even share would be {even}.",
            "It receives more than {threshold} in {lane_heads} of heads and steps.",
        ),
    ),
    _Rule(
        *("Content sinks become fewer", "gap", "content_sinks", 0.0, "the interval of the difference lies below zero"),
        "Content sinks were not measured in both models.",
        (
            'A head has {new_content_sinks} in "{new_name}", {old_content_sinks} in "{old_name}": difference {gap_content_sinks}.',
            "The difference by the relative rule is {gap_relative_sinks}.",
        ),
    ),
    _Rule(
        *("Content sinks move less", "gap", "turnover", 0.0, "the interval of the difference in turnover lies below zero"),
        "There are no content sinks whose movement could be compared{without}.",
        (
            'Turnover is {new_turnover} in "{new_name}", {old_turnover} in "{old_name}": '
            "difference {gap_turnover} (n = {n} trajectories).{other_layers}",
            "The difference by the relative rule is {gap_relative_turnover}.",
        ),
    ),
    _Rule(
        *("Content sinks have low value norms", "reference", "norm_ratio", 1.0, "the interval of the norms' ratio lies below 1"),
        'No token of the text is a content sink in "{old_name}".',
        ('In "{old_name}" their value norm is {old_norm_ratio} times that of other tokens.{higher}',),
    ),
    _Rule(
        *("The sink token has a low value norm", "own", "lane_norm_ratio", 1.0, "the interval of the norms' ratio lies below 1"),
        "The {sink} has no value, so no norm.",
        ("Its value norm is {lane_norm_ratio} times that of other tokens.{higher}",),
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
    """Compare every other capture with the reference: the first one without a sink token, else the first."""
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
                told.append(f'{differs.format(key)}: "{first["name"]}" {write_value(old)}; "{second["name"]}" {write_value(new)}')
    if [row.get("prompt") for row in first["trajectories"]] != [row.get("prompt") for row in second["trajectories"]]:
        told.append("they were not given the same prompts")
    return told


def _fill(template: str, facts: Mapping[str, str]) -> str:
    """The sentence, or "" where one of its numbers is missing."""
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
    """Values for the templates: the measured quantities, and what follows from them."""
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
    """Layer -> mean, for the layers that have the quantity."""
    layers = capture["quantities"].get(name, {}).get("layers", [])
    return {layer: one["mean"] for layer, one in enumerate(layers) if defined(one["mean"])}


def even_share(capture: Capture) -> float:
    """The share of attention on the model's own sinks if every key received the same."""
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
    """Turnover minus turnover of the steps in random order, per trajectory."""
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
    """Judge one capture, alone or as the second of a comparison with a model without a sink token."""
    old = capture if comparison is None else comparison.first
    gaps = {} if comparison is None else {name: one["total"] for name, one in comparison.difference["quantities"].items()}
    facts = _facts(capture)
    facts |= {f"new_{name}": text for name, text in facts.items()} | {f"old_{name}": text for name, text in _facts(old).items()}
    facts |= {f"gap_{name}": tell(one, name, signed=True) for name, one in gaps.items() if defined(one["mean"])}
    without = [one["name"] for one in (old, capture) if not layers_of(one, "turnover")]
    facts |= {
        "without": f' in "{without[0]}"' if len(without) == 1 else "",
        "other_layers": _other_layers(old, capture, "turnover"),
    }
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
    """Shows where the sink receives more than an even share and some heads use it."""
    mass, users = _side(total(capture, "sink_mass"), even_share(capture)), total(capture, "lane_heads")
    if mass == -1 or users["mean"] == 0:
        return FAILS
    return SHOWS if mass == 1 and _side(users, 0.0) == 1 else UNDECIDED


def _other_layers(old: Capture, new: Capture, name: str) -> str:
    """Totals are over the layers that have content sinks; say where those layers differ between the models."""
    layers = [set(layers_of(one, name)) for one in (old, new)]
    if layers[0] == layers[1]:
        return ""
    told = " and ".join(f'{len(own)} in "{one["name"]}"' for own, one in zip(layers, (old, new), strict=True))
    return f" The layers with content sinks differ: {told}, {len(layers[0] & layers[1])} of them in both."


def _higher(capture: Capture, name: str) -> str:
    """Say how many layers lie above 1, which the mean may hide."""
    means = layers_of(capture, name).values()
    above = sum(mean > 1 for mean in means)
    return f" The ratio is above 1 in {above} of {len(means)} layers." if above else ""


def headline(captures: Sequence[Capture], judged: Mapping[str, Sequence[Claim]]) -> str:
    """The report's title. judged: name of a capture with a sink -> its claims against one without."""
    if len(judged) > 2:
        return f"{len(judged)} checkpoints with a sink token against one without"
    if judged:
        counts = {name: sum(one.verdict == SHOWS for one in told) for name, told in judged.items()}
        return "; ".join(f'"{name}": {n} of {len(judged[name])} claims of the paper show' for name, n in counts.items())
    capture = captures[0]
    mass, heads = (total(capture, name)["mean"] for name in ("sink_mass", "sink_heads"))
    if capture["model"]["n_sinks"] and defined(mass):
        return f"{quoted(capture)}: {write_number(mass, 'share')} of attention rests on its {sink_name(capture)}"
    return f"{quoted(capture)}: {write_number(heads, 'share') if heads else 'none'} of heads and steps have a content sink"


def lead(captures: Sequence[Capture], judged: Sequence[Sequence[Claim]]) -> list[str]:
    """The report's first sentences: attention on the sinks, content sinks, and which claims show."""
    masses, heads = (
        [(one, write_number(mean, "share")) for one in captures if defined(mean := total(one, name)["mean"])]
        for name in ("sink_mass", "sink_heads")
    )
    own = [
        f"The {sink_name(one)} of {quoted(one)} receives {mass} of attention; "
        f"an even share would be {write_number(even_share(one), 'share')}."
        for one, mass in masses
        if one["model"]["n_sinks"]
    ]
    told = [" ".join(own) or "No model here has a sink token."]
    if heads:
        shares = ", ".join(f"{share} in {quoted(one)}" for one, share in heads)
        told.append(f"Heads and steps with a content sink: {shares}.")
    return told + [_count(one) for one in judged if len(judged) == 1]


def _count(judged: Sequence[Claim]) -> str:
    parts = []
    for verdict, one, many in ((SHOWS, SHOWS, "show"), (FAILS, FAILS, "do not show"), (UNDECIDED, "is undecided", "are undecided")):
        names = [claim.claim[0].lower() + claim.claim[1:] for claim in judged if claim.verdict == verdict]
        if names:
            parts.append(f"{len(names)} {one if len(names) == 1 else many} ({', '.join(names)})")
    return f"Of {len(judged)} claims of the paper {'; '.join(parts)}."
