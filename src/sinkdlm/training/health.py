"""Read a run's health from metrics.jsonl: gradient spikes, a model that uses no context, layers that lose their sink.

Clipping hides a spike in the run itself. An adapted sink comes from the parent's weights: a few steps that are too large destroy
it, and it does not come back (docs/findings.md).
"""

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, NamedTuple

SETTLED = 0.1  # share of a run's steps that is not checked: the first gradients are large in every run
PEAK = 5.0  # a gradient norm above this many medians is a spike

RESTS = 0.1  # share of its attention from which a layer rests on its sink
LOST = 0.1  # fraction of its highest share below which a layer has lost its sink
MANY, FEW = 0.25, 2  # share and number of layers: the run lost its sink if more layers than both lost theirs
# Fraction of the highest total over layers; above it, layers that left the sink were replaced by others, as from scratch.
HELD = 0.75

# A healthy run is at unigram level early on, so it is judged from this share of its steps on, or these tokens if they come first.
JUDGED, JUDGED_TOKENS = 0.4, 500e6
LEAST_TOKENS = 200_000  # fewer say nothing
FLAT = 0.05  # of the unigram entropy: a smaller gain from context is none
_LOOKS = 20  # judgements in a whole run
_LATEST = 1 / 3  # share of the steps so far that is judged
_MOST_LINES, _LEAST_LINES = 2000, 8  # of metrics, in a judgement and for a masked share


def read_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the lines of one kind from metrics.jsonl, also those before an interruption. Damaged lines are skipped: they must not
    stop a run."""
    path, found = folder / "metrics.jsonl", []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        if f'"{kind}"' not in text:  # most lines are of another kind, and reading JSON takes time
            continue
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("kind") == kind:
                found.append(line)
    return found


class Peaks(NamedTuple):
    """Gradient spikes once a run has settled. steps: those with a spike, from 1; largest: over the median; at: its step."""

    median: float
    steps: list[int]
    largest: float
    at: int


def peaks_of(gradients: Sequence[float | None]) -> Peaks:
    """Find gradient spikes. A gradient that is not finite counts as a spike, but not in the median."""
    begin = int(len(gradients) * SETTLED)
    settled = {step: norm for step, norm in enumerate(gradients, start=1) if step > begin}
    known = {step: norm for step, norm in settled.items() if norm is not None}
    middle = median(known.values()) if known else math.nan
    at = max(known, key=lambda step: known[step], default=0)
    steps = [step for step, norm in settled.items() if norm is None or norm > PEAK * middle]
    return Peaks(middle, steps, known[at] / middle if middle > 0 else math.nan, at)


def read_peaks(folder: Path) -> dict[str, Any]:
    """Return count, and largest (over the median) and at (its step) where known. Covers logged steps only (`log.every`)."""
    lines = read_lines(folder, "train")
    peaks = peaks_of([line["grad_norm"] for line in lines])
    found: dict[str, Any] = {"count": len(peaks.steps)}
    return found if math.isnan(peaks.largest) else found | {"largest": round(peaks.largest, 2), "at": lines[peaks.at - 1]["step"]}


class Stuck(NamedTuple):
    """A run whose loss does not fall with the masked share, nor below the unigram entropy (nats a token)."""

    step: int
    few: float  # mean loss of rows with the fewest masked tokens
    many: float  # with the most
    unigram: float

    @property
    def text(self) -> str:
        return (
            f"the model uses no context: loss {self.few:.2f} with few tokens masked, {self.many:.2f} with most, "
            f"unigram entropy {self.unigram:.2f}; try a higher train.lr (a lower one if the loss jumps) or more steps, "
            "then shorter rows (data.length), a smaller vocabulary, or texts in their own order"
        )


class ContextUse:
    """Judges from the losses by masked share whether a run uses context. found: the first judgement that it does not.

    Without context a token's loss is the unigram entropy or more, however few of its neighbours are masked."""

    def __init__(self, steps: int, tokens: int, unigram: Callable[[], float]) -> None:
        """steps: of the run; tokens: of a step; unigram(): the entropy of its tokens, asked for once."""
        self.found: Stuck | None = None
        self._first = max(LEAST_TOKENS / tokens, min(JUDGED * steps, JUDGED_TOKENS / tokens))
        self._every, self._steps, self.unigram = max(1, steps // _LOOKS), steps, cache(unigram)
        self._lines: deque[tuple[int, Sequence[float | None]]] = deque(maxlen=_MOST_LINES)

    def look(self, step: int, nll_by_ratio: Sequence[float | None]) -> Stuck | None:
        """Take one line's losses by masked share, the fewest masked first. Returns the judgement if it is the first of its kind."""
        if self.found is not None:
            return None
        self._lines.append((step, nll_by_ratio))
        if step < self._first or (step % self._every and step < self._steps):
            return None
        self.found = self._judge(step)
        return self.found

    def _judge(self, step: int) -> Stuck | None:
        latest = [losses for at, losses in self._lines if at > step * (1 - _LATEST)]
        shares = [[loss for loss in column if loss is not None] for column in zip(*latest, strict=True)]
        shares = [losses for losses in shares if len(losses) >= _LEAST_LINES]
        if len(shares) < 2:
            return None
        few, many = fmean(shares[0]), fmean(shares[-1])
        error = math.sqrt(sum(variance(losses) / len(losses) for losses in (shares[0], shares[-1])))
        entropy = self.unigram()
        least = FLAT * entropy
        if many - few + 2 * error > least or few < entropy - least:
            return None
        return Stuck(step, few, many, entropy)


def unigram_entropy(tokens: Any) -> float:
    """Entropy in nats of a sample of tokens, corrected for its size (Miller and Madow)."""
    counts = tokens.unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum() + (len(counts) - 1) / (2 * counts.sum()))


