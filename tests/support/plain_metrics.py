"""The quantities of the analysis by their definitions: sets, loops and fractions, one number at a time."""

import itertools
import math
from fractions import Fraction


def mean(values):
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def divided(above, below):
    return above / below if below else math.nan


def jaccard(pairs):
    distances = [1 - Fraction(len(one & other), len(one | other)) for one, other in pairs if one | other]
    return mean(distances) if distances else math.nan


def turnovers(steps_of_heads):
    """(consecutive, all pairs): steps_of_heads holds a list of sets for each head."""
    consecutive = [pair for steps in steps_of_heads for pair in itertools.pairwise(steps)]
    every = [pair for steps in steps_of_heads for pair in itertools.combinations(steps, 2)]
    return jaccard(consecutive), jaccard(every)


def run_lengths(steps):
    """List the lengths of each token's runs in one head."""
    lengths = []
    for token in set().union(*steps):
        inside = "".join("x" if token in step else " " for step in steps)
        lengths += [len(run) for run in inside.split()]
    return lengths


def is_anchored(steps, tops):
    held = [top for step, top in zip(steps, tops, strict=True) if step]
    if Fraction(len(held), len(steps)) < Fraction(1, 2):
        return 0
    return int(Fraction(max(held.count(token) for token in held), len(held)) >= Fraction(9, 10))


def quarter(pairs, largest):
    """(mean resting, mean update) of a quarter of (resting, update) pairs; ties share the rest of the quarter equally."""
    left = whole = Fraction(len(pairs), 4)
    rest = change = 0.0
    for value in sorted({resting for resting, _ in pairs}, reverse=largest):
        group = [update for resting, update in pairs if resting == value]
        taken = min(left, Fraction(len(group)))
        rest += float(taken) * value
        change += float(taken) * mean(group)
        left -= taken
    return rest / float(whole), change / float(whole)


def noop(pairs):
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if not pairs:
        return math.nan
    (most_rest, most), (least_rest, least) = quarter(pairs, True), quarter(pairs, False)
    return most - least if most_rest - least_rest >= 0.01 else math.nan


def layer_values(t, layer, threshold=0.3):
    steps, heads, length = range(t.n_steps), range(t.n_heads), t.tokens.shape[1]
    sets = {
        rule: [[{j for j in range(length) if found[n, layer, h, j]} for n in steps] for h in heads]
        for rule, found in (("absolute", t.absolute), ("relative", t.relative))
    }
    absolute = sets["absolute"]
    tops = [[int(t.top[n, layer, h]) for n in steps] for h in heads]
    moves = [abs(tops[h][n + 1] - tops[h][n]) for h in heads for n in list(steps)[:-1] if absolute[h][n] and absolute[h][n + 1]]
    any_head = [set().union(*(absolute[h][n] for h in heads)) for n in steps]
    places = [(n, j) for n in steps for j in range(length)]
    sink = mean([t.value_norm[n, layer, j] for n, j in places if j in any_head[n]])
    normal = mean([t.value_norm[n, layer, j] for n, j in places if j not in any_head[n]])
    lane = mean(t.sink_value_norm[:, layer].ravel().tolist())
    shares = [sum(map(float, t.sink_received[n, layer, h])) for n in steps for h in heads]
    turnover, turnover_null = turnovers(absolute)
    relative_turnover, relative_turnover_null = turnovers(sets["relative"])
    updates = [float(t.update_ratio[n, layer, j]) for n, j in places]
    return {
        "sink_mass": mean(shares),
        "content_sinks": mean([len(step) for head in absolute for step in head]),
        "relative_sinks": mean([len(step) for head in sets["relative"] for step in head]),
        "sink_heads": mean([bool(step) for head in absolute for step in head]),
        "turnover": turnover,
        "turnover_null": turnover_null,
        "relative_turnover": relative_turnover,
        "relative_turnover_null": relative_turnover_null,
        "moved": mean(moves),
        "move_rate": mean([move > 0 for move in moves]),
        "lifetime": mean([length for head in absolute for length in run_lengths(head)]),
        "anchored": mean([is_anchored(absolute[h], tops[h]) for h in heads]) if t.n_steps > 1 else math.nan,
        "lane_heads": mean([share > threshold for share in shares if not math.isnan(share)]),
        "sink_value_norm": lane,
        "content_sink_norm": sink,
        "normal_norm": normal,
        "norm_ratio": divided(sink, normal),
        "lane_norm_ratio": divided(lane, normal),
        "entropy": mean(t.entropy[:, layer].ravel().tolist()),
        "bound_ratio": divided(mean(t.output_norm[:, layer].ravel().tolist()), mean(t.bound[:, layer].ravel().tolist())),
        "update_ratio": mean(updates),
        "noop": noop([(float(t.resting[n, layer, j]), update) for (n, j), update in zip(places, updates, strict=True)]),
    }


def values(t, threshold=0.3):
    """{quantity: (total, per layer)}"""
    layers = [layer_values(t, layer, threshold) for layer in range(t.n_layers)]
    return {name: (mean([layer[name] for layer in layers]), [layer[name] for layer in layers]) for name in layers[0]}
