"""A request and the plan of its steps: `Request` is what is asked, `State` how far it is, `StepPlan` its next step.

Plans are made on the host before each forward: which block, how many positions are predicted and committed, which are masked
again. Knows no denoiser; the tokens themselves lie in the `Batch` that a state is in (batch.py).
"""

import math
import operator
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkdlm.errors import SamplingError
from sinkdlm.noise import Key, Stream, fold, hash_words, unit_interval
from sinkdlm.sampling.constraint import Automaton, Gap, Language, language_of
from sinkdlm.sampling.logprobs import LogProbs
from sinkdlm.sampling.unmasking import (
    APPROXIMATE,
    PLANNED_ORDERS,
    Policy,
    cut_blocks,
    exchanges,
    masked_shares,
    quotas,
    split_steps,
)

# Noise keys that never meet those of (request, step, position, word), which are not negative.
_REVEAL, _REMASK, ORDER, TOKEN = -1, -2, -3, -4
_EVERY_STEP = -1


@dataclass(frozen=True)
class Request:
    """canvas: the whole row at its greatest length, mask_id where a token is to be written; all else is fixed.

    (seed, number) key the request's noise: the same two give the same draws in any batch.
    grow: the row ends with the block that is being written; the next block is appended when that one is full.
    block_size: of a block-diffusion model. Its blocks count from the row's first token, and are written from left to right.
    constraint: what the gap may hold; `language` is that with the request's EOS.
    logprobs: keep the log-probabilities of written tokens, and of this many of the likeliest at each position; None keeps none.
    """

    canvas: Sequence[int]
    policy: Policy
    mask_id: int
    seed: int = 0
    number: int = 0
    grow: bool = False
    block_size: int | None = None
    constraint: Automaton | None = field(default=None, repr=False)
    logprobs: int | None = None
    blocks: list[tuple[int, int]] = field(init=False, repr=False)  # those with open positions
    language: Language | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        open_at = [position for position, token in enumerate(self.canvas) if token == self.mask_id]
        if not open_at:
            raise SamplingError("the canvas has no open position: give a length beyond the prompt, or gaps in it")
        object.__setattr__(self, "policy", self._settle())
        if self.grow and (self.policy.block is None or self.policy.eos_id is None):
            raise SamplingError("an open end needs block= (tokens appended at a time) and eos_id= (the token that ends it)")
        if self.grow and open_at != list(range(open_at[0], len(self.canvas))):
            raise SamplingError("an open end cannot have given text after a gap: give a length")
        if self.constraint is not None:
            if self.policy.speculate not in (None, 1):
                why = "a constraint is kept step by step, so that nothing can be guessed"
                raise SamplingError(f"speculate = {self.policy.speculate!r}: {why}; leave one out")
            object.__setattr__(self, "language", self._language(self.constraint, open_at))
        first = open_at[0]
        if self.block_size is not None and self.policy.block is not None:
            first -= first % self.policy.block
        blocks = cut_blocks(first, len(self.canvas), self.policy.block)
        kept = [(a, b) for a, b in blocks if self.mask_id in self.canvas[a:b]]
        object.__setattr__(self, "blocks", kept)

    def _settle(self) -> Policy:
        """Return the policy with its cache and block as the model's blocks want them."""
        policy, size = self.policy, self.block_size
        if size is None:
            if policy.cache == "exact":
                raise SamplingError("cache = 'exact': needs a block-diffusion model (block_size in its config); use cache = 'none'")
            return replace(policy, cache="none") if policy.cache == "auto" else policy
        if policy.shift:
            raise SamplingError("shift: a block-diffusion model aligns its own rows; leave it out")
        if policy.cache in APPROXIMATE:
            raise SamplingError(f"cache = {policy.cache!r}: this model keeps finished blocks exactly; use cache = 'exact'")
        if size % (policy.block or size):
            raise SamplingError(f"block = {policy.block}: must divide the model's block_size = {size}")
        return replace(policy, block=policy.block or size, cache="exact" if policy.cache == "auto" else policy.cache)

    def _language(self, constraint: Automaton, open_at: list[int]) -> Language:
        if open_at[-1] - open_at[0] >= len(open_at):
            raise SamplingError("a schema or regex is for one gap: give a prompt, and a suffix if need be, without other gaps")
        found = language_of(constraint, self.policy.eos_id, (*self.policy.suppressed, self.mask_id))
        found.check_room(len(open_at))
        return found

    def model_block(self, position: int) -> tuple[int, int]:
        """(start, stop) of the model's block around a position."""
        size = self.block_size or len(self.canvas)
        start = position - position % size
        return start, min(start + size, len(self.canvas))


