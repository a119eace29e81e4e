"""Measure sinks along denoising trajectories: where they are, how they move, their value norms.

`measure` reduces one trajectory to a few numbers; `summarize` joins many, with intervals over trajectories; `difference` compares
two captures. Quantities are per layer; a total is the mean over the layers that have it. NaN: nothing to measure, such as no
content sink or a single step. Knows no model, tokenizer or file.

N forwards ("steps"), E layers, H heads, T tokens of the row, S sinks of the model (0 without; a sink logit counts as one).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sinkdlm.analysis.glossary import QUANTITIES
from sinkdlm.analysis.intervals import difference_interval, finite, mean_interval
from sinkdlm.analysis.kinds import KINDS
from sinkdlm.noise import Stream, random_bits

SAMPLE = 10_000  # value norms of each group in a figure
_ANCHOR_STEPS = (1, 2)  # an anchored head has a sink in at least this share of steps,
_ANCHOR_SAME = (9, 10)  # and its top sink is the same token in at least this share of those
_REST_SPREAD = 0.01  # least difference between the quarters' attention on sinks for `noop` to be defined
GROUPS = ("sink", "normal", "lane")  # of value norms
_DIGITS = 6  # significant, of sampled norms in a file


@dataclass(frozen=True)
class Trajectory:
    """One row from masks to text, or one text under several noise levels: each forward is a step.

    Received attention of key j in a head is the mean of A[q, j] over the row's queries that see it. A content sink by the absolute
    rule (Gu et al.) receives more than a threshold; by the relative rule (Rulli et al.) its column sum, T times what it receives,
    exceeds the mean column sum of the other tokens by a margin. Statistics that a forward did not yield are NaN.
    """

    number: int  # index within the capture; with the seed, the key of its noise
    n_prompt: int  # fixed tokens that were given
    mask_id: int
    tokens: np.ndarray  # (N, T) int32: what each forward saw
    final: np.ndarray  # (T,) int32: the row at its end
    absolute: np.ndarray  # (N, E, H, T) bool: content sinks by the absolute rule
    relative: np.ndarray  # (N, E, H, T) bool: content sinks by the relative rule
    top: np.ndarray  # (N, E, H) int32: the content token that receives most
    top_received: np.ndarray  # (N, E, H): what it receives
    received: np.ndarray  # (N, E, T): received attention of content tokens, mean over heads
    sink_received: np.ndarray  # (N, E, H, S): received attention of the model's own sinks
    entropy: np.ndarray  # (N, E, H): of attention weights, nats, mean over queries
    value_norm: np.ndarray  # (N, E, T): eq. 15, 16
    sink_value_norm: np.ndarray  # (N, E, S)
    output_norm: np.ndarray  # (N, E, H): eq. 20, left: |o_i|, mean over queries
    bound: np.ndarray  # (N, E, H): eq. 20, right: sum_j a_ij |v_j|, mean over queries
    resting: (
        np.ndarray
    )  # (N, E, T): of each query, the share of attention on content sinks (absolute) and the model's, mean over heads
    update_ratio: np.ndarray  # (N, E, T): eq. 21, 22: |z_i| / |h_i|

    @property
    def n_steps(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_layers(self) -> int:
        return self.top.shape[1]

    @property
    def n_heads(self) -> int:
        return self.top.shape[2]


class Sample(NamedTuple):
    """At most SAMPLE of many values, those with the smallest keys in any order of arrival; sum and count of all."""

    keys: np.ndarray  # int64, ascending
    values: np.ndarray
    total: float
    n: int

    @classmethod
    def of(cls, keys: np.ndarray, values: np.ndarray) -> "Sample":
        return cls.merged([cls(keys, values, float(values.sum(dtype=np.float64)), values.size)])

    @classmethod
    def merged(cls, samples: Sequence["Sample"]) -> "Sample":
        keys, values, totals, counts = zip(*samples, strict=True)
        order = np.concatenate(keys).argsort(kind="stable")[:SAMPLE]
        total = math.fsum(totals)  # rounded once, so the order does not matter
        return cls(np.concatenate(keys)[order], np.concatenate(values)[order], total, sum(counts))

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else math.nan


@dataclass(frozen=True)
class Measured:
    """The numbers that are kept of one trajectory."""

    number: int
    n_steps: int
    length: int
    values: dict[str, tuple[float, list[float]]]  # quantity -> (total, per layer)
    counted: dict[str, np.ndarray]  # tokens of each kind, among "all", "absolute" and "relative" sinks
    norms: dict[str, Sample]  # value norms of "sink", "normal" and "lane"; empty once another one holds them
    lane: np.ndarray  # (E, H): attention on the model's own sinks
    content: np.ndarray  # (E, H): share of steps with a content sink (absolute)

    def hand_norms_to(self, other: "Measured") -> tuple["Measured", "Measured"]:
        """Move this one's samples to the other, so that many trajectories together hold one set of samples."""
        merged = {group: Sample.merged([sample, other.norms[group]]) for group, sample in self.norms.items()}
        return replace(self, norms={}), replace(other, norms=merged)


