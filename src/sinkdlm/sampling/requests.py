"""One request to a sampler and where it stands: its canvas, its policy, and what its next step may do.

Owns the plan of a request, on the host: which block it is in, how many positions the next step commits, what it masks again. Knows
no denoiser and no batch; the tokens themselves lie with the batch that a request is in (batch.py).
"""

import functools
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkdlm.errors import SamplingError
from sinkdlm.noise import Key, Stream, fold, hash_words, unit_interval
from sinkdlm.sampling.unmasking import PLANNED_ORDERS, Policy, cut_blocks, exchanges, masked_shares, quotas, split_steps

# Keys beside (request, step, position, word), whose numbers are never negative.
_REVEAL, _REMASK = -1, -2
_EVERY_STEP = -1


@dataclass(frozen=True)
class Request:
    """canvas: the whole row at its greatest length, mask_id where a token is to be written; all else is fixed.

    (seed, number) key the request's noise: the same two give the same draws in any batch.
    grow: the row is only as long as the block that is being written, and its next block is appended when that is full.
    """

    canvas: Sequence[int]
    policy: Policy
    mask_id: int
    seed: int = 0
    number: int = 0
    grow: bool = False
    blocks: list[tuple[int, int]] = field(init=False, repr=False)  # those with open positions

    def __post_init__(self) -> None:
        open_at = [position for position, token in enumerate(self.canvas) if token == self.mask_id]
        if not open_at:
            raise SamplingError("the canvas has no open position: give a length beyond the prompt, or gaps in it")
        if self.grow and (self.policy.block is None or self.policy.eos_id is None):
            raise SamplingError("an open end needs block= (what is appended at a time) and eos_id= (what ends it)")
        if self.grow and open_at != list(range(open_at[0], len(self.canvas))):
            raise SamplingError("an open end and text after a gap do not go together: give a length")
        blocks = cut_blocks(open_at[0], len(self.canvas), self.policy.block)
        kept = [(a, b) for a, b in blocks if any(token == self.mask_id for token in self.canvas[a:b])]
        object.__setattr__(self, "blocks", kept)


class Turn(NamedTuple):
    """What one step may do to one row."""

    step: int  # a key of the step's noise
    start: int  # of the block
    stop: int
    length: int  # of the row now
    n_places: int  # positions whose prediction is needed
    quota: int  # of them to commit; more where a threshold says so
    first: bool  # of its block: caches are filled anew
    reveal: tuple[int, ...] | None = None  # ReMDM: the positions, instead of the first `n_places` by the order
    remask: tuple[int, ...] = ()

    def control(self) -> tuple[int, ...]:
        return self[:6]


def row_keys(requests: Sequence[Request]) -> Tensor:
    """(B,): the hash of (seed, request) from which all noise of a row goes on."""
    seeds, numbers = (torch.tensor([getattr(request, name) for request in requests]) for name in ("seed", "number"))
    keys = hash_words(seeds, int(Stream.SAMPLING), numbers)
    assert isinstance(keys, Tensor)
    return keys


def reveal_times(keys: Key, length: int) -> Tensor:
    """(B, length) in (0, 1): when each position would be revealed, as time runs from 1 to 0.

    Revealing a masked token with probability 1 - s/t in each step is the same as drawing its time evenly once. So the steps of an
    ancestral sampler in which nothing happens need no forward.
    """
    assert isinstance(keys, Tensor)
    return unit_interval(fold(keys[:, None], _EVERY_STEP, torch.arange(length, device=keys.device), _REVEAL))


@functools.lru_cache(maxsize=64)
def _rising_shares(steps: int, schedule: str, last_time: float) -> tuple[float, ...]:
    return masked_shares(steps, schedule, last_time)[steps - 1 : 0 : -1]


