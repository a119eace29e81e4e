"""What captures say, in sentences: what was found in each, and which claims of the paper show here. Numbers alone decide.

Takes captures (as dictionaries) and their differences; knows no file, figure or page.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.analysis.glossary import defined, unit_of, write_interval, write_number

Capture = Mapping[str, Any]
Estimate = Mapping[str, Any]
SHOWS, FAILS, UNDECIDED = "shows", "does not show", "undecided"
KIND_NAMES = {"mask": "[MASK]", "punctuation": "punctuation", "space": "white space", "special": "special tokens", "word": "words"}
_NOTHING: Estimate = {"mean": None, "low": None, "high": None, "n": 0}


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


def total(capture: Capture, name: str) -> Estimate:
    return capture["quantities"].get(name, {}).get("total", _NOTHING)


def change(comparison: Comparison, name: str) -> Estimate:
    return comparison.difference["quantities"].get(name, {}).get("total", _NOTHING)


def tell(estimate: Estimate, name: str, signed: bool = False) -> str:
    return write_interval(estimate, unit_of(name), signed)


def sink_name(capture: Capture) -> str:
    model = capture["model"]
    kind = {"isolated": "sink token", "register": "register token", "logit": "sink logit"}[model.get("sink_kind", "isolated")]
    return kind if model["n_sinks"] == 1 or kind == "sink logit" else f"{model['n_sinks']} {kind}s"


def compare(captures: Sequence[Capture], *, seed: int = 0) -> list[Comparison]:
    """Every other capture against the reference: the first one without sinks of its own, or else the first."""
    from sinkdlm.analysis.metrics import difference

    if len(captures) < 2:
        return []
    first = next((one for one in captures if not one["model"]["n_sinks"]), captures[0])
    return [
        Comparison(first, one, difference(first, one, seed=seed), _cautions(first, one)) for one in captures if one is not first
    ]


def _cautions(first: Capture, second: Capture) -> list[str]:
    told = []
    for key in ("inputs", "shares", "policy", "length", "steps", "seed", "threshold", "margin"):
        values = [one["settings"].get(key) for one in (first, second)]
        if values[0] != values[1]:
            told.append(
                f"the setting {key} differs: {_plain(values[0])} in {first['name']}, {_plain(values[1])} in {second['name']}"
            )
    for key in ("n_layers", "n_heads", "d_model", "vocab_size", "gate"):
        values = [one["model"].get(key) for one in (first, second)]
        if values[0] != values[1]:
            told.append(
                f"the models differ in {key}: {_plain(values[0])} in {first['name']}, {_plain(values[1])} in {second['name']}"
            )
    if [row.get("prompt") for row in first["trajectories"]] != [row.get("prompt") for row in second["trajectories"]]:
        told.append("they were not given the same prompts")
    return told


def _plain(value: Any) -> str:
    return ", ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)


# -- one capture ----------------------------------------------------------------------------------------------------------------


def findings(capture: Capture, *, interventions: bool = True) -> list[Finding]:
    parts = [_mass(capture), _content(capture), _movement(capture), _kinds(capture), _norms(capture), _noop(capture)]
    parts += [_intervention(one) for one in capture["interventions"] if interventions]
    reasons: dict[str, list[str]] = {}
    for what, why in capture["omitted"].items():
        reasons.setdefault(why, []).append(what)
    parts += [Finding("Not measured", f"{', '.join(what)}: {why}.") for why, what in reasons.items()]
    return [part for part in parts if part is not None]


def _mass(capture: Capture) -> Finding:
    topic = "Attention on the sink"
    if not capture["model"]["n_sinks"]:
        return Finding(topic, "The model has no sink of its own: all attention goes to tokens of the text.")
    mass = total(capture, "sink_mass")
    if not defined(mass["mean"]):
        return Finding(topic, "Attention on the sink was not measured.")
    text = f"The {sink_name(capture)} receives {tell(mass, 'sink_mass')} of attention; an even share would be "
    text += f"{write_number(even_share(capture), 'share')}. {_range(capture, 'sink_mass')} "
    text += f"In {tell(total(capture, 'lane_heads'), 'lane_heads')} "
    return Finding(topic, text + f"of heads it receives more than the threshold of {capture['settings']['threshold']:g}.")


def even_share(capture: Capture) -> float:
    """What the model's own sinks would receive if every key received the same."""
    length = float(np.mean([row["length"] for row in capture["trajectories"]]))
    n_sinks = capture["model"]["n_sinks"]
    return n_sinks / (n_sinks + length)


