"""Fewer forwards, same tokens: one forward checks several canvases that a row may have next.

The last forward's predictions give guesses of the next commits. A `Tree` of canvases has some of these guesses filled in; its root
is the row as it is. One forward takes the policy's own step on every canvas, each with the noise of the plain sampler's step at its
depth. The row moves along the path on which the policy's commits are the guessed ones. So tokens, their order and their
confidences are the plain sampler's, and a forward takes one to `depth + 1` of its steps. Guesses decide the speed alone.

N canvases of a batch's R rows, T tokens, D depth of the deepest tree, n positions predicted in a canvas, V vocabulary.
"""

import functools
import heapq
import math
import time
from bisect import bisect_right
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sinkdlm.errors import ModelError
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.batch import Batch, _Proposal, _Query, _Shape, _Span
from sinkdlm.sampling.denoiser import DenoiserAdapter
from sinkdlm.sampling.drawing import score_candidates
from sinkdlm.sampling.requests import State, StepPlan
from sinkdlm.sampling.unmasking import PLANNED_ORDERS, Policy

# A guessed commit: the best; the second or third best place; the best place with its second token.
BEST, SECOND, THIRD, OTHER_TOKEN = range(4)
# How often each is the policy's own, roughly: a tree has the canvases that are likeliest by these.
_CHANCE = {BEST: 0.45, SECOND: 0.12, THIRD: 0.11, OTHER_TOKEN: 0.03}

# Rows of a step's table: a batch's own, then whether the canvas may be right, where its block ends, positions that are read.
_N_PLAIN = len(StepPlan._fields[:6]) + len(_Span._fields)
_N_READ = len(_Span._fields) + 2

MOST_AUTO = 8  # canvases of a row of "auto"
_ROOM = 16_384  # in a forward of "auto"
_TRIES = 16  # forwards that a number of canvases is tried for; fewer where several rows share them
_LEAST_GAIN = 1.05  # by which more canvases must be faster
_TRY_AFTER = 1024  # forwards until they are tried again


class Tree(NamedTuple):
    """Canvases of one row. parents: index of each one's parent; the root, which is the row itself, is its own."""

    parents: tuple[int, ...] = (0,)
    choices: tuple[int, ...] = (BEST,)  # what is committed beyond the parent
    depths: tuple[int, ...] = (0,)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def grow(cls, n: int, kinds: tuple[int, ...]) -> "Tree":
        """The n canvases that are likeliest to be right, with guesses of these kinds; one kind gives a line."""
        tree, coming = cls(), [(-_CHANCE[kind], 0, kind) for kind in kinds]
        while len(tree.parents) < n:
            chance, parent, choice = heapq.heappop(coming)
            for kind in kinds:
                heapq.heappush(coming, (chance * _CHANCE[kind], len(tree.parents), kind))
            depth = tree.depths[parent] + 1
            tree = cls((*tree.parents, parent), (*tree.choices, choice), (*tree.depths, depth))
        return tree

    @classmethod
    def of(cls, policy: Policy, n: int) -> "Tree":
        if policy.draft == "linear":
            return cls.grow(n, (BEST,))
        return cls.grow(n, (BEST, OTHER_TOKEN) if policy.order in PLANNED_ORDERS else (BEST, SECOND, THIRD, OTHER_TOKEN))

    @property
    def depth(self) -> int:
        return max(self.depths)


