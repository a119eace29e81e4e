"""Fix the number of head slots of a micro-batch before its masks are drawn: arithmetic on the host, no device.

A captured step has fixed shapes, so its head takes a fixed number of positions. Whether samples fit depends only on their indices
and the recipe: a resumed run decides as an uninterrupted one does.

n rows, T tokens of each; p the probability of masking, a function of t.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sinkdlm.config.model import ModelConfig
from sinkdlm.config.recipe import TrainSection
from sinkdlm.diffusion import Schedule, times_of
from sinkdlm.noise import golden_words, unit_interval
from sinkdlm.planning.formulas import training_flops

_SURE = 6.0  # standard deviations of the number of masked positions: no run is long enough to see more
_LIKELY = 3.0  # standard deviations between rows; samples beyond are known beforehand and run uncaptured
_MULTIPLE = 256  # slots are rounded up to this, which suits the GPU's matrix units
_TOGETHER = 512  # rows whose spread over t is computed exactly
_CELLS = 4096  # of (0, 1), for integrals over t
_DEAREST = 0.05  # share of a step's arithmetic that spare slots may add
# FLOPs of one layer in a micro-batch above which capturing gains nothing: 20 ms of an H200 (about 3e14 FLOPs a second), while the
# host launches a layer's kernels in 3 to 5 ms.
_BUSY = 6e12


class HeadSlots(NamedTuple):
    """size: head slots of a micro-batch. expected: its masked positions, on average."""

    size: int
    expected: float
    n_rows: int
    length: int
    train: TrainSection

    def fit(self, samples: Tensor, counts: Tensor) -> bool:
        """Whether these samples (n,) fit the slots. counts (n,): their maskable positions. Both on the host."""
        if self.size >= self.n_rows * self.length:
            return True
        schedule = Schedule(self.train.schedule, self.train.eps)
        p = schedule.probability(times_of(samples, seed=self.train.seed, times=self.train.times))
        mean, variance = (counts * p).sum(), (counts * p * (1 - p)).sum()
        return float(mean + _SURE * variance.sqrt()) <= self.size

    def pay(self, config: ModelConfig) -> bool:
        """Whether replaying may gain more than unused slots cost."""
        positions = self.n_rows * self.length
        needed, whole = (training_flops(config, self.length, slots / positions) for slots in (self.expected, self.size))
        busy = positions * training_flops(config, self.length) / config.n_layers > _BUSY
        return whole / needed - 1 <= _DEAREST and not busy


def plan_slots(train: TrainSection, n_rows: int, length: int, counts: Tensor) -> HeadSlots:
    """Size the head slots for micro-batches of n_rows. counts: maskable positions of typical rows, however many."""
    schedule = Schedule(train.schedule, train.eps)
    p = schedule.probability((torch.arange(_CELLS, dtype=torch.float64) + 0.5) / _CELLS)
    mean, square = float(p.mean()), float(p.square().mean())
    held = counts.double()
    typical, spread = float(held.mean()), float(held.var(correction=0))
    if train.times == "golden":
        shares = _golden_shares(schedule, n_rows)
    else:
        shares = n_rows * mean + _LIKELY * math.sqrt(n_rows * (square - mean**2))
    needed = typical * shares + _LIKELY * math.sqrt(n_rows * spread * square) + _SURE * math.sqrt(n_rows * typical / 4)
    size = min(n_rows * length, max(1, math.ceil(needed / _MULTIPLE)) * _MULTIPLE)
    return HeadSlots(size, n_rows * typical * mean, n_rows, length, train)


def _golden_shares(schedule: Schedule, n_rows: int) -> float:
    """The largest sum of p over any n_rows consecutive samples.

    Their t are n_rows fixed points of a circle, rotated. p grows with t, so the sum is largest just before a point passes 1.
    """
    whole, rest = divmod(n_rows, _TOGETHER)
    found = 0.0
    for size, times in ((_TOGETHER, whole), (rest, 1)):
        if size and times:
            points = unit_interval(golden_words(0, torch.arange(size)))
            turned = (points[:, None] - points).remainder(1.0).fill_diagonal_(1.0)
            found += times * float(schedule.probability(turned).sum(0).max())
    return found