class StepPlan(NamedTuple):
    """What one step may do to one row."""

    step: int  # a key of the step's noise
    start: int  # of the block
    stop: int
    length: int  # of the row now
    n_predicted: int  # positions whose prediction is needed
    quota: int  # of them to commit; more where a threshold says so
    first: bool = True  # of its block: caches are filled anew
    reveal: tuple[int, ...] | None = None  # ReMDM: the positions, instead of the first `n_predicted` by the order
    remask: tuple[int, ...] = ()


def reveal_times(keys: Key, length: int) -> Tensor:
    """Draw the time in (0, 1) at which each position is revealed, as time runs from 1 to 0: keys (..., 1) -> (..., length).

    Revealing a masked token with probability 1 - s/t in each step is the same as drawing its time uniformly once. So the steps of
    an ancestral sampler that reveal nothing need no forward.
    """
    device = keys.device if isinstance(keys, Tensor) else None
    return unit_interval(fold(keys, _EVERY_STEP, torch.arange(length, device=device), _REVEAL))


class State:
    """A request in progress. `plan` is its next step, or its last one once it is done."""

    def __init__(self, request: Request) -> None:
        self.request, self.policy = request, request.policy
        self.steps = 0  # with a forward of their own, where the policy does not speculate
        self.forwards = 0  # the two of guidance count as one
        self.accepted = 0  # tokens beyond those of one step per forward
        self.passed: list[tuple[int, StepPlan, int]] = []  # row, plan and steps after each step of a forward that took several
        self.key = hash_words(request.seed, int(Stream.SAMPLING), request.number)  # root of all its noise keys
        language = request.language
        self.gap: Gap | None = None  # with a constraint
        if language is not None:
            self.gap = Gap(language, request.canvas.index(request.mask_id), request.canvas.count(request.mask_id))
        self.batch: Any = None  # the Batch that holds its tokens, and the row there
        self.row = 0
        self.caches: list[Any] = []  # of a row that is in no batch yet: its finished blocks (prefill.py)
        self._plans = self._plan_steps()
        self._ahead: deque[StepPlan] = deque()
        self._committed, self.done, self.plan = 0, False, next(self._plans)

    @property
    def length(self) -> int:
        """Tokens of the row now."""
        return self.plan.length

    @property
    def tokens(self) -> Tensor:
        """(length,)."""
        return torch.tensor(self.request.canvas[: self.length]) if self.batch is None else self._view("tokens")

    @property
    def confidence(self) -> Tensor:
        """(length,): probability of each token when it was committed; NaN elsewhere."""
        return self._view("confidence")

    @property
    def log_weight(self) -> float | None:
        """With a constraint: the log of the answer's weight against the model itself (constraint.py)."""
        return None if self.gap is None else self.gap.log_weight

    @property
    def logprobs(self) -> LogProbs:
        """Of a request that asks for them."""
        assert self.request.logprobs is not None
        found: LogProbs = self.batch.logprobs.row(self.row, self.length, self.request.logprobs)
        return found

    @property
    def committed(self) -> Tensor:
        """(length,): what the last step wrote."""
        return self._view("committed")

    def _view(self, name: str) -> Tensor:
        rows: Tensor = getattr(self.batch, name)
        return rows[self.row, : self.length]

    @property
    def reached(self) -> int:
        """Tokens up to the end of the model's block that is being written; no token of it sees later ones."""
        return min(self.request.model_block(self.plan.start)[1], self.length)

    def show(self, turn: int) -> None:
        """Stand where the row stood after a step of the last forward: the first is 0, the last -1."""
        if self.passed:
            self.row, self.plan, self.steps = self.passed[min(turn, len(self.passed) - 1)]

    def step_alone(self) -> None:
        """Take one step a forward, as whoever looks at each step needs."""
        self.policy = replace(self.policy, speculate=None)

    def leave_cache(self) -> None:
        """Before the first step: compute whole rows at every step, as whoever looks at attention needs."""
        self.policy = replace(self.policy, cache="none")

    def advance(self, committed: int) -> None:
        """Plan the next step. committed: tokens that the last one committed."""
        self._committed = committed
        plan = self._ahead.popleft() if self._ahead else next(self._plans, None)
        self.done, self.plan = plan is None, plan or self.plan

    def ahead(self, n: int) -> list[StepPlan]:
        """The next plan and, of the n - 1 after it, those whose positions the same forward can predict."""
        while len(self._ahead) < n - 1 and (plan := next(self._plans, None)) is not None:
            self._ahead.append(plan)
        return [self.plan, *(plan for plan in islice(self._ahead, n - 1) if self._place(plan) == self._place(self.plan))]

    def _place(self, plan: StepPlan) -> Any:
        """What plans must have in common so that a forward for one also predicts the other's positions."""
        if self.policy.cache in APPROXIMATE:
            return plan.start
        return self.request.model_block(plan.start) if self.request.block_size else plan.length

    def end(self) -> None:
        """Write nothing more: EOS has ended the row, or nobody waits for it any longer."""
        self.done = True
        self._plans = iter(())  # the generator holds the state, and would keep it and its batch in memory
        self._ahead.clear()

    def _plan_steps(self) -> Iterator[StepPlan]:
        policy, canvas, mask_id = self.policy, self.request.canvas, self.request.mask_id
        open_at = [[p for p in range(start, stop) if canvas[p] == mask_id] for start, stop in self.request.blocks]
        base = 0
        for (start, stop), here, steps in zip(self.request.blocks, open_at, self._split([*map(len, open_at)]), strict=True):
            end = stop if self.request.block_size is None else self.request.model_block(start)[1]
            plan = StepPlan(base, start, stop, end if self.request.grow else len(canvas), n_predicted=len(here), quota=0)
            if policy.remask != "none":
                yield from self._exchange(plan, here, steps)
            elif policy.threshold is not None:
                yield from self._by_threshold(plan, steps)
            else:
                yield from self._by_quota(plan, here, steps)
            base += steps

    def _split(self, sizes: list[int]) -> list[int]:
        """Steps of each block. An ancestral sampler may have more steps than positions: some reveal nothing."""
        return split_steps(sizes, self.policy.steps, spare=self.policy.order != "ancestral" and self.policy.schedule == "linear")

    def _by_quota(self, plan: StepPlan, here: list[int], steps: int) -> Iterator[StepPlan]:
        left, planned = len(here), self.policy.order in PLANNED_ORDERS
        for step, quota in self._quotas(here, steps):
            first = left == len(here)
            yield plan._replace(step=plan.step + step, n_predicted=quota if planned else left, quota=quota, first=first)
            left -= quota

    def _quotas(self, here: list[int], steps: int) -> list[tuple[int, int]]:
        """(step, count) of the steps that commit something."""
        schedule = (steps, self.policy.schedule, self.policy.last_time)
        if self.policy.order != "ancestral":
            return [(step, quota) for step, quota in enumerate(quotas(len(here), *schedule)) if quota]
        # Step i reveals the positions with times between shares i + 1 and i; the last step reveals the rest.
        shares, times = masked_shares(*schedule), reveal_times(self.key, here[-1] + 1).tolist()
        return sorted(Counter(bisect_right(shares, -times[p], 1, steps, key=operator.neg) - 1 for p in here).items())

    def _by_threshold(self, plan: StepPlan, steps: int) -> Iterator[StepPlan]:
        """Commit at least one position a step, or as many as finish in time where the number of steps was given."""
        left = plan.n_predicted
        for step in range(steps):
            quota = 1 if self.policy.steps is None else math.ceil(left / (steps - step))
            yield plan._replace(step=plan.step + step, n_predicted=left, quota=quota, first=step == 0)
            left -= self._committed
            if not left:
                return

    def _exchange(self, plan: StepPlan, here: list[int], steps: int) -> Iterator[StepPlan]:
        """ReMDM: draw before the forward which positions are revealed and which are masked again."""
        masked, first = dict.fromkeys(here, True), True
        numbers, purposes = torch.arange(plan.step, plan.step + steps), torch.tensor([_REVEAL, _REMASK])
        drawn = unit_interval(fold(self.key, numbers[:, None, None], torch.tensor(here), purposes[:, None])).tolist()
        for step, ((chance, sigma), noise) in enumerate(zip(exchanges(self.policy, steps), drawn, strict=True)):
            rates = self._remask_rates(here, masked, sigma)
            last = step == steps - 1
            reveal = tuple(p for p, u in zip(here, noise[0], strict=True) if masked[p] and (last or u < chance))
            remask = tuple(p for p, u, rate in zip(here, noise[1], rates, strict=True) if not masked[p] and u < rate)
            masked |= dict.fromkeys(reveal, False) | dict.fromkeys(remask, True)
            if reveal or remask:
                n = len(reveal)
                yield plan._replace(step=plan.step + step, n_predicted=n, quota=n, first=first, reveal=reveal, remask=remask)
                first = False

    def _remask_rates(self, here: list[int], masked: dict[int, bool], sigma: float) -> list[float]:
        """The chance that each committed position is masked again; with "conf", unsure tokens get the larger part of sigma."""
        if self.policy.remask != "conf" or all(masked.values()) or not sigma:
            return [sigma] * len(here)
        sure = self.confidence.tolist()
        weights = [0.0 if masked[p] else math.exp(-sure[p]) for p in here]
        total = sum(weights)
        return [sigma * weight / total for weight in weights]


def start(requests: Sequence[Request]) -> list[State]:
    """States at their first step."""
    return [State(request) for request in requests]