class State:
    """A request on its way. `turn` is its next step, None once it is done."""

    def __init__(self, request: Request, key: Tensor, times: Sequence[float] | None) -> None:
        self.request = request
        self.steps = 0  # steps with a forward
        self.turn: Turn | None = None
        self.key = key  # ()
        self.home: Any = None  # the batch that holds its tokens, and the row there
        self.row = 0
        self._times = times
        self._open = {a: [p for p in range(a, b) if request.canvas[p] == request.mask_id] for a, b in request.blocks}
        self._block_steps = self._split()
        self._turns = self._plan()
        self._committed = 0  # in the last step
        self.advance(0)

    @property
    def done(self) -> bool:
        return self.turn is None

    @property
    def policy(self) -> Policy:
        return self.request.policy

    @property
    def length(self) -> int:
        """Tokens of the row now."""
        return self._length

    @property
    def tokens(self) -> Tensor:
        """(length,)."""
        if self.home is None:
            return torch.tensor(self.request.canvas[: self.length])
        tokens: Tensor = self.home.tokens
        return tokens[self.row, : self.length]

    @property
    def confidence(self) -> Tensor:
        """(length,): how sure the model was of each token when it was committed; not a number elsewhere."""
        confidence: Tensor = self.home.confidence
        return confidence[self.row, : self.length]

    @property
    def committed(self) -> Tensor:
        """(length,): what the last step wrote."""
        committed: Tensor = self.home.committed
        return committed[self.row, : self.length]

    def advance(self, committed: int) -> None:
        """The turn was taken and wrote so many tokens: on to the next."""
        self._committed = committed
        self.turn = next(self._turns, None)
        if self.turn is not None:
            self._length = self.turn.length

    def end(self) -> None:
        """Nothing more is to be written: EOS stands, or nobody waits for it any longer."""
        self.turn = None
        self._turns = iter(())  # the plan holds the state, and would keep it and its batch in memory

    # -- the plan -----------------------------------------------------------------------------------------------------------------

    def _split(self) -> list[int]:
        sizes = [len(self._open[start]) for start, _ in self.request.blocks]
        given = split_steps(sizes, self.policy.steps)
        if self.policy.order == "ancestral":  # its steps may be empty, so there may be more than positions
            return given
        return [min(steps, size) if self.policy.schedule == "linear" else steps for steps, size in zip(given, sizes, strict=True)]

    def _plan(self) -> Iterator[Turn]:
        base = 0
        for (start, stop), steps in zip(self.request.blocks, self._block_steps, strict=True):
            here = self._open[start]
            length = stop if self.request.grow else len(self.request.canvas)
            turn = Turn(base, start, stop, length, n_places=len(here), quota=0, first=True)
            if self.policy.remask != "none":
                yield from self._exchange(turn, here, steps)
            elif self.policy.threshold is not None:
                yield from self._by_threshold(turn, steps)
            else:
                yield from self._by_quota(turn, here, steps)
            base += steps

    def _by_quota(self, turn: Turn, here: list[int], steps: int) -> Iterator[Turn]:
        left, planned = len(here), self.policy.order in PLANNED_ORDERS
        for step, quota in self._quotas(here, steps):
            yield turn._replace(step=turn.step + step, n_places=quota if planned else left, quota=quota, first=left == len(here))
            left -= quota

    def _quotas(self, here: list[int], steps: int) -> list[tuple[int, int]]:
        """The steps that commit something, and how much."""
        if self._times is None:
            found = quotas(len(here), steps, self.policy.schedule, self.policy.last_time)
            return [(step, quota) for step, quota in enumerate(found) if quota]
        # Step i reveals what has its time between shares i + 1 and i; the last step whatever is left.
        shares = _rising_shares(steps, self.policy.schedule, self.policy.last_time)
        counts = Counter(steps - 1 - bisect_left(shares, self._times[position]) for position in here)
        return sorted(counts.items())

    def _by_threshold(self, turn: Turn, steps: int) -> Iterator[Turn]:
        """At least one position a step, or as many as finish in time if the number of steps was given."""
        left = turn.n_places
        for step in range(steps):
            quota = 1 if self.policy.steps is None else math.ceil(left / (steps - step))
            yield turn._replace(step=turn.step + step, n_places=left, quota=quota, first=step == 0)
            left -= self._committed
            if not left:
                return

    def _exchange(self, turn: Turn, here: list[int], steps: int) -> Iterator[Turn]:
        """ReMDM: what is revealed and what is masked again is drawn here, before the forward."""
        masked, first = dict.fromkeys(here, True), True
        numbers, purposes = torch.arange(turn.step, turn.step + steps), torch.tensor([_REVEAL, _REMASK])
        drawn = unit_interval(fold(self.key, numbers[:, None, None], torch.tensor(here), purposes[:, None])).tolist()
        for step, (chance, noise) in enumerate(zip(exchanges(self.policy, steps), drawn, strict=True)):
            rates = self._remask_rates(here, masked, chance.remask)
            last = step == steps - 1
            reveal = tuple(p for p, u in zip(here, noise[0], strict=True) if masked[p] and (last or u < chance.reveal))
            remask = tuple(p for p, u, rate in zip(here, noise[1], rates, strict=True) if not masked[p] and u < rate)
            masked |= dict.fromkeys(reveal, False) | dict.fromkeys(remask, True)
            if reveal or remask:
                count = len(reveal)
                yield turn._replace(step=turn.step + step, n_places=count, quota=count, first=first, reveal=reveal, remask=remask)
                first = False

    def _remask_rates(self, here: list[int], masked: dict[int, bool], sigma: float) -> list[float]:
        """The chance of each committed position; with "conf" the less sure a token was, the greater its part of sigma."""
        if self.policy.remask != "conf" or all(masked.values()) or not sigma:
            return [sigma] * len(here)
        sure = self.confidence.tolist()
        weights = [0.0 if masked[p] else math.exp(-sure[p]) for p in here]
        total = sum(weights)
        return [sigma * weight / total for weight in weights]


def start(requests: Sequence[Request]) -> list[State]:
    """States at their first step."""
    if not requests:
        return []
    keys = row_keys(requests)
    timed = [request.policy.order == "ancestral" and request.policy.remask == "none" for request in requests]
    times: Sequence[Sequence[float] | None] = [None] * len(requests)
    if any(timed):
        longest = max(len(request.canvas) for request in itertools.compress(requests, timed))
        rows = reveal_times(keys, longest).tolist()
        times = [row if wanted else None for row, wanted in zip(rows, timed, strict=True)]
    return [State(request, key, row) for request, key, row in zip(requests, keys, times, strict=True)]
