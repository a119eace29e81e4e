"""Compute a step's gradient, micro-batch by micro-batch: which rows share a forward, and whether it is replayed or launched.

Owns the arithmetic from a micro-batch's rows to gradients and sums. Where possible, a micro-batch is captured: fixed head slots,
fixed tensors, replayed CUDA graphs. Others launch kernel by kernel. Must not know learning rates, updates or files.
"""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from sinkdlm.config.recipe import Recipe
from sinkdlm.data.rows import Batch
from sinkdlm.diffusion import Noisy, Schedule, complement, denoising_loss, scored_of
from sinkdlm.distributed.signals import ENDING
from sinkdlm.fast.objective import chunked_nll, round_slots
from sinkdlm.model.visibility import Annealing
from sinkdlm.noise import Stream, counter, stream_state
from sinkdlm.training.captured import Captured, Capturer
from sinkdlm.training.evaluate import BUCKETS, add_by_ratio, corrupt_batch, means_by_ratio
from sinkdlm.training.head_slots import plan_slots
from sinkdlm.training.weights import Weights

_Found = TypeVar("_Found")
_N_TOTALS = 3  # loss, masked, missed


class StepResult(NamedTuple):
    """What a step found, over all ranks."""

    grad_norm: float
    loss: float
    n_masked: int
    n_missed: int  # masked positions without a head slot: such a step is repeated before any update
    nll_by_ratio: list[float | None]
    signal: int  # number of a signal that asked some rank to end, or 0

    @classmethod
    def read(cls, values: list[float]) -> Self:
        """values: the gradient norm, the sums of `Gradients.add`, then how many ranks caught each signal."""
        norm, loss, masked, missed, *rest = values
        asked = next((number for number, count in zip(ENDING, rest[2 * BUCKETS :], strict=False) if count), 0)
        means = means_by_ratio([rest[:BUCKETS], rest[BUCKETS : 2 * BUCKETS]])
        return cls(norm, loss, int(masked), int(missed), means, asked)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Gradients:
    """Forward and backward of every micro-batch of a step."""

    def __init__(
        self,
        recipe: Recipe,
        weights: Weights,
        precision: AbstractContextManager[Any],
        micro_batch: int,
        compiled: bool,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """precision: the scope in which each loss is computed."""
        self.recipe, self.plan, self.weights = recipe, recipe.train, weights
        self.world, self.device, self.model = weights.world, weights.world.device, weights.model
        self.schedule = Schedule(self.plan.schedule, self.plan.eps, equal=self.plan.weights == "equal")
        self.micro_batch, self._compiled = micro_batch, compiled
        self._counts_slots = self.device.type != "cpu"  # on a CPU there is no sync to avoid
        self._precision, self._say = precision, say
        self._sums = torch.zeros(_N_TOTALS + 2 * BUCKETS, dtype=torch.float64, device=self.device)  # of this rank's rows
        self._by_ratio = self._sums[_N_TOTALS:].view(2, BUCKETS)
        self.captured: Captured | None = None
        self._held: list[Tensor] = []

    def fix(self, like: Batch, capturer: Capturer) -> None:
        """From here on, replay full micro-batches whose rows are like these from captures, where the recipe allows it."""
        length = like.tokens.shape[1]
        counts = self._counts(like)
        if like.lengths is not None:
            counts = counts[like.lengths == length]
        if self.plan.graphs == "off" or not self.world.alone or like.documents is not None or not len(counts):
            return
        if self.recipe.model.block_size is not None:  # the head slots are sized for one time a row
            if self.plan.graphs == "on":
                self._say('train.graphs = "on": captures no steps of block diffusion (model.block_size); training goes on without')
            return
        slots = plan_slots(self.plan, self.micro_batch, length, counts)
        if self.plan.graphs == "auto" and not slots.pay(self.recipe.model):
            return
        shape = (self.micro_batch, length)
        inputs = Batch(
            torch.zeros(shape, dtype=torch.int64, device=self.device),
            torch.zeros(self.micro_batch, dtype=torch.int64, device=self.device),
            None if like.maskable is None else torch.ones(shape, dtype=torch.bool, device=self.device),
        )
        # Keep the tables that a capture reads: if their cache dropped them, their memory would be reused.
        states = (stream_state(self.plan.seed, stream, self.device) for stream in (Stream.TIME, Stream.MASK))
        self._held = [counter(length, self.device), *states]
        self.captured = Captured(self.model.parameters(), inputs, slots, capturer, self._say)

    def _counts(self, piece: Batch) -> Tensor:
        """Positions of each row (B,) that may be scored."""
        return piece.scored(shifted=self.recipe.model.shift_logits).sum(1)

    def add(
        self,
        batch: Batch,
        denominator: Tensor | float,
        annealing: Annealing | None = None,
        block_size: int | None = None,
        *,
        fixed: bool = True,
    ) -> Tensor:
        """Add up this rank's part of the step's gradient and return its sums (`StepResult.read`). Clear the gradients before.

        block_size: instead of the model's. fixed: allow a fixed number of head slots; if the sums report missed positions, repeat
        the step with fixed=False.
        """
        return self.with_room(lambda: self._add_all(batch, denominator, annealing, block_size, fixed))

    def _add_all(
        self, batch: Batch, denominator: Tensor | float, annealing: Annealing | None, block_size: int | None, fixed: bool
    ) -> Tensor:
        self._sums.zero_()
        forwards = self._forwards(batch)
        for part in forwards:
            piece = batch.rows(part)  # cut and counted on the host: no sync
            piece = piece.trimmed() if self._trims() else piece
            captured = self.captured if fixed and annealing is None else None
            if captured is not None and captured.takes(piece, self._counts):
                compute = functools.partial(self._add, slots=captured.slots.size)
                if part is forwards[0] and captured.prepare(piece, float(denominator), compute):
                    self._sums.zero_()
                captured.add(piece, float(denominator), compute)
            else:
                halves = range(1 + self.recipe.blocks.complementary)
                for half in halves:
                    slots = self._count_slots(piece, block_size, half) if fixed and self._counts_slots else None
                    last = part is forwards[-1] and half == halves[-1]
                    given: dict[str, Any] = {"block_size": block_size, "half": half, "last": last, "slots": slots}
                    self._add(piece.to(self.device), denominator * len(halves), annealing, **given)
        return self._sums.clone()

    def _count_slots(self, piece: Batch, block_size: int | None, half: int) -> int:
        """Head slots that a piece needs. The host draws its masks as well, so that it need not wait for the device."""
        noisy = self._corrupt(piece, block_size, half)
        return round_slots(int(scored_of(noisy, shifted=self.recipe.model.shift_logits, documents=piece.documents).sum()))

    def _corrupt(self, piece: Batch, block_size: int | None, half: int) -> Noisy:
        """Mask a piece; half 1 is the complement of half 0."""
        given: dict[str, Any] = {"block_size": block_size, "t_range": self.recipe.blocks.t_range}
        noisy = corrupt_batch(piece, self.model, self.schedule, self.plan.seed, self.plan.times, **given)
        if half == 0:
            return noisy
        return complement(piece.tokens, noisy, mask_id=self.model.config.mask_id, schedule=self.schedule, maskable=piece.maskable)

    def _add(
        self,
        piece: Batch,
        denominator: Tensor | float,
        annealing: Annealing | None = None,
        *,
        block_size: int | None = None,
        half: int = 0,
        last: bool = True,
        slots: int | None = None,
    ) -> None:
        """Run one micro-batch, on the device."""
        noisy = self._corrupt(piece, block_size, half)
        with self._precision:
            loss = denoising_loss(
                self.model,
                piece.tokens,
                noisy,
                denominator=denominator,
                lengths=piece.lengths,
                documents=piece.documents,
                annealing=annealing,
                slots=slots,
                nll=chunked_nll,
                block_size=block_size,
            )
        self.weights.before_backward(last=last)
        loss.total.backward()
        masked = noisy.masked.sum()
        missed = torch.zeros_like(masked) if loss.missed is None else loss.missed
        self._sums[:_N_TOTALS] += torch.stack([loss.total.detach().double(), masked.double(), missed.double()])
        add_by_ratio(self._by_ratio, self.schedule.probability(noisy.t), loss)

    def with_room(self, call: Callable[[], _Found]) -> _Found:
        """Run call(); if memory runs out, free the captures and run it once more."""
        try:
            return call()
        except torch.OutOfMemoryError:
            if self.captured is None or not self.captured.release():
                raise
        return call()

    def _trims(self) -> bool:
        """Whether short rows run apart, without padding. Not with ranks, which need equally many forwards, or compiled blocks."""
        return self.world.alone and not self._compiled

    def _forwards(self, batch: Batch) -> list[slice]:
        """Which rows share a forward: as many as fit."""
        size, end = self.micro_batch, self.world.largest_share(self.plan.batch)
        edges = [0, batch.n_full, end] if self._trims() else [0, end]
        return [
            slice(start, min(start + size, stop)) for first, stop in itertools.pairwise(edges) for start in range(first, stop, size)
        ]