def _range(capture: Capture, name: str) -> str:
    """From the weakest to the strongest layer."""
    means = {layer: one["mean"] for layer, one in enumerate(capture["quantities"][name]["layers"]) if defined(one["mean"])}
    if len(means) < 2:
        return ""
    weak, strong = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    low, high = (write_number(means[layer], unit_of(name)) for layer in (weak, strong))
    return f"By layer: from {low} (layer {weak}) to {high} (layer {strong})."


def _content(capture: Capture) -> Finding:
    topic, found, threshold = "Content sinks", total(capture, "content_sinks"), f"{capture['settings']['threshold']:g}"
    other = total(capture, "relative_sinks")
    relative = f" By the relative rule a head has {tell(other, 'relative_sinks')}." if defined(other["mean"]) else ""
    if not defined(found["mean"]):
        return Finding(topic, "Content sinks were not measured.")
    if not found["mean"]:
        return Finding(
            topic, f"No token of the text receives more than {threshold} in any head: there is no content sink.{relative}"
        )
    text = f"A head has {tell(found, 'content_sinks')} tokens of the text at a step that receive more than {threshold}; "
    text += f"{tell(total(capture, 'sink_heads'), 'sink_heads')} of heads and steps have at least one. "
    return Finding(topic, f"{text}{_range(capture, 'content_sinks')}".strip() + relative)


def against_chance(capture: Capture, name: str = "turnover", *, seed: int = 0) -> Estimate:
    """Turnover less that of steps in shuffled order, trajectory by trajectory."""
    from sinkdlm.analysis.intervals import mean_interval

    rows = [[row["values"][one]["total"] for one in (name, f"{name}_null")] for row in capture["trajectories"]]
    found = np.array(rows, dtype=float).reshape(-1, 2)
    return mean_interval(found[:, 0] - found[:, 1], seed=seed).as_json()


def _movement(capture: Capture) -> Finding:
    topic, turnover = "How they move", total(capture, "turnover")
    if not defined(turnover["mean"]):
        why = "there is none" if max(row["n_steps"] for row in capture["trajectories"]) > 1 else "there was one step"
        text = f"Whether content sinks move cannot be said: {why}."
        return Finding(topic, f"{text} {_relative_movement(capture)}".strip())
    gap = against_chance(capture, seed=capture["settings"].get("seed", 0))
    text = f"From one step to the next the turnover of content sinks is {tell(turnover, 'turnover')}; "
    text += f"in chance order of steps it would be {tell(total(capture, 'turnover_null'), 'turnover_null')}. They {_chance(gap)}. "
    if defined(total(capture, "lifetime")["mean"]):
        text += f"A content sink lasts {tell(total(capture, 'lifetime'), 'lifetime')} steps. "
    if defined(total(capture, "move_rate")["mean"]):
        text += f"The top one moves in {tell(total(capture, 'move_rate'), 'move_rate')} of steps, "
        text += f"{tell(total(capture, 'moved'), 'moved')} tokens on average over all steps. "
    if defined(total(capture, "anchored")["mean"]):
        text += f"{tell(total(capture, 'anchored'), 'anchored')} of heads are anchored to one token. "
    return Finding(topic, f"{text}{_relative_movement(capture)}".strip())


def _relative_movement(capture: Capture) -> str:
    turnover, null = (total(capture, f"relative_turnover{end}") for end in ("", "_null"))
    if not defined(turnover["mean"]):
        return ""
    gap = against_chance(capture, "relative_turnover", seed=capture["settings"].get("seed", 0))
    told = f"By the relative rule turnover is {tell(turnover, 'turnover')}, in chance order {tell(null, 'turnover')}"
    return f"{told}: they {_chance(gap)}."


