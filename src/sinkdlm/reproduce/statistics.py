"""What a difference is, how sure it is, and when two variants are the same: paired over items, then over seeds.

Within a seed, variants are scored on the same items under the same noise, so that the difference of an item is one number. Over
seeds, which change data order, noise and new parameters together, the differences of seeds are taken as a normal sample: intervals
and tests are Student's. Numbers alone: knows no run, file or claim.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sinkdlm.likelihood.estimates import student_cdf, student_quantile

LEVEL = 0.95
ALPHA = 1 - LEVEL
MIN_SEEDS = 3  # with two, Student's interval is 12.7 standard errors wide on each side
_ROUNDING = 1e-12  # of a mean: a standard error below it is that of arithmetic


class Paired(NamedTuple):
    """Of one seed: the difference of two variants per unit (a token, an item), and its standard error over items."""

    difference: float
    stderr: float
    n: int


class Spread(NamedTuple):
    """Of seeds: their mean, Student's interval of LEVEL, the standard error, and the p of the two-sided test against 0.

    Not a number where a single seed says nothing of how seeds scatter; p also where equal values, which are not 0, do not.
    """

    mean: float
    low: float
    high: float
    stderr: float
    n: int
    p: float

    @property
    def known(self) -> bool:
        return self.n >= MIN_SEEDS and math.isfinite(self.low)


def pair_items(one: np.ndarray, other: np.ndarray, units: float) -> Paired:
    """other - one of the same items, summed and divided by `units`: the tokens, or the items, that the values are sums over."""
    if one.shape != other.shape or one.ndim != 1 or not len(one):
        raise ValueError(f"{one.shape} and {other.shape}: pairs need the same items")
    gaps = other.astype(np.float64) - one.astype(np.float64)
    n = len(gaps)
    stderr = float(gaps.std(ddof=1)) * math.sqrt(n) / units if n > 1 else math.nan
    return Paired(float(gaps.sum()) / units, stderr, n)


def over_seeds(values: Sequence[float], level: float = LEVEL) -> Spread:
    """Of one value for each seed. Equal values have an interval without width."""
    n = len(values)
    if n == 0:
        return Spread(math.nan, math.nan, math.nan, math.nan, 0, math.nan)
    mean = math.fsum(values) / n
    if n == 1:
        return Spread(mean, math.nan, math.nan, math.nan, 1, math.nan)
    stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    reach = student_quantile((1 + level) / 2, n - 1) * stderr
    return Spread(mean, mean - reach, mean + reach, stderr, n, _p(mean, stderr, n - 1))


def _p(mean: float, stderr: float, freedom: int) -> float:
    if stderr <= _ROUNDING * abs(mean):  # counts of right answers may differ by the same in every seed, by chance
        return 1.0 if mean == 0 else math.nan
    return 2 * (1 - student_cdf(abs(mean) / stderr, freedom))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each test; one without a p takes no part and stays without."""
    known = sorted((p, name) for name, p in p_values.items() if math.isfinite(p))
    found = dict.fromkeys(p_values, math.nan)
    largest = 0.0
    for rank, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        found[name] = largest
    return found


class Equivalence(NamedTuple):
    """Two one-sided tests against a margin: the larger p, and the interval of 1 - 2 ALPHA that they amount to."""

    p: float
    low: float
    high: float
    margin: float

    @property
    def shown(self) -> bool:
        return self.p <= ALPHA


def equivalence(values: Sequence[float], margin: float) -> Equivalence:
    spread = over_seeds(values, level=1 - 2 * ALPHA)
    if not spread.known:
        return Equivalence(math.nan, spread.low, spread.high, margin)
    if spread.stderr == 0:
        return Equivalence(0.0 if abs(spread.mean) < margin else 1.0, spread.low, spread.high, margin)
    nearest = (margin - abs(spread.mean)) / spread.stderr
    return Equivalence(1 - student_cdf(nearest, spread.n - 1), spread.low, spread.high, margin)
