"""Adaptive draws: stop once it is clear which option of a question is best.

Owns the stopping rule. A question is looked at after a growing number of draw sets; it is settled once the leader beats every other
option under every metric, by a paired t test over sets: options share their noise, so set i of one pairs with set i of another.
Knows no tokens and no denoiser.

A wrong winner must have beaten the best option at some look under some metric. There are (options - 1) wrong winners; so each test
is made at error / (looks x metrics x (options - 1)), and the chance that a question is settled wrongly is at most `error` in all.

Close options are never settled: two full runs, too, would often disagree on them. With a `tolerance`, a question also ends once
drawing to the last set would raise the chance of agreeing with another full run by no more than that.

O options of a question, n draw sets so far, M metrics.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkdlm.errors import LikelihoodError
from sinkdlm.likelihood.estimates import MIN_SETS, student_quantile

_GROWTH = math.sqrt(2)  # from one look to the next
_FUTURES = 4096  # simulated continuations of a question


@dataclass(frozen=True)
class Adaptive:
    """metrics: name -> what divides each row's value before options are compared: ones for acc, lengths for acc_norm.

    error: highest chance that a question is settled on an option that is not the best under one of the metrics. Where a question
    stops depends on its values, so use these only to rank options; for the values themselves, draw in full.

    tolerance: how much of a question's expected agreement with another full run may be given up to end it early; 0: nothing.
    """

    metrics: Mapping[str, Sequence[float]]
    error: float = 0.05
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.metrics:
            raise LikelihoodError("adaptive: needs a metric to rank by, as in metrics={'acc': [1.0, ...]}")
        if not 0 < self.error < 1:
            raise LikelihoodError(f"adaptive: error = {self.error}: allowed is above 0 and below 1")
        if not 0 <= self.tolerance < 1:
            raise LikelihoodError(f"adaptive: tolerance = {self.tolerance}: allowed is 0 or more, and below 1")
        for name, values in self.metrics.items():
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise LikelihoodError(f"adaptive: metric {name!r}: divisors must be above 0")

    def check(self, n_rows: int) -> None:
        for name, values in self.metrics.items():
            if len(values) != n_rows:
                raise LikelihoodError(f"adaptive: metric {name!r}: {len(values)} divisors for {n_rows} rows; give one per row")

    def divisors(self, rows: Sequence[int]) -> Tensor:
        """(M, O) for the rows of one question."""
        return torch.tensor([[values[row] for row in rows] for values in self.metrics.values()], dtype=torch.float64)


def plan_looks(sets: int) -> list[int]:
    """Numbers of sets after which a question is looked at; the last is all of them."""
    looks = [MIN_SETS]
    while looks[-1] < sets:
        looks.append(min(sets, math.ceil(looks[-1] * _GROWTH)))
    return looks


def is_settled(set_means: Tensor, divisors: Tensor, error: float, n_looks: int, certain: Tensor) -> bool:
    """Whether one option (O, n) beats the others under every metric (M, O), at one of n_looks looks.

    certain (O,): options whose sets cannot vary. For others a spread of 0 is chance and proves nothing.
    """
    n_options, n = set_means.shape
    if n_options == 1:
        return True
    level = 1 - error / (max(1, n_looks) * len(divisors) * (n_options - 1))
    bar = student_quantile(level, n - 1)
    scaled = set_means / divisors[..., None]  # (M, O, n)
    leaders = scaled.mean(-1).argmax(1)  # (M,)
    lead = scaled[torch.arange(len(divisors)), leaders][:, None] - scaled
    spread = lead.std(-1) / math.sqrt(n)
    beaten = (spread > 0) & (lead.mean(-1) > bar * spread)
    known = (certain & certain[leaders, None]) | (lead.mean(-1) == math.inf)  # one draw of -inf proves an option impossible
    return bool((beaten | known).scatter(1, leaders[:, None], True).all())


def expected_loss(set_means: Tensor, divisors: Tensor, sets: int) -> float:
    """How much drawing on to `sets` would raise the chance that a question's winners agree with those of another full run.

    set_means (O, n) are modelled as normal with their observed covariance, as uncertain as n sets leave it. Each of many futures
    has true values, the means of another full run, and the means of this one with the sets that are left.
    """
    n = set_means.shape[1]
    possible = set_means.isfinite().all(1)  # an option with a draw of -inf wins in no future
    values, divisors = set_means[possible], divisors[:, possible]
    if len(values) < 2 or n >= sets:
        return 0.0
    mean = values.mean(1)
    noise, squares = _futures(sets)
    wider = ((n - 1) / squares[:, : n - 1].sum(1)).sqrt()[:, None]  # the spread itself is an estimate
    mixed = noise[..., :n] @ (values - mean[:, None]).mT / math.sqrt(n - 1)  # (3, futures, O)
    own, other, rest = mixed * wider
    true = mean + own / math.sqrt(n)
    elsewhere = true + other / math.sqrt(sets)
    at_end = mean * (n / sets) + (true + rest / math.sqrt(sets - n)) * (1 - n / sets)
    stays = ends = torch.ones(_FUTURES, dtype=torch.bool)
    for divisor in divisors:
        winner = (elsewhere / divisor).argmax(1)
        stays = stays & (winner == (mean / divisor).argmax())
        ends = ends & (winner == (at_end / divisor).argmax(1))
    return float(ends.double().mean() - stays.double().mean())


@functools.cache
def _futures(sets: int) -> tuple[Tensor, Tensor]:
    """Noise of the futures, the same for every question: none depends on which others are asked."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, _FUTURES, sets, generator=generator, dtype=torch.float64)
    return noise[:3], noise[3].square()