def _chance(gap: Estimate) -> str:
    side = _side(gap, 0.0)
    if side is None:
        return "may move as in chance order or not: there is no interval to decide it"
    told = {
        -1: "move less than in chance order",
        1: "move more than in chance order",
        0: "move no differently than in chance order",
    }
    return f"{told[side]} ({tell(gap, 'turnover', signed=True)})"


def _kinds(capture: Capture) -> Finding | None:
    kinds = capture["kinds"]
    if not kinds or not kinds.get("absolute"):
        return None
    among, everywhere = kinds["absolute"], kinds["all"]
    parts = [
        f"{KIND_NAMES.get(kind, kind)} {write_number(share, 'share')} ({write_number(everywhere.get(kind), 'share')})"
        for kind, share in sorted(among.items(), key=lambda item: -item[1])
    ]
    return Finding("Which tokens", f"Of content sinks (and, in brackets, of all tokens seen): {', '.join(parts)}.")


def _norms(capture: Capture) -> Finding | None:
    parts = []
    ratio = total(capture, "norm_ratio")
    if defined(ratio["mean"]):
        with_sinks, n_layers = _layers_with(capture, "norm_ratio"), capture["model"]["n_layers"]
        where = f" in the {len(with_sinks)} of {n_layers} layers that have them" if len(with_sinks) < n_layers else ""
        parts.append(f"Values of content sinks have {tell(ratio, 'norm_ratio')} times the norm of other tokens'{where}.")
        parts.append(f"The paper's claim that sinks have low norms {_holds(ratio)}.")
    else:
        parts.append("Without content sinks, the paper's claim that they have low value norms is not decidable here.")
    lane = total(capture, "lane_norm_ratio")
    if capture["model"]["n_sinks"] and defined(lane["mean"]):
        ratio_told = tell(lane, "lane_norm_ratio")
        parts.append(
            f"The value of the {sink_name(capture)} has {ratio_told} times the norm of other tokens'{_made_zero(capture)}."
        )
    return Finding("Value norms", " ".join(parts))


def _layers_with(capture: Capture, name: str) -> list[int]:
    return [layer for layer, one in enumerate(capture["quantities"].get(name, {}).get("layers", [])) if defined(one["mean"])]


def _holds(ratio: Estimate) -> str:
    told = {-1: "holds here", 1: "does not hold here: theirs are higher", 0: "is not decidable here: the interval contains 1"}
    side = _side(ratio, 1.0)
    return told[side] if side is not None else "is not decidable here: there is no interval"


def _made_zero(capture: Capture) -> str:
    return ", being zero by construction" if capture["model"].get("sink_value") == "zero" else ""


def _noop(capture: Capture) -> Finding | None:
    bound, update, rest = (total(capture, name) for name in ("bound_ratio", "update_ratio", "noop"))
    parts = []
    if defined(bound["mean"]):
        parts.append(f"Attention writes {tell(bound, 'bound_ratio')} of the most its weights allow (eq. 20).")
    if defined(update["mean"]):
        parts.append(f"Its update has {tell(update, 'update_ratio')} times the norm of the residual stream (eq. 21, 22).")
    if defined(rest["mean"]):
        told = {
            -1: "resting goes with smaller updates",
            1: "resting goes with larger updates",
            0: "resting goes with no clear difference",
        }
        side = _side(rest, 0.0)
        end = "there is no interval to judge it by" if side is None else told[side]
        parts.append(
            f"Between queries that rest most and least on sinks the update differs by {tell(rest, 'noop', signed=True)}: {end}."
        )
    return Finding("Resting as a no-op", " ".join(parts)) if parts else None


def _intervention(one: Mapping[str, Any]) -> Finding:
    nelbo = one["nelbo"]
    effect = _side({**nelbo, "mean": nelbo["change"]}, 0.0)
    told = {-1: "is lower", 1: "is higher", 0: "does not clearly change", None: "changes, by how much is not sure"}[effect]
    text = f"The NELBO of {nelbo['n']} texts of {one['text_tokens']:.0f} tokens on average {told}: "
    text += f"{write_interval({**nelbo, 'mean': nelbo['change']}, signed=True)} nats per token"
    changed = one.get("changed") or _NOTHING
    if defined(changed["mean"]):
        text += f"; {write_interval(changed, 'share')} of generated tokens differ"
    return Finding(f"Intervention: {one['label']}", f"{text}.")


