"""95 % intervals of means over trajectories: a bootstrap whose unit is the trajectory, never the token or the step.

The method is the percentile bootstrap with expanded tails (Hesterberg 2015, "What teachers should know about the bootstrap").
Means of resampled trajectories spread too little, by sqrt((n - 1) / n), and ignore that their spread is uncertain; so the tails
that are cut off shrink to those of Student's t. Bounds stay within the values seen (a share stays between 0 and 1), for any set of
values. Coverage in simulation, in per cent (20,000 samples each, of normal and of gamma values of shape 2):

    trajectories     32     16      8      6
    normal         94.9   95.1   94.2   93.2
    gamma          94.2   93.3   92.1   91.1

For differences without pairs, 32 against 32 with three times the spread: 94.9 and 94.6 (5,000 samples).
Fewer than six trajectories get no interval: their whole range covers less than 95 % (at best 1 - 2 ** (1 - n)).
"""

import functools
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from sinkdlm.likelihood.estimates import student_quantile
from sinkdlm.noise import Stream, random_bits

LEVEL = 0.95
MIN_TRAJECTORIES = 6
N_RESAMPLES, MIN_RESAMPLES = 10_000, 2_000  # fewer where there are thousands of trajectories
MAX_DRAWS = 1 << 23  # drawn trajectories in memory, of all resamples together


def finite(value: float) -> float | None:
    """None for NaN and infinity, which JSON cannot hold."""
    return float(value) if math.isfinite(value) else None


def mean_interval(values: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """The mean of one value for each trajectory, with its interval; NaN values are left out."""
    return _estimate([values], seed)


def difference_interval(values: np.ndarray, others: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """mean(others) - mean(values) with its interval, unpaired. For pairs, take the mean_interval of their differences."""
    return _estimate([others, values], seed)


def _estimate(samples: list[np.ndarray], seed: int) -> dict[str, Any]:
    """Mean and interval as JSON values; None where there is none.

    n: trajectories that have the value; for a difference, those of the smaller sample."""
    kept = [sample[~np.isnan(sample)].astype(np.float64) for sample in samples]
    found = zip(("mean", "low", "high"), map(finite, _bounds(kept, seed)), strict=True)
    return {**dict(found), "n": min(map(len, kept))}


def _bounds(samples: list[np.ndarray], seed: int) -> tuple[float, float, float]:
    """Mean, low, high of the first sample, minus the second if there is one."""
    if min(map(len, samples)) == 0:
        return math.nan, math.nan, math.nan
    count = max(MIN_RESAMPLES, min(N_RESAMPLES, MAX_DRAWS // max(map(len, samples))))
    mean, means = 0.0, np.zeros(count)
    enough = min(map(len, samples)) >= MIN_TRAJECTORIES
    for place, (sign, sample) in enumerate(zip((1.0, -1.0), samples, strict=False)):
        # Relative to the first value, so that equal values have exactly that mean and an interval of no width.
        start, apart = float(sample[0]), sample - sample[0]
        mean += sign * (start + float(apart.mean()))
        if enough:
            means += sign * (start + _resamples(seed, place, len(apart), count) @ apart)
    if not enough:
        return mean, math.nan, math.nan
    tail = _tail(samples)
    low, high = np.quantile(means, [tail, 1 - tail])
    return mean, float(low), float(high)


def _tail(samples: list[np.ndarray]) -> float:
    """The share of resampled means to cut off at each end; for two samples, with Welch's degrees of freedom."""
    sizes = [len(sample) for sample in samples]
    squares = [float(np.var(sample, ddof=1)) / n for sample, n in zip(samples, sizes, strict=True)]  # of the standard error
    if sum(squares) == 0:
        return (1 - LEVEL) / 2
    freedom = sum(squares) ** 2 / sum(square**2 / (n - 1) for square, n in zip(squares, sizes, strict=True))
    too_narrow = sum(square * (n - 1) / n for square, n in zip(squares, sizes, strict=True)) / sum(squares)
    reach = student_quantile((1 + LEVEL) / 2, math.floor(freedom + 1e-6)) / math.sqrt(too_narrow)
    return NormalDist().cdf(-reach)


@functools.lru_cache(maxsize=8)
def _resamples(seed: int, place: int, n: int, count: int) -> np.ndarray:
    """(count, n): how often each trajectory is drawn, as shares. The same for every quantity and layer."""
    draws = random_bits(32, seed, int(Stream.ANALYSIS), place, n, torch.arange(count * n)).numpy() % n
    rows = np.repeat(np.arange(count), n)
    return np.bincount(rows * n + draws, minlength=count * n).reshape(count, n) / n
