import math

import numpy as np
import pytest

from sinkdlm.analysis import intervals
from sinkdlm.analysis.intervals import MAX_DRAWS, MIN_RESAMPLES, N_RESAMPLES, _resamples, difference_interval, mean_interval

NAN = math.nan
DRAWS = {"normal": lambda rng, shape: rng.standard_normal(shape), "skewed": lambda rng, shape: rng.gamma(2, 1, shape) - 2}


@pytest.fixture
def fewer_resamples(monkeypatch):
    """So many that a bound hangs on the values far more than on them."""
    monkeypatch.setattr(intervals, "N_RESAMPLES", MIN_RESAMPLES)


def coverage(intervals):
    return np.mean([found["low"] <= 0 <= found["high"] for found in intervals])


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(
    ("draw", "n", "least"), [("normal", 32, 0.93), ("skewed", 32, 0.93), ("normal", 8, 0.93), ("skewed", 8, 0.92)]
)
def test_intervals_cover_the_truth(draw, n, least):
    """With eight skewed values the method falls short of 95 %, as its docstring says; plain percentiles fall shorter."""
    values = DRAWS[draw](np.random.default_rng(n), (2000, n))
    assert least <= coverage([mean_interval(row) for row in values]) <= 0.97


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("draw", DRAWS)
def test_intervals_of_differences_cover_the_truth(draw):
    """Of captures without pairs, one with three times the spread of the other."""
    rng = np.random.default_rng(0)
    values, others = DRAWS[draw](rng, (1000, 32)), 3 * DRAWS[draw](rng, (1000, 24))
    found = [difference_interval(one, other) for one, other in zip(values, others, strict=True)]
    assert 0.925 <= coverage(found) <= 0.97


def test_few_trajectories_have_a_mean_but_no_interval():
    five, six = np.arange(5.0), np.arange(6.0)
    assert mean_interval(five) == {"mean": 2, "low": None, "high": None, "n": 5}
    assert mean_interval(np.array([NAN, 4.0])) == {"mean": 4, "low": None, "high": None, "n": 1}
    assert mean_interval(np.array([NAN])) == {"mean": None, "low": None, "high": None, "n": 0}
    assert difference_interval(five, six)["low"] is None
    found = mean_interval(np.append(six, NAN))
    assert 0 <= found["low"] < 2.5 == found["mean"] < found["high"] <= 5
    assert found["n"] == 6


def test_equal_values_have_no_width_and_shares_stay_shares():
    for value in (0.1, 0.7, 1 / 3):
        assert mean_interval(np.full(7, value)) == {"mean": value, "low": value, "high": value, "n": 7}
    rare = np.zeros(32)
    rare[5] = 1
    found = mean_interval(rare)
    assert found["low"] == 0 < found["mean"] < found["high"] <= 1


def test_intervals_depend_on_the_seed_alone():
    values = np.random.default_rng(0).random(20)
    assert mean_interval(values) == mean_interval(values.copy())
    assert mean_interval(values, seed=1) != mean_interval(values)
    assert mean_interval(values, seed=1) == pytest.approx(mean_interval(values), rel=0.02)
    alone, apart = mean_interval(values), difference_interval(values, values)
    assert (apart["high"] - apart["low"]) / (alone["high"] - alone["low"]) == pytest.approx(math.sqrt(2), rel=0.05)
    mirrored = mean_interval(-values)
    plain = mean_interval(values)
    assert (-mirrored["high"], -mirrored["low"]) == pytest.approx((plain["low"], plain["high"]))


def test_thousands_of_trajectories_take_bounded_memory(monkeypatch):
    values = np.random.default_rng(0).gamma(2, 1, 4000)
    asked = []
    monkeypatch.setattr(intervals, "_resamples", lambda *given: asked.append(given[2:]) or _resamples(*given))
    for n in (6, 32, 800, 1000, 4000):
        found = mean_interval(values[:n])
    half = 1.96 * values.std(ddof=1) / math.sqrt(4000)
    assert (found["low"], found["high"]) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)
    assert all(n * count <= MAX_DRAWS for n, count in asked)
    assert (800, N_RESAMPLES) in asked
    apart = difference_interval(values[:32], values)  # as many resamples of both
    assert apart["low"] < apart["mean"] < apart["high"]