def measure(trajectory: Trajectory, kinds: np.ndarray, *, threshold: float = 0.3, seed: int = 0) -> Measured:
    """Reduce a trajectory. kinds: of every token id, from kinds.classify. threshold: that of the trajectory's absolute sinks."""
    layers, samples = [], []
    seen = kinds[trajectory.tokens].ravel()
    counted: dict[str, Any] = {"all": _count(seen), "absolute": 0, "relative": 0}
    content = np.empty((trajectory.n_layers, trajectory.n_heads))
    for layer in range(trajectory.n_layers):  # one at a time: all layers of a long trajectory would need gigabytes
        absolute, relative = (np.ascontiguousarray(sets[:, layer]) for sets in (trajectory.absolute, trajectory.relative))
        sinks = absolute.sum(1, dtype=np.int32)  # (N, T): heads whose sink it is
        counted["absolute"] += _count(seen, sinks)
        counted["relative"] += _count(seen, relative.sum(1, dtype=np.int32))
        held = np.asarray(absolute.any(-1))  # (N, H)
        content[layer] = held.mean(0)
        found = _sets(absolute, relative) | _moves(held, trajectory.top[:, layer]) | _norms(trajectory, layer, sinks > 0)
        layers.append(found | _flow(trajectory, layer, threshold))
        samples.append(_sampled(trajectory, layer, sinks > 0, seed))
    values = {name: [float(layer[name]) for layer in layers] for name in QUANTITIES}
    return Measured(
        number=trajectory.number,
        n_steps=trajectory.n_steps,
        length=trajectory.tokens.shape[1],
        values={name: (_mean(np.array(per_layer)), per_layer) for name, per_layer in values.items()},
        counted=counted,
        norms={group: Sample.merged([sample[group] for sample in samples]) for group in GROUPS},
        lane=trajectory.sink_received.sum(-1).astype(np.float64).mean(0),
        content=content,
    )