# -- the paper's claims ---------------------------------------------------------------------------------------------------------


def _side(estimate: Estimate, border: float) -> int | None:
    """-1: the interval lies below the border; 1: above; 0: it contains it; None: there is no interval."""
    if not all(defined(estimate.get(part)) for part in ("mean", "low", "high")):
        return None
    return -1 if estimate["high"] < border else 1 if estimate["low"] > border else 0


def claims(capture: Capture, comparison: Comparison | None = None) -> list[Claim]:
    """For one capture, alone or as the second of a comparison with a model without sinks."""
    reference = capture if comparison is None else comparison.first
    told = [_claim_mass(capture)] if capture["model"]["n_sinks"] else []
    if comparison is not None:
        told += [_claim_fewer(comparison), _claim_still(comparison)]
    told.append(_claim_content_norm(reference))
    return told + ([_claim_lane_norm(capture)] if capture["model"]["n_sinks"] else [])


def _claim_mass(capture: Capture) -> Claim:
    mass, users, even = total(capture, "sink_mass"), total(capture, "lane_heads"), even_share(capture)
    threshold = capture["settings"]["threshold"]
    side = _side(mass, even)
    verdict = UNDECIDED
    if side == -1 or users["mean"] == 0:
        verdict = FAILS
    elif side == 1 and _side(users, 0.0) == 1:
        verdict = SHOWS
    evidence = f"It receives {tell(mass, 'sink_mass')} of attention; an even share would be {write_number(even, 'share')}. "
    evidence += f"It receives more than {threshold:g} in {tell(users, 'lane_heads')} of heads."
    if defined(mass["mean"]) and mass["mean"] <= threshold:
        evidence += f" Averaged over heads it stays below {threshold:g}."
    rule = f"it receives more than an even share, and more than {threshold:g} in some heads"
    return Claim("The sink token absorbs attention", verdict, evidence + _few(mass), rule)


def _claim_fewer(comparison: Comparison) -> Claim:
    gap, (old, new) = change(comparison, "content_sinks"), _both(comparison, "content_sinks")
    verdict = {-1: SHOWS, 1: FAILS, 0: UNDECIDED, None: UNDECIDED}[_side(gap, 0.0)]
    evidence = (
        f"A head has {tell(new, 'content_sinks')} against {tell(old, 'content_sinks')}: {tell(gap, 'content_sinks', signed=True)}."
    )
    if old["mean"] == 0 and new["mean"] == 0:
        evidence = "Neither model has a content sink by the threshold."
    elif verdict == FAILS:
        evidence += " They become more."
    evidence += f" By the relative rule: {tell(change(comparison, 'relative_sinks'), 'relative_sinks', signed=True)}."
    return Claim("Content sinks become fewer", verdict, evidence + _few(gap), "the difference in content sinks lies below zero")


def _claim_still(comparison: Comparison) -> Claim:
    gap, (old, new) = change(comparison, "turnover"), _both(comparison, "turnover")
    verdict = {-1: SHOWS, 1: FAILS, 0: UNDECIDED, None: UNDECIDED}[_side(gap, 0.0)]
    if defined(gap["mean"]):
        evidence = f"Turnover is {tell(new, 'turnover')} against {tell(old, 'turnover')}: {tell(gap, 'turnover', signed=True)}"
        evidence += f" (n = {gap['n']} trajectories)." + (" They move more." if verdict == FAILS else "")
        evidence += _other_layers(comparison, "turnover")
    else:
        without = [one["name"] for one, own in zip(comparison[:2], (old, new), strict=True) if not defined(own["mean"])]
        evidence = (
            f"No content sinks whose movement could be compared{f' in {chr(32).join(without)}' if len(without) == 1 else ''}."
        )
    relative = change(comparison, "relative_turnover")
    if defined(relative["mean"]):
        evidence += f" By the relative rule: {tell(relative, 'relative_turnover', signed=True)}."
    return Claim("Content sinks move less", verdict, evidence + _few(gap), "the difference in turnover lies below zero")


