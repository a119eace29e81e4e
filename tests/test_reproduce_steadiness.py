"""Gradients that jump: what counts as a peak, and how looks at a sink are summed up."""

import pytest

from sinkdlm.reproduce.statistics import peaks_of
from sinkdlm.reproduce.steadiness import steadiness_blocks, thirds_of


def test_peaks_are_beyond_five_medians_once_a_run_has_settled():
    gradients = [40.0, 30.0, *[1.0] * 14, 5.5, None, 4.9, 12.0]  # the first two steps of twenty are not looked at
    peaks = peaks_of(gradients)
    assert (peaks.median, peaks.steps, peaks.largest, peaks.at) == (1.0, [17, 18, 20], 12.0, 20)


def test_a_run_of_one_step_has_a_median():
    assert peaks_of([3.0]) == (3.0, [], 1.0, 1)


def test_layers_are_summed_up_by_thirds():
    assert thirds_of([1.0, 3.0, 4.0, 4.0, 4.0, 8.0]) == pytest.approx((2.0, 5.0))
    assert thirds_of([None, None, None]) is None


def test_nothing_is_said_where_nothing_was_measured():
    assert steadiness_blocks(None, {}, [], level=3) == []