class SpeculativeBatch(Batch):
    """A batch in which every row has a place for each canvas of its tree; `State.row` is the one that was right last."""

    def __init__(self, states: list[State], trees: list[Tree], device: torch.device) -> None:
        self.trees = trees
        self.owners = [row for row, tree in enumerate(trees) for _ in tree.parents]
        firsts = [self.owners.index(row) for row in range(len(trees))]
        self.parents = [firsts[row] + parent for row, tree in enumerate(trees) for parent in tree.parents]
        self.depths = [depth for tree in trees for depth in tree.depths]
        self.depth = max(self.depths)
        super().__init__([states[row] for row in self.owners], device)
        self.owner, self.parent, self.deep = (torch.tensor(x).to(device) for x in (self.owners, self.parents, self.depths))
        self.choice = torch.tensor([choice for tree in trees for choice in tree.choices]).to(device)
        self.levels = [torch.tensor(rows).to(device) for rows in self._levels()]
        most = max(len(tree.parents) for tree in trees)
        slots = [[first + min(i, len(tree.parents) - 1) for i in range(most)] for first, tree in zip(firsts, trees, strict=True)]
        self.slots = torch.tensor(slots).to(device)  # (R, most): each row's canvases, the last one repeated
        self.firsts = torch.tensor(firsts).to(device)
        self.at = self.firsts.clone()  # (R,): the canvas that was right last
        self.outcome = torch.zeros(5, len(trees), dtype=torch.int64, device=device)
        # Each policy's rows, and where their canvases lie in what it scores.
        self.members: list[tuple[Tensor, Tensor]] = []
        for policy, rows in self.groups:
            own = torch.arange(len(self.owners), device=device)[rows]
            local = torch.zeros(len(self.owners), dtype=torch.int64, device=device)
            local[own] = torch.arange(len(own), device=device)
            self.members.append((self.owner[own].unique(), local))
            if policy.order in PLANNED_ORDERS:  # earlier blocks come first; a time is in (0, 1)
                stops = [[stop for _, stop in states[row].request.blocks] for row in self.owners]
                numbers = [[bisect_right(own, place) for place in range(self.width)] for own in stops]
                self.priority[rows] += 2.0 * torch.tensor(numbers).to(device)[rows]
        for state, first in zip(states, firsts, strict=True):
            state.row = first

    def _levels(self) -> list[list[int]]:
        return [[row for row, own in enumerate(self.depths) if own == depth] for depth in range(1, self.depth + 1)]

    @classmethod
    def hold(cls, states: list[State], trees: list[Tree], device: torch.device) -> "SpeculativeBatch":
        """Return the rows' common batch if neither they nor their trees have changed; else make a new one."""
        old = states[0].batch
        kept = isinstance(old, cls) and old.trees == trees and all(state.batch is old for state in states)
        if kept and [old.owners[state.row] for state in states] == list(range(len(trees))):
            return cast(SpeculativeBatch, old)
        return cls(states, trees, device)

    def _collect(self, states: list[State]) -> None:
        super()._collect(states)
        shape = (len(self.trees), self.depth, self.width)
        # Guesses of the next commits, for each step ahead: tokens, -1 where there is none; the second tokens; the order's score.
        self.guess, self.second = (torch.full(shape, -1, device=self.device) for _ in range(2))
        self.rank = torch.zeros(shape, device=self.device)
        for row, state in enumerate(states):
            if isinstance(old := state.batch, SpeculativeBatch):
                here, there = self.owners[row], old.owners[state.row]
                depth, span = min(self.depth, old.depth), min(self.width, old.width)
                for name in ("guess", "second", "rank"):
                    getattr(self, name)[here, :depth, :span] = getattr(old, name)[there, :depth, :span]

    def advance(self, states: list[State], adapter: DenoiserAdapter) -> None:
        self._return(states)
        steady = self._is_steady(adapter)
        spans, span = self._open_span(adapter, [states[row] for row in self.owners], steady)
        ahead = [state.ahead(2 * tree.depth + 1) for state, tree in zip(states, self.trees, strict=True)]
        plans, further = [], []
        for own_span, row, depth in zip(spans, self.owners, self.depths, strict=True):
            own, reach = ahead[row], self.trees[row].depth
            # An approximate cache is filled from the canvas with which the block begins, without guesses.
            alone = self.cache_kind not in ("none", "exact") and own[0].first
            plan = own[min(depth, len(own) - 1)]
            later = own[depth + 1 : depth + 1 + reach]
            planned = states[row].policy.order in PLANNED_ORDERS
            n_read = plan.n_predicted + sum(one.n_predicted for one in later if planned or one.first)
            steps = [one.step for one in later] + [0] * (self.depth - len(later))
            plans.append(plan._replace(stop=max([plan.stop, *(one.stop for one in later)])))
            further.append((*own_span, depth == 0 or (depth < len(own) and not alone), plan.stop, n_read, *steps))
        control = torch.tensor([(*plan[:6], *rest) for plan, rest in zip(plans, further, strict=True)]).T.contiguous()
        shape = self._shape(plans, spans, max(rest[_N_READ] for rest in further), span, steady)
        self._forward(adapter, control.to(self.device, non_blocking=True), shape, steady)
        self._follow(states, ahead)

    def _return(self, states: list[State]) -> None:
        """Make every canvas the one that was right last; the root stays as it is should the forward fail."""
        right = self.at[self.owner]
        for mine in (self.tokens, self.open, self.confidence):
            mine.copy_(mine[right])
        if self.logprobs is not None:
            self.logprobs.copy(torch.arange(self.n_rows, device=self.device), self.logprobs, right)
        self.report[2] = self.report[2, right] * (self.deep == 0)
        self.at.copy_(self.firsts)
        for row, state in enumerate(states):
            state.row, state.passed = self.owners.index(row), []

    def _compute(self, adapter: DenoiserAdapter, control: Tensor, shape: _Shape) -> None:
        live, stop, n_read, *coming = control[_N_PLAIN:]
        self._fill_in(control, stop)
        before = self.tokens.clone(), self.open.clone()
        self._read: list[Tensor] = []
        super()._compute(adapter, control[:_N_PLAIN], shape)
        self._accept(before, live > 0)
        self._guess_next(n_read, coming)
        self._read.clear()

    def _fill_in(self, control: Tensor, stops: Tensor) -> None:
        """Commit the guesses of each canvas's path."""
        everywhere = counter(self.width, self.device)
        for depth, rows in enumerate(self.levels):
            up, owner, choice = self.parent[rows], self.owner[rows], self.choice[rows, None]
            begin, stop, quota = control[1, up, None], stops[up, None], control[5, up, None]
            guess, open_ = self.guess[owner, depth], self.open[up]
            usable = open_ & (guess >= 0) & (everywhere >= begin) & (everywhere < stop)
            order = self.rank[owner, depth].masked_fill(~usable, -math.inf).argsort(dim=1, descending=True, stable=True)
            place = order.argsort(dim=1)
            skipped = choice % OTHER_TOKEN  # places that are better than the last that is taken, and are not
            taken = ((place < quota - (skipped > 0).long()) | ((skipped > 0) & (place == quota - 1 + skipped))) & usable
            guess = guess.where((choice != OTHER_TOKEN) | (place != quota - 1), self.second[owner, depth])
            self.tokens[rows] = guess.where(taken, self.tokens[up])
            self.open[rows] = open_ & ~taken

    def _propose(self, adapter: DenoiserAdapter, query: _Query, positions: Tensor, step: Tensor) -> _Proposal:
        found = super()._propose(adapter, query, positions, step)
        self._positions, self._found = positions, found
        return found

    def _score(self, policy: Policy, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        # Scoring overwrites the logits, and guesses with other noise, or of second tokens, need them.
        self._read.append(logits.clone() if keys is not None or OTHER_TOKEN in self._choices else logits)
        return super()._score(policy, logits, keys)

    @functools.cached_property
    def _choices(self) -> set[int]:
        return {choice for tree in self.trees for choice in tree.choices}

    def _accept(self, before: tuple[Tensor, Tensor], live: Tensor) -> None:
        """Find the deepest canvas of each row whose guesses are all the policy's own commits."""
        right = self.deep == 0
        for rows in self.levels:
            up = self.parent[rows]
            same = [(now[up] == then[rows]).all(1) for now, then in zip((self.tokens, self.open), before, strict=True)]
            right[rows] = right[up] & same[0] & same[1] & live[rows]
            self.confidence[rows] = self.confidence[rows].where(self.committed[rows], self.confidence[up])
            if self.logprobs is not None:
                self.logprobs.inherit(rows, up, self.committed[rows])
            self.report[2, rows] += self.report[2, up]
        deepest = (right * (self.deep + 1))[self.slots].argmax(1, keepdim=True)
        self.at.copy_(self.slots.gather(1, deepest)[:, 0])
        self.outcome.copy_(torch.stack([self.at, self.deep[self.at], *self.report[:, self.at]]))

    def _guess_next(self, n_read: Tensor, coming: list[Tensor]) -> None:
        """Guess the commits of the next steps from the predictions of the canvas that was right, each with its step's noise."""
        proposal, score, *_ = self._found
        for (policy, _), (rows, local), kept in zip(self.groups, self.members, self._read, strict=True):
            at = self.at[rows]
            positions = self._positions[at]
            read = counter(positions.shape[1], self.device) < n_read[at, None]
            tokens, rank, second = proposal[at], score[at], proposal[at]
            is_drawn = policy.temperature > 0 or policy.order_temperature > 0
            for depth in range(self.depth):
                if depth == 0 or is_drawn:
                    keys = None
                    if is_drawn:
                        keys = cast(Tensor, fold(self.keys[at][:, None], coming[depth][at, None], positions))
                        tokens, rank, _ = score_candidates(policy, kept[local[at]], keys)
                    if OTHER_TOKEN in self._choices:
                        others = kept[local[at]].scatter_(-1, tokens[..., None], -math.inf)
                        second = score_candidates(policy, others, keys)[0]
                    if policy.order in PLANNED_ORDERS:
                        rank = -self.priority[at].gather(1, positions)
                for mine, new in ((self.guess, tokens), (self.second, second)):
                    self._note(mine, rows, depth, positions, new.masked_fill(~read, -1), -1)
                self._note(self.rank, rows, depth, positions, rank.clamp_min(torch.finfo(self.rank.dtype).min), 0)

    def _note(self, mine: Tensor, rows: Tensor, depth: int, positions: Tensor, values: Tensor, fill: int) -> None:
        whole = torch.full((len(rows), self.width), fill, dtype=mine.dtype, device=self.device)
        mine[rows, depth] = whole.scatter_(1, positions, values.to(mine.dtype))

    def _follow(self, states: list[State], ahead: list[list[StepPlan]]) -> None:
        """Move every row along its path, step by step as the plain sampler. Waits for the device."""
        lost = []
        for state, own, found in zip(states, ahead, self.outcome.T.tolist(), strict=True):
            at, depth, committed, over, bad = found
            state.forwards += 1
            state.accepted += sum(plan.quota for plan in own[1 : depth + 1])
            path = [at]
            while self.parents[path[0]] != path[0]:
                path.insert(0, self.parents[path[0]])
            state.passed = []
            for row, plan in zip(path, own, strict=False):
                state.row = row
                state.steps += 1
                if row == at and over and state.policy.eos_id is not None:
                    state.end()
                else:
                    state.advance(committed if depth == 0 else plan.quota)
                state.passed.append((row, state.plan, state.steps))
            lost += [state] * (bad > 0)
        for state in lost:
            state.end()
        if lost:
            raise ModelError(lost)


class _Tries:
    """The tokens a second of rows with 1, 2, 4, ... canvases each, for as long as more of them are faster."""

    def __init__(self) -> None:
        self.best, self.rate = 1, 0.0
        self.trying: int | None = 1
        self.begin(1)

    def begin(self, trying: int | None) -> None:
        self.trying, self.n, self.steps, self.seconds, self.rest = trying, 0, 0, math.inf, _TRY_AFTER

    def note(self, n_rows: int, steps: int, seconds: float, most: int) -> None:
        self.n += 1
        if self.n == 1 or self.trying is None:  # the first forward of a shape is slower
            return
        self.steps, self.seconds = self.steps + steps, min(self.seconds, seconds)
        if self.n < 2 + _TRIES // n_rows:
            return
        rate, tried = self.steps / (self.n - 1) / self.seconds, self.trying
        is_faster = rate > self.rate * _LEAST_GAIN
        if is_faster:
            self.best, self.rate = tried, rate
        self.begin(2 * tried if is_faster and 2 * tried <= most else None)


class Speculator:
    """Steps rows that speculate, and finds how many canvases each of "auto" should get: for each number of rows, in powers of two.

    shared: no row gets more than that, also if it asks for more, as where requests of strangers share a device.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._trials: dict[int, _Tries] = {}

    def advance(self, states: list[State], adapter: DenoiserAdapter, device: torch.device) -> None:
        """Take a step of rows that share a forward."""
        asked = [state.policy.speculate or 1 for state in states]
        n, trial = len(states), self._trials.setdefault(len(states).bit_length(), _Tries())
        most = min(MOST_AUTO, max(1, _ROOM // sum(state.length for state in states)))
        auto = min(most, trial.trying or trial.best)
        counts = [auto if one == "auto" else min(int(one), auto) if self.shared else int(one) for one in asked]
        if not (self.shared or "auto" in asked):
            _advance_widely(states, counts, adapter, device)
            return
        if trial.trying is None:
            trial.rest -= 1
            if not trial.rest:
                self._trials.pop(n.bit_length())
            _advance_widely(states, counts, adapter, device)
            return
        before, began = sum(state.steps for state in states), _device_time(device)
        _advance_widely(states, counts, adapter, device)
        trial.note(n, sum(state.steps for state in states) - before, _device_time(device) - began, most)


def most_canvases(policy: Policy) -> int:
    """The most canvases of a row that a shared `Speculator` gives."""
    asked = policy.speculate or 1
    return MOST_AUTO if asked == "auto" else min(int(asked), MOST_AUTO)


def _device_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _advance_widely(states: list[State], counts: list[int], adapter: DenoiserAdapter, device: torch.device) -> None:
    if max(counts) == 1:
        Batch.of(states, device).advance(states, adapter)
        return
    trees = [Tree.of(state.policy, count) for state, count in zip(states, counts, strict=True)]
    SpeculativeBatch.hold(states, trees, device).advance(states, adapter)


def advance_group(states: list[State], adapter: DenoiserAdapter, device: torch.device) -> None:
    """Take a step of rows that share a forward, or several of those that speculate."""
    # Where tokens are masked again, steps have draws of their own; a constraint follows what is committed.
    plain = [state for state in states if state.policy.remask != "none" or state.gap is not None]
    if plain:
        Batch.of(plain, device).advance(plain, adapter)
    if others := [state for state in states if state not in plain]:
        adapter.speculator = adapter.speculator or Speculator()
        adapter.speculator.advance(others, adapter, device)
