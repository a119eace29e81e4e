"""Differences between variants and their uncertainty: paired over items, then over seeds.

Within a seed, variants are scored on the same items with the same noise, so each item has one difference. Seeds change data order,
noise and new parameters together; the seeds' differences are taken as a normal sample, with Student's intervals and tests.
Knows no run, file or claim.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from sinkdlm.likelihood.estimates import student_cdf, student_quantile

LEVEL = 0.95
ALPHA = 1 - LEVEL
MIN_SEEDS = 3  # with two, Student's interval is 12.7 standard errors wide on each side
_ROUNDING = 1e-12  # a standard error below this share of the mean is rounding


class Paired(NamedTuple):
    """One seed's difference of two variants per unit (a token, an item), and its standard error over items."""

    difference: float
    stderr: float
    items: int


class Spread(NamedTuple):
    """Over seeds: mean, Student's interval, standard error, and p of the two-sided test against 0.

    NaN for a single seed, which cannot show how seeds vary; p is also NaN for equal values that are not 0.
    """

    mean: float
    low: float
    high: float
    stderr: float
    n: int
    p: float

    @property
    def known(self) -> bool:
        return self.n >= MIN_SEEDS

    def within(self, margin: float) -> bool:
        """Two one-sided tests at ALPHA, where this is an interval of 1 - 2 ALPHA: both reject where it lies inside the margin."""
        return self.known and -margin <= self.low and self.high <= margin


def pair_items(one: np.ndarray, other: np.ndarray, units: float) -> Paired:
    """other - one of the same items, summed and divided by `units`: the tokens, or the items, that the values are sums over."""
    if one.shape != other.shape or one.ndim != 1 or not len(one):
        raise ValueError(f"{one.shape} and {other.shape}: pairs need the same items")
    gaps = other.astype(np.float64) - one.astype(np.float64)
    n = len(gaps)
    stderr = float(gaps.std(ddof=1)) * math.sqrt(n) / units if n > 1 else math.nan
    return Paired(float(gaps.sum()) / units, stderr, n)


def over_seeds(values: Sequence[float], level: float = LEVEL) -> Spread:
    """The spread of one value for each seed. Equal values have an interval without width."""
    n, unknown = len(values), math.nan
    if n < 2:
        return Spread(values[0] if n else unknown, unknown, unknown, unknown, n, unknown)
    mean, stderr = fmean(values), stdev(values) / math.sqrt(n)
    reach = student_quantile((1 + level) / 2, n - 1) * stderr
    p = 1.0 if mean == 0 else unknown  # equal values: counts of right answers may differ by the same in every seed, by chance
    if stderr > _ROUNDING * abs(mean):
        p = 2 * (1 - student_cdf(abs(mean) / stderr, n - 1))
    return Spread(mean, mean - reach, mean + reach, stderr, n, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p of each test; a NaN takes no part and stays NaN."""
    p = np.array(p_values, dtype=np.float64)
    order = np.argsort(p)  # NaN last
    times = np.isfinite(p).sum() - np.arange(len(p))
    p[order] = np.minimum(1, np.maximum.accumulate(p[order] * times))
    return p.tolist()
