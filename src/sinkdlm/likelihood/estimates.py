"""Estimates: a mean, its standard error, the draws it took, and whether it is a bound, a likelihood or a score.

Owns the statistics of independent draw sets: their mean is the estimate, their spread its standard error. Intervals use Student's
t, because the spread of few sets is itself uncertain. Knows no tokens and no denoiser.

N rows, S draw sets.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_SETS = 8  # with fewer, the standard error itself is too uncertain
_HALVINGS = 80


@dataclass(frozen=True)
class Estimates:
    """One number for each of N rows, in nats, float64 on the host.

    kind: "bound" (a lower bound on log p of the target, by Monte Carlo), "likelihood" (log p itself, in the order of a chain), or
    "score" (guided: no bound on anything).
    stderr: 0 where nothing was drawn; NaN where the mean is infinite.
    forwards: rows that were computed; equal draws are computed once.
    set_means (N, S): the independent estimates behind the mean; NaN for sets that adaptive stopping left out.
    """

    mean: Tensor
    stderr: Tensor
    draws: Tensor
    forwards: Tensor
    set_means: Tensor
    kind: str
    full_draws: Tensor  # without adaptive stopping

    @classmethod
    def of(
        cls, sets: Sequence[Sequence[float]], draws: Sequence[int], full: Sequence[int], forwards: Sequence[int], kind: str
    ) -> "Estimates":
        """Build estimates from each row's set means; a single one is exact."""
        rows = [torch.tensor(row, dtype=torch.float64) for row in sets]
        spread = [float(row.std()) / math.sqrt(len(row)) if len(row) > 1 else 0.0 for row in rows]
        return cls(
            mean=torch.stack([row.mean() for row in rows]),
            stderr=torch.tensor(spread, dtype=torch.float64),
            draws=torch.tensor(draws),
            forwards=torch.tensor(forwards),
            set_means=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan),
            kind=kind,
            full_draws=torch.tensor(full),
        )

    @property
    def saved(self) -> float:
        """The share of draws that adaptive allocation did not need."""
        return 1 - int(self.draws.sum()) / int(self.full_draws.sum())

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence interval (low, high), each (N,), by Student's t with S - 1 degrees of freedom."""
        sets = (~self.set_means.isnan()).sum(1).tolist()
        reach = [student_quantile((1 + level) / 2, n - 1) if n > 1 else 0.0 for n in sets]
        width = torch.tensor(reach, dtype=torch.float64) * self.stderr
        return self.mean - width, self.mean + width


def student_cdf(t: float, dof: int) -> float:
    """P(T <= t), by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(2 + odd, dof + 1, 2):
        total += term
        term *= cosine * cosine * (power - 1) / power
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + within) / 2


@functools.lru_cache(maxsize=1024)
def student_quantile(p: float, dof: int) -> float:
    """t with P(T <= t) = p, for p of at least a half, by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, dof) < p:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, dof) < p else (low, middle)
    return (low + high) / 2
