"""A step's gradient, micro-batch by micro-batch: which rows share a forward, and by which way each goes.

Owns the arithmetic of a micro-batch from its rows to gradients and sums. Where it can, one goes the fixed way: a head of as many
places as the recipe says, on tensors that stay, recorded as CUDA graphs and replayed. Any other goes the plain way. Knows nothing
of learning rates, updates or files.
"""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sinkdlm.config.recipe import Recipe
from sinkdlm.data.rows import Batch
from sinkdlm.diffusion import Noisy, Schedule, corrupt, denoising_loss, scored_of
from sinkdlm.fast.objective import chunked_nll, mask_compiled, round_slots
from sinkdlm.model.visibility import Annealing
from sinkdlm.noise import Stream, counter, stream_state
from sinkdlm.training.captured import Recorded, Recorder
from sinkdlm.training.evaluate import BUCKETS, BucketedLoss
from sinkdlm.training.head_slots import Places, plan_places
from sinkdlm.training.weights import Weights

_Found = TypeVar("_Found")


class Sums:
    """What is said of a step, of this rank's rows: float64, on the device. missed: masked positions that found no place."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, masked, missed
        self.buckets = BucketedLoss(device)

    def clear(self) -> None:
        self.totals.zero_()
        self.buckets.sums.zero_()

    def flat(self) -> Tensor:
        return torch.cat([self.totals, self.buckets.sums.flatten()])

    @staticmethod
    def read(values: list[float]) -> tuple[float, int, int, list[float | None], list[float]]:
        """Loss, masked, missed, mean NLL by masked ratio, and what comes behind them."""
        total, masked, missed, *rest = values
        means = BucketedLoss.means([rest[:BUCKETS], rest[BUCKETS : 2 * BUCKETS]])
        return total, int(masked), int(missed), means, rest[2 * BUCKETS :]


class StepResult(NamedTuple):
    loss: float
    grad_norm: float
    n_masked: int
    n_missed: int  # masked positions that found no place in a head of fixed size: such a step is made again before anything changes
    nll_by_ratio: list[float | None]
    signal: int  # the number of one that asks some rank to end, or 0

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
        *,
        micro_batch: int,
        share: int,
        compiled: bool,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """share: rows of a step on the rank that has most. precision: the scope in which each loss is computed."""
        self.recipe, self.plan, self.weights = recipe, recipe.train, weights
        self.world, self.device, self.model = weights.world, weights.world.device, weights.model
        self.schedule = Schedule(self.plan.schedule, self.plan.eps)
        self.micro_batch, self.share, self._compiled = micro_batch, share, compiled
        self._precision, self._say = precision, say
        self._sums = Sums(self.device)
        self.places: Places | None = None
        self.recorded: Recorded | None = None
        self._held: list[Tensor] = []

    def fix(self, like: Batch, recorder: Recorder) -> None:
        """From here on, full micro-batches go the fixed way, where the recipe lets them and their rows are like these."""
        length = like.tokens.shape[1]
        full = torch.ones(1, dtype=torch.bool) if like.lengths is None else like.lengths == length
        counts = self._counts(like)[full.expand(len(like.samples))]
        if self.plan.graphs == "off" or not self.world.alone or like.documents is not None or not len(counts):
            return
        places = plan_places(self.plan, self.micro_batch, length, counts)
        if self.plan.graphs == "auto" and not places.pay(self.recipe.model):
            return
        shape = (self.micro_batch, length)
        inputs = Batch(
            torch.zeros(shape, dtype=torch.int64, device=self.device),
            torch.zeros(self.micro_batch, dtype=torch.int64, device=self.device),
            None if like.maskable is None else torch.ones(shape, dtype=torch.bool, device=self.device),
        )
        # Tables that a recording reads: caches that make them may forget them, and their memory would go to others.
        states = (stream_state(self.plan.seed, stream, self.device) for stream in (Stream.TIME, Stream.MASK))
        self._held = [counter(length, self.device), *states]
        self.places = places
        dtype = torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32
        self.recorded = Recorded(self.model.parameters(), inputs, recorder, dtype=dtype, say=self._say)

    def _counts(self, piece: Batch) -> Tensor:
        """Positions of each row (B,) that may be scored."""
        shifted = self.recipe.model.shift_logits
        if piece.maskable is None:
            return torch.full(piece.samples.shape, piece.tokens.shape[1] - shifted)
        return piece.scored(shifted=shifted).sum(1)

    # -- a step -----------------------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, denominator: Tensor | float, opening: Annealing | None = None, *, fixed: bool = True) -> Tensor:
        """This rank's part of the step's gradient, and of its sums (`Sums.read` reads them). Gradients are clear before it.

        fixed: micro-batches may go the fixed way; if the sums say that a position was missed, the step is to be made without.
        """
        return self.with_room(lambda: self._add_all(batch, denominator, opening, fixed))

    def _add_all(self, batch: Batch, denominator: Tensor | float, opening: Annealing | None, fixed: bool) -> Tensor:
        self._sums.clear()
        forwards = self._forwards(batch)
        for part in forwards:
            piece = batch.rows(part)  # cut and counted on the host: no wait
            piece = piece.trimmed() if self._trims() else piece
            if fixed and opening is None and self._is_fixed(piece):
                self._add_fixed(piece, denominator, first=part is forwards[0])
            else:
                places = self._count_places(piece) if fixed else None
                self._add(piece.to(self.device), denominator, opening, last=part is forwards[-1], places=places)
        return self._sums.flat()

    def _count_places(self, piece: Batch) -> int | None:
        """Head slots that a piece needs: the host draws its masks as well, and need not wait until the device has. None on a CPU,
        which never waits."""
        if self.device.type == "cpu":
            return None
        shifted = self.recipe.model.shift_logits
        return round_slots(int(scored_of(self._corrupt(piece), shifted=shifted, documents=piece.documents).sum()))

    def _corrupt(self, piece: Batch) -> Noisy:
        return corrupt(
            piece.tokens,
            piece.samples,
            seed=self.plan.seed,
            mask_id=self.recipe.model.mask_id,
            schedule=self.schedule,
            times=self.plan.times,
            maskable=piece.maskable,
            mask=mask_compiled,
        )

    def _is_fixed(self, piece: Batch) -> bool:
        if self.recorded is None or self.places is None or not self.recorded.takes(piece):
            return False
        return self.places.fit(piece.samples, self._counts(piece))

    def _add_fixed(self, piece: Batch, denominator: Tensor | float, *, first: bool) -> None:
        assert self.recorded is not None
        assert self.places is not None
        compute = functools.partial(self._add, places=self.places.size)
        if first and self.recorded.prepare(piece, float(denominator), compute):
            self._sums.clear()
        self.recorded.add(piece, float(denominator), compute)

    def _add(
        self,
        piece: Batch,
        denominator: Tensor | float,
        opening: Annealing | None = None,
        *,
        last: bool = True,
        places: int | None = None,
    ) -> None:
        """One micro-batch, on the device."""
        noisy = self._corrupt(piece)
        with self._precision:
            loss = denoising_loss(
                self.model,
                piece.tokens,
                noisy,
                denominator=denominator,
                lengths=piece.lengths,
                documents=piece.documents,
                annealing=opening,
                slots=places,
                nll=chunked_nll,
            )
        self.weights.before_backward(last=last)
        loss.total.backward()
        masked = noisy.masked.sum()
        missed = torch.zeros_like(masked) if loss.missed is None else loss.missed
        self._sums.totals += torch.stack([loss.total.detach().double(), masked.double(), missed.double()])
        self._sums.buckets.add(self.schedule.probability(noisy.t), loss)

    def with_room(self, call: Callable[[], _Found]) -> _Found:
        """call(), and once more without what recordings hold, where memory runs out beside them."""
        try:
            return call()
        except torch.OutOfMemoryError:
            if self.recorded is None or not self.recorded.release():
                raise
        return call()

    # -- which rows ---------------------------------------------------------------------------------------------------------------

    def _trims(self) -> bool:
        """Whether short rows go through the model without their padding. Ranks need equal numbers of forwards, and compiled blocks
        few shapes."""
        return self.world.alone and not self._compiled

    def _forwards(self, batch: Batch) -> list[slice]:
        """Which rows share a forward: as many as fit, and where it pays, full rows and short ones apart."""
        size, end = self.micro_batch, self.share
        edges = [0, batch.n_full, end] if self._trims() else [0, end]
        return [
            slice(start, min(start + size, stop)) for first, stop in itertools.pairwise(edges) for start in range(first, stop, size)
        ]