def _other_layers(comparison: Comparison, name: str) -> str:
    """Each total is over the layers that have content sinks, and those may be others in the other model."""
    layers = [_layers_with(one, name) for one in comparison[:2]]
    if layers[0] == layers[1]:
        return ""
    told = [f"{len(own)} in {one['name']}" for own, one in zip(layers, comparison[:2], strict=True)]
    shared = len(set(layers[0]) & set(layers[1]))
    return f" Not the same layers have content sinks: {' and '.join(told)}, {shared} of them in both."


def _both(comparison: Comparison, name: str) -> tuple[Estimate, Estimate]:
    return total(comparison.first, name), total(comparison.second, name)


def _claim_content_norm(capture: Capture) -> Claim:
    ratio = total(capture, "norm_ratio")
    verdict = {-1: SHOWS, 1: FAILS, 0: UNDECIDED, None: UNDECIDED}[_side(ratio, 1.0)]
    evidence = f"In {capture['name']} their values have {tell(ratio, 'norm_ratio')} times the norm of other tokens'."
    if not defined(ratio["mean"]):
        evidence = f"{capture['name']} has no content sinks by the threshold."
    evidence += _higher(capture, "norm_ratio")
    return Claim("Content sinks have low value norms", verdict, evidence + _few(ratio), "the ratio of norms lies below 1")


def _claim_lane_norm(capture: Capture) -> Claim:
    ratio = total(capture, "lane_norm_ratio")
    verdict = {-1: SHOWS, 1: FAILS, 0: UNDECIDED, None: UNDECIDED}[_side(ratio, 1.0)]
    evidence = f"Its value has {tell(ratio, 'lane_norm_ratio')} times the norm of other tokens'{_made_zero(capture)}."
    if not defined(ratio["mean"]):
        evidence = f"The {sink_name(capture)} has no value whose norm could be taken."
    evidence += _higher(capture, "lane_norm_ratio")
    return Claim("The sink token has a low value norm", verdict, evidence + _few(ratio), "the ratio of norms lies below 1")


def _higher(capture: Capture, name: str) -> str:
    """A mean over layers may hide some that say otherwise."""
    means = [one["mean"] for one in capture["quantities"].get(name, {}).get("layers", []) if defined(one["mean"])]
    above = sum(mean > 1 for mean in means)
    return f" It is above 1 in {above} of {len(means)} layers." if above else ""


def _few(estimate: Estimate) -> str:
    if defined(estimate["mean"]) and not defined(estimate["low"]):
        return f" There is no interval with n = {estimate['n']}."
    return ""


# -- the first lines ------------------------------------------------------------------------------------------------------------


def headline(captures: Sequence[Capture], judged: Mapping[str, Sequence[Claim]]) -> str:
    """judged: the name of a capture with a sink that was compared with one without -> its claims."""
    if len(judged) > 2:
        return f"{len(judged)} checkpoints with a sink against one without"
    if judged:
        return "; ".join(f"{name}: of {len(told)} claims of the paper, {_counted(told)}" for name, told in judged.items())
    capture = captures[0]
    mass, sinks = total(capture, "sink_mass"), total(capture, "content_sinks")
    if capture["model"]["n_sinks"] and defined(mass["mean"]):
        return f"{capture['name']}: {write_number(mass['mean'], 'share')} of attention rests on its {sink_name(capture)}"
    if sinks["mean"]:
        held = write_number(total(capture, "sink_heads")["mean"], "share")
        return f"{capture['name']}: {held} of heads and steps have a content sink"
    return f"{capture['name']}: no content sinks"


def _counted(told: Sequence[Claim]) -> str:
    words = {SHOWS: ("shows", "show"), FAILS: ("does not show", "do not show"), UNDECIDED: ("is undecided", "are undecided")}
    counts = {verdict: sum(one.verdict == verdict for one in told) for verdict in words}
    parts = [f"{n} {words[verdict][n > 1]}" for verdict, n in counts.items() if n]
    return f"all {parts[0]}" if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