def read_stuck(folder: Path) -> dict[str, Any]:
    """The judgement that the model uses no context, for `train --json`; empty where there was none."""
    return next(({name: line[name] for name in Stuck._fields} for line in read_lines(folder, "stuck")), {})


class SinkLoss(NamedTuple):
    """The first probe that found many layers without their sink."""

    step: int
    before: int  # step of the probe before it
    layers: int
    of: int  # layers of the model

    @property
    def text(self) -> str:
        return (
            f"{self.layers} of {self.of} layers have lost their sink since step {self.before}: steps that are too large do that, "
            "and it may not come back; start a new run with half the train.lr, or with train.warmup = 0.2"
        )


class SinkHealth:
    """Follows attention on sinks from probe to probe. loss: the first one found."""

    def __init__(self) -> None:
        self.loss: SinkLoss | None = None
        self._most: list[float] = []  # highest share, by layer
        self._most_of_all = 0.0  # highest sum over layers
        self._before = 0

    @classmethod
    def read(cls, folder: Path) -> "SinkHealth":
        """Rebuild the state from the probes that a run folder has kept."""
        found = cls()
        for line in read_lines(folder, "probe"):
            found.look(line["step"], [layer.get("sink_share") for layer in line["layers"]])
        return found

    def look(self, step: int, shares: Sequence[float | None]) -> SinkLoss | None:
        """Take one probe's shares of attention on sinks, by layer. Returns the loss if this probe is the first to find it."""
        known = [share for share in shares if share is not None]
        self._most = [max(pair) for pair in zip(self._most or known, known, strict=True)]
        self._most_of_all = max(self._most_of_all, sum(known))
        lost = sum(now < LOST * most for now, most in zip(known, self._most, strict=True) if most >= RESTS)
        before, self._before = self._before, step
        if self.loss is not None or lost <= max(FEW, MANY * len(known)) or sum(known) > HELD * self._most_of_all:
            return None
        self.loss = SinkLoss(step, before, lost, len(known))
        return self.loss


def read_sink_loss(folder: Path) -> dict[str, Any]:
    """The sink loss for `train --json`; empty where nothing was lost."""
    loss = SinkHealth.read(folder).loss
    return {} if loss is None else {"step": loss.step, "layers": loss.layers, "of": loss.of}
