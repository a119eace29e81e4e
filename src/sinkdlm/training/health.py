"""What metrics.jsonl tells of a run's health: gradients far larger than the others, and layers that lose their sink.

Clipping hides a spike in the run itself. An adapted sink is a place that the parent's weights make: steps that are too large
destroy it within a few of them, and it does not come back (docs/log.md).
"""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SETTLED = 0.1  # of a run's steps, after which gradients are looked at: the first ones are large in every run
PEAK = 5.0  # times the median: a gradient norm that is one

RESTS = 0.1  # of a layer's attention: as much on its sink, and it rests there
LOST = 0.1  # of the most that a layer had on its sink: with less it has lost it
MANY, FEW = 0.25, 2  # of a model's layers, and layers at least: where more have lost their sink, the run is told to have
# Of the most that all layers had on it together: with more, some have left it while others came, as from scratch they do.
HELD = 0.75


def read_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What a run folder keeps of training, also of what came before an interruption. A line that somebody else cut is passed over:
    that is no reason for a run not to go on."""
    path, found = folder / "metrics.jsonl", []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and line.get("kind") == kind:
                found.append(line)
    return found


class Peaks(NamedTuple):
    """Of gradient norms once a run has settled. steps: those with a peak, from 1; largest: over the median, and its step."""

    median: float
    steps: list[int]
    largest: float
    at: int


def peaks_of(gradients: Sequence[float | None]) -> Peaks:
    """A step without a finite gradient counts as a peak, and for nothing else."""
    begin = int(len(gradients) * SETTLED)
    settled = {step: norm for step, norm in enumerate(gradients, start=1) if step > begin}
    known = {step: norm for step, norm in settled.items() if norm is not None}
    middle = median(known.values()) if known else math.nan
    at = max(known, key=lambda step: known[step], default=0)
    steps = [step for step, norm in settled.items() if norm is None or norm > PEAK * middle]
    return Peaks(middle, steps, known[at] / middle if middle > 0 else math.nan, at)


def read_peaks(folder: Path) -> dict[str, Any]:
    """count; the largest over the median and its step, where there is one. Of the steps that have a line (`log.every`)."""
    lines = read_lines(folder, "train")
    peaks = peaks_of([line["grad_norm"] for line in lines])
    found: dict[str, Any] = {"count": len(peaks.steps)}
    return found if math.isnan(peaks.largest) else found | {"largest": round(peaks.largest, 2), "at": lines[peaks.at - 1]["step"]}


class SinkLoss(NamedTuple):
    """Of the first look that found many layers without what they had on their sink."""

    step: int
    before: int  # the look before it
    layers: int
    of: int  # layers of the model

    @property
    def text(self) -> str:
        return (
            f"{self.layers} of {self.of} layers have lost the sink that they rested on, since step {self.before}. Too large steps "
            "do that, and it may not come back: a new run with a longer train.warmup or a smaller train.lr is the cure"
        )


class SinkHealth:
    """Told look after look. loss: stays as it was found first."""

    def __init__(self) -> None:
        self.loss: SinkLoss | None = None
        self._most: list[float] = []  # by layer
        self._most_of_all = 0.0  # at one look
        self._before = 0

    @classmethod
    def read(cls, folder: Path) -> "SinkHealth":
        """As the looks that a run folder has kept tell it."""
        found = cls()
        for line in read_lines(folder, "probe"):
            found.look(line["step"], [layer.get("sink_share") for layer in line["layers"]])
        return found

    def look(self, step: int, shares: Sequence[float | None]) -> SinkLoss | None:
        """shares: of attention on sinks, by layer. The loss, where this look is the one that finds it."""
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
    """For `train --json`; empty where nothing was lost."""
    loss = SinkHealth.read(folder).loss
    return {} if loss is None else {"step": loss.step, "layers": loss.layers, "of": loss.of}