def _mean(values: np.ndarray, where: np.ndarray | bool = True) -> float:
    """The mean of what is not NaN; NaN where everything is."""
    known = ~np.isnan(values) & where
    n = np.count_nonzero(known)
    return float(values.sum(where=known, dtype=np.float64)) / n if n else math.nan


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _count(seen: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
    """Count tokens of each kind, each token `times` times; float64 counts exactly up to 2 ** 53."""
    weights = None if times is None else times.ravel()
    return np.bincount(seen, weights=weights, minlength=len(KINDS)).astype(np.int64)


def _sets(absolute: np.ndarray, relative: np.ndarray) -> dict[str, float]:
    """Sizes and changes of one layer's sets of content sinks, (N, H, T)."""
    sizes, shared = _overlaps(absolute)
    relative_sizes, relative_shared = _overlaps(relative)
    runs = sizes.sum() - shared.sum()  # a run starts where a member was not in the set before
    return {
        "content_sinks": sizes.mean(dtype=np.float64),
        "relative_sinks": relative_sizes.mean(dtype=np.float64),
        "sink_heads": np.count_nonzero(sizes) / sizes.size,
        "turnover": _turnover(sizes, shared),
        "turnover_null": _turnover_null(absolute, sizes),
        "relative_turnover": _turnover(relative_sizes, relative_shared),
        "relative_turnover_null": _turnover_null(relative, relative_sizes),
        "lifetime": _ratio(float(sizes.sum()), float(runs)),
    }


def _overlaps(sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (N, H), and the number of members that consecutive steps share (N - 1, H)."""
    return sets.sum(-1, dtype=np.int32), (sets[1:] & sets[:-1]).sum(-1, dtype=np.int32)


def _turnover(sizes: np.ndarray, shared: np.ndarray) -> float:
    union = sizes[1:] + sizes[:-1] - shared
    return _mean(1 - shared / np.maximum(union, 1), union > 0)


def _turnover_null(sets: np.ndarray, sizes: np.ndarray) -> float:
    """Turnover over all pairs of different steps, exactly: a matmul of a head's sets counts what each pair shares."""
    distance, pairs = 0.0, 0
    for head in range(sets.shape[1]):
        members = sets[:, head, sets[:, head].any(0)].astype(np.float32)  # (N, tokens that ever are sinks): counts are exact
        size = sizes[:, head].astype(np.float32)
        shared = members @ members.T
        union = size[:, None] + size - shared
        either = np.maximum(union, 1)
        # A step has distance 0 to itself, so only the count leaves it out.
        distance += float(np.divide(union - shared, either, dtype=np.float64).sum())
        pairs += int(np.count_nonzero(union) - np.count_nonzero(size))
    return _ratio(distance, pairs)


def _moves(held: np.ndarray, top: np.ndarray) -> dict[str, float]:
    """Moves of one layer's top sinks. held (N, H): the head has a content sink; top (N, H): the token that receives most."""
    distance = np.abs(np.diff(top.astype(np.int64), axis=0)).astype(np.float64)
    both, n_held = held[1:] & held[:-1], held.sum(0)
    same = np.array([np.bincount(top[held[:, head], head], minlength=1).max() for head in range(top.shape[1])])
    often = n_held * _ANCHOR_STEPS[1] >= len(top) * _ANCHOR_STEPS[0]
    anchored = often & (n_held > 0) & (same * _ANCHOR_SAME[1] >= n_held * _ANCHOR_SAME[0])
    return {
        "moved": _mean(distance, both),
        "move_rate": _mean((distance > 0).astype(np.float64), both),
        "anchored": float(anchored.mean()) if len(top) > 1 else math.nan,  # with one step every sink would count
    }


def _norms(trajectory: Trajectory, layer: int, sink: np.ndarray) -> dict[str, float]:
    """Value norms of one layer. sink (N, T): tokens that are a content sink of any head."""
    norms = trajectory.value_norm[:, layer]
    lane = _mean(trajectory.sink_value_norm[:, layer])
    content, normal = _mean(norms, sink), _mean(norms, ~sink)
    return {
        "sink_value_norm": lane,
        "content_sink_norm": content,
        "normal_norm": normal,
        "norm_ratio": _ratio(content, normal),
        "lane_norm_ratio": _ratio(lane, normal),
    }


def _flow(trajectory: Trajectory, layer: int, threshold: float) -> dict[str, float]:
    share = trajectory.sink_received[:, layer].sum(-1)
    resting, update = (part[:, layer].ravel().astype(np.float64) for part in (trajectory.resting, trajectory.update_ratio))
    return {
        "sink_mass": _mean(share),
        "lane_heads": _mean((share > threshold).astype(np.float64), ~np.isnan(share)),
        "entropy": _mean(trajectory.entropy[:, layer]),
        "bound_ratio": _ratio(_mean(trajectory.output_norm[:, layer]), _mean(trajectory.bound[:, layer])),
        "update_ratio": _mean(update),
        "noop": _noop(resting, update),
    }


def _noop(resting: np.ndarray, update: np.ndarray) -> float:
    """Mean update of the quarter of queries most on sinks, minus that of the least. Tied queries share their mean update."""
    known = ~np.isnan(resting) & ~np.isnan(update)
    n = np.count_nonzero(known)
    if n == 0:
        return math.nan
    order = np.argsort(resting[known])
    resting, update = resting[known][order], update[known][order]
    starts = np.flatnonzero(np.concatenate([[True], resting[1:] != resting[:-1]]))
    sizes = np.append(starts[1:], n) - starts
    update = np.repeat(np.add.reduceat(update, starts) / sizes, sizes)
    least = np.clip(n / 4 - np.arange(n), 0, 1) / (n / 4)  # weights of the quarter; its last query may count in part
    weight = least[::-1] - least
    return float(weight @ update) if weight @ resting >= _REST_SPREAD else math.nan


def _sampled(trajectory: Trajectory, layer: int, sink: np.ndarray, seed: int) -> dict[str, Sample]:
    """Samples of value norms. A value's key depends on layer, step and position alone; sinks count on from the tokens."""
    norms = np.concatenate([trajectory.value_norm[:, layer], trajectory.sink_value_norm[:, layer]], axis=-1)  # (N, T + S)
    steps, places = (torch.arange(n) for n in norms.shape)
    keys = random_bits(63, seed, int(Stream.ANALYSIS), trajectory.number, layer, steps[:, None], places).numpy()
    length, known = sink.shape[1], ~np.isnan(norms)
    groups = {"sink": sink, "normal": ~sink}
    chosen = {group: np.pad(tokens, ((0, 0), (0, norms.shape[1] - length))) & known for group, tokens in groups.items()}
    chosen["lane"] = known & (np.arange(norms.shape[1]) >= length)
    return {group: Sample.of(keys[of], norms[of]) for group, of in chosen.items()}


def summarize(measured: Iterable[Measured], seed: int = 0) -> dict[str, Any]:
    """Join trajectories into parts of a capture, as JSON values; the order of measuring does not matter."""
    ordered = sorted(measured, key=lambda one: one.number)
    tables = {name: np.array([[one.values[name][0], *one.values[name][1]] for one in ordered]) for name in QUANTITIES}
    counts = {"trajectories": len(ordered), "forwards": sum(one.n_steps for one in ordered)}
    rows = []
    for row, one in enumerate(ordered):
        values = {name: _by_layer(_plain(table[row])) for name, table in tables.items()}
        rows.append({"number": one.number, "n_steps": one.n_steps, "length": one.length, "values": values})
    return {
        "n": {**counts, "tokens_seen": sum(one.n_steps * one.length for one in ordered)},
        "quantities": {name: _by_layer([mean_interval(column, seed=seed) for column in table.T]) for name, table in tables.items()},
        "trajectories": rows,
        "kinds": _kind_shares([one.counted for one in ordered]),
        "scatter": _scatter([one.norms for one in ordered if one.norms]),
        "heads": {
            name: [_plain(row) for row in np.mean([getattr(one, name) for one in ordered], axis=0)] for name in ("lane", "content")
        },
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [finite(value) for value in values.tolist()]


def _by_layer(columns: list[Any]) -> dict[str, Any]:
    return {"total": columns[0], "layers": columns[1:]}


def _kind_shares(counted: Sequence[dict[str, np.ndarray]]) -> dict[str, dict[str, float] | None]:
    """Shares of kinds over all trajectories together; None for a rule that found no sink."""
    found = {}
    for among in counted[0]:
        total = np.sum([counts[among] for counts in counted], axis=0)
        found[among] = dict(zip(KINDS, (total / total.sum()).tolist(), strict=True)) if total.any() else None
    return found


def _scatter(norms: Sequence[dict[str, Sample]]) -> dict[str, Any]:
    merged = {group: Sample.merged([one[group] for one in norms]) for group in GROUPS}
    points = {group: [float(f"{value:.{_DIGITS}g}") for value in sample.values.tolist()] for group, sample in merged.items()}
    means = {f"{group}_mean": finite(sample.mean) for group, sample in merged.items()}
    return points | means | {f"n_{group}": sample.n for group, sample in merged.items()}


def difference(a: Mapping[str, Any], b: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """b minus a, for every quantity of both captures; per layer only where both have the same number of layers.

    "paired": both have the same trajectory numbers and prompts, so each trajectory is compared with its twin. Otherwise means
    are compared, and intervals are wider. n of pairs counts those where both have the value.
    """
    rows = [sorted(capture["trajectories"], key=lambda row: row["number"]) for capture in (a, b)]
    keys = [[(row["number"], row.get("prompt")) for row in side] for side in rows]
    paired = keys[0] == keys[1]
    found: dict[str, Any] = {}
    for name in a["quantities"]:
        if name in b["quantities"]:
            values = [[row["values"][name] for row in side] for side in rows]
            tables = [np.array([[one["total"], *one["layers"]] for one in side], dtype=np.float64) for side in values]
            width = tables[0].shape[1] if tables[0].shape[1] == tables[1].shape[1] else 1
            pairs = zip(tables[0].T[:width], tables[1].T[:width], strict=True)
            gaps = [
                mean_interval(other - one, seed=seed) if paired else difference_interval(one, other, seed=seed)
                for one, other in pairs
            ]
            found[name] = _by_layer(gaps)
    return {"paired": paired, "quantities": found}


def paths_of(trajectory: Trajectory, labels: Sequence[str]) -> dict[str, Any]:
    """The most attended token of each layer at each step, as JSON values; null where a forward did not say."""
    received = trajectory.received.swapaxes(0, 1)  # (E, N, T)
    top = np.where(np.isnan(received), -np.inf, received).argmax(-1)
    highest = np.take_along_axis(received, top[..., None], -1)[..., 0]
    return {
        "number": trajectory.number,
        "top": np.where(np.isnan(highest), np.array(None), top).tolist(),
        "received": [_plain(row) for row in highest],
        "masked": (trajectory.tokens == trajectory.mask_id).astype(int).tolist(),
        "labels": list(labels),
        "n_prompt": trajectory.n_prompt,
    }
