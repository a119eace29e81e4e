"""Steps whose gradient is far larger than a run's others: seen in metrics.jsonl after the run, where clipping hides them in it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SETTLED = 0.1  # of a run's steps, after which gradients are looked at: the first ones are large in every run
PEAK = 5.0  # times the median: a gradient norm that is one


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


def read_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What a run folder keeps of training, also of what came before an interruption. A line that somebody else cut is passed over:
    that is no reason for a run not to go on."""
    path = folder / "metrics.jsonl"
    found = map(_read_line, path.read_text(errors="replace").splitlines() if path.exists() else ())
    return [line for line in found if line.get("kind") == kind]


def _read_line(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_peaks(folder: Path) -> dict[str, Any]:
    """count; the largest over the median and its step, where there is one. Of the steps that have a line (`log.every`)."""
    lines = read_lines(folder, "train")
    peaks = peaks_of([line["grad_norm"] for line in lines])
    found: dict[str, Any] = {"count": len(peaks.steps)}
    return found if math.isnan(peaks.largest) else found | {"largest": round(peaks.largest, 2), "at": lines[peaks.at - 1]["step"]}
