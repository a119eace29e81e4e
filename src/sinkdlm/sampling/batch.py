"""One denoising step of a batch of rows: query the denoiser, draw candidates, commit the best.

`Batch.advance` takes the plans of its rows (requests.py) and runs, on the device: choose positions, `_propose` a token for each
(drawing.py), `_take` the best, `_commit` them; `_move_on` then plans the next step of each row. Rows of any length, policy and
progress share a batch; no row's result depends on the others. Takes a denoiser; knows no model.

A step waits for a GPU only where the next plan needs its outcome: how many positions passed a threshold, whether a row has ended
with EOS, or the confidences for remasking. Steps of repeating shapes are captured as CUDA graphs and replayed.

B rows of a batch, T canvas, n positions predicted in a row, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sinkdlm.errors import ModelError, SamplingError
from sinkdlm.kernels.cuda_graph import StepGraphs, can_capture, round_width
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.constrained_drawing import ConstrainedRow, fit_tokens
from sinkdlm.sampling.denoiser import DenoiserAdapter, fixed_count, fixed_width
from sinkdlm.sampling.drawing import guide, penalise, score_candidates
from sinkdlm.sampling.logprobs import table_for
from sinkdlm.sampling.prefill import compute_prefixes
from sinkdlm.sampling.prefix_cache import BlockCache, PrefixCache
from sinkdlm.sampling.requests import State, StepPlan, reveal_times
from sinkdlm.sampling.unmasking import PLANNED_ORDERS, Policy

_SMALL_SPANS = 128  # tokens of a forward up to which two blocks a row take a GPU no longer than one: all steps are captured as one


class _Shape(NamedTuple):
    """Everything that fixes the shapes of a step's tensors, known on the host."""

    n: int  # positions of each row that are predicted
    width: int  # tokens of the longest row
    padded: bool  # whether rows differ in length
    window: int  # consecutive positions of each row, its block's, among which those are
    span: int  # tokens that the forward computes; fewer than all with a cache, after a block's first step
    apart: bool = False  # whether rows have spans of their own
    joins: bool = False  # whether a span begins in the block before


class _Query(NamedTuple):
    """One call of the denoiser: logits at positions (B, n) of tokens (B, T). low (B, 1): starts of the spans."""

    tokens: Tensor
    positions: Tensor
    lengths: Tensor | None
    span: int
    low: Tensor


class _Proposal(NamedTuple):
    """A token for each predicted position, (B, n)."""

    tokens: Tensor
    score: Tensor  # to order them by
    sure: Tensor  # probabilities
    judged: list[Tensor]  # each policy's logits, where constraints may choose other tokens


class _Span(NamedTuple):
    """The tokens of a row that the next forward computes, from `low` on. A cache keeps those from `first` up to `stop`."""

    low: int
    first: int = 0
    stop: int = 0
    begins: int = 0  # the model's block, of block diffusion


class Batch:
    """Rows that share a forward, and their tokens as long as they stay together. Holds no states: a reference cycle would keep the
    memory alive. fixed: shapes of a row do not depend on the others."""

    def __init__(self, states: list[State], device: torch.device, fixed: bool = False) -> None:
        policies = [scoring_policy(state.policy) for state in states]
        self.n_rows, self.device = len(states), device
        self.mask_id, self.cache_kind, self.shift = states[0].request.mask_id, policies[0].cache, policies[0].shift
        self.width, self.fixed = max(len(state.request.canvas) for state in states), fixed
        if fixed:
            self.width = fixed_width(self.width)
        self.keys = torch.tensor([state.key for state in states], dtype=torch.uint64).view(torch.int64).to(device)
        # Each policy with the rows that it scores: all, or an index of them.
        alike: dict[tuple[Policy, bool], Any] = {}
        for row, (policy, state) in enumerate(zip(policies, states, strict=True)):
            alike.setdefault((policy, state.request.logprobs is not None), []).append(row)
        self.logged = [asks for _, asks in alike]  # whether the rows of a group ask for log-probabilities
        self.logprobs = table_for([state.request.logprobs for state in states], self.width, device)
        self.groups: list[tuple[Policy, Any]] = [(policies[0], slice(None))]
        if len(alike) > 1:
            self.groups = [(policy, torch.tensor(rows).to(device)) for (policy, _), rows in alike.items()]
        listed = [list(range(self.n_rows)) if isinstance(rows, slice) else rows.tolist() for _, rows in self.groups]
        self.constrained_rows = [  # of each policy
            [ConstrainedRow(own, row, gap) for own, row in enumerate(rows) if (gap := states[row].gap) is not None]
            for rows in listed
        ]
        self.constrained = any(self.constrained_rows)
        self.caches: list[Any] = []
        self.block_size = states[0].request.block_size or 1  # of block diffusion, where it is read
        if self.cache_kind != "none":
            # An approximate cache is filled anew at a block's first step.
            homes = [(state.caches, 0) if state.batch is None else (state.batch.caches, state.row) for state in states]
            keeps = [
                bool(caches) and (self.cache_kind == "exact" or not state.plan.first)
                for state, (caches, _) in zip(states, homes, strict=True)
            ]
            for branch in range(2 if policies[0].guidance else 1):
                members = [(caches[branch], row) if kept else None for (caches, row), kept in zip(homes, keeps, strict=True)]
                self.caches.append(self._cache(members))
        self._collect(states)
        # The lowest comes first: latest reveal time where noise decides the order, else by position (the sort is stable).
        planned = torch.tensor([[policy.order in PLANNED_ORDERS] for policy in policies]).to(device)
        self.priority = -reveal_times(self.keys[:, None], self.width) * planned
        self.remasked = torch.tensor([[policy.remask != "none"] for policy in policies]).to(device)
        self.forbidden: dict[Policy, Tensor] = {}
        self.graphs = StepGraphs(device)
        for row, state in enumerate(states):
            state.batch, state.row, state.caches, state.passed = self, row, [], []

    @classmethod
    def of(cls, states: list[State], device: torch.device, fixed: bool = False) -> "Batch":
        """Return the rows' common batch if no row has joined or left it; else make a new one."""
        old: Batch | None = states[0].batch
        own = [(state.batch, state.row) for state in states]
        if type(old) is not cls or old.fixed != fixed or [(old, row) for row in range(old.n_rows)] != own:
            return cls(states, device, fixed)
        return old

    def _collect(self, states: list[State]) -> None:
        """Lay out the canvases and copy the rows' progress from their old batches. All are (B, T), the report (3, B)."""
        canvases = [torch.tensor(state.request.canvas) for state in states]
        tokens = torch.nn.utils.rnn.pad_sequence(canvases, batch_first=True, padding_value=-1)
        tokens = torch.nn.functional.pad(tokens, (0, self.width - tokens.shape[1]), value=-1)
        self.editable = (tokens == self.mask_id).to(self.device)
        # Shorter canvases are padded with [MASK] that is not open.
        self.tokens, self.open = tokens.masked_fill(tokens < 0, self.mask_id).to(self.device), self.editable.clone()
        self.confidence = torch.full(tokens.shape, math.nan, device=self.device)
        self.committed = torch.zeros_like(self.open)
        # Tokens committed, whether EOS has ended the row, tokens ever committed with NaN confidence.
        self.report = torch.zeros(3, self.n_rows, dtype=torch.int64, device=self.device)
        for old in {state.batch: None for state in states if state.batch is not None}:
            moved = [(row, state.row) for row, state in enumerate(states) if state.batch is old]
            here, there = torch.tensor(moved).T.to(self.device)
            span = min(self.width, old.width)
            for name in ("tokens", "open", "confidence"):
                getattr(self, name)[here, :span] = getattr(old, name)[there, :span]
            if self.logprobs is not None and old.logprobs is not None:
                self.logprobs.copy(here, old.logprobs, there)
            self.report[2, here] = old.report[2, there]

    def advance(self, states: list[State], adapter: DenoiserAdapter) -> None:
        plans = [state.plan for state in states]
        steady = self._is_steady(adapter)
        spans, span = self._open_span(adapter, states, steady)
        if any(plan.reveal is not None for plan in plans):  # ReMDM: the positions that this step reveals come first
            revealed = self._mark([plan.reveal or () for plan in plans])
            self.priority.copy_(torch.where(self.remasked, (~revealed).double(), self.priority))
        count = max(plan.n_predicted for plan in plans)
        if count:
            control = torch.tensor([(*plan[:6], *own) for plan, own in zip(plans, spans, strict=True)]).T.contiguous()  # (10, B)
            shape = self._shape(plans, spans, count, span, steady)
            self._forward(adapter, control.to(self.device, non_blocking=True), shape, steady)
        else:
            self.committed.zero_()
        if any(plan.remask for plan in plans):
            again = self._mark([plan.remask for plan in plans]) & (self.report[1] == 0)[:, None]  # a row that has ended stays whole
            self.tokens.masked_fill_(again, self.mask_id)
            self.confidence.masked_fill_(again, math.nan)
            self.open |= again
            for state, plan in zip(states, plans, strict=True):
                if state.gap is not None:
                    state.gap.reopen(plan.remask)
        self._move_on(states, plans)

    def _is_steady(self, adapter: DenoiserAdapter) -> bool:
        """Whether steps are captured."""
        return adapter.capturable and can_capture(self.device) and not self.constrained

    def _mark(self, rows: list[tuple[int, ...]]) -> Tensor:
        """(B, T): True at the given positions of each row."""
        marked = torch.zeros(self.tokens.shape, dtype=torch.bool)
        for row, positions in enumerate(rows):
            marked[row, list(positions)] = True
        return marked.to(self.device)

    def _cache(self, members: "Sequence[tuple[Any, int] | None]") -> Any:
        if self.cache_kind == "exact":
            return PrefixCache.collect(members, self.width, self.block_size)
        return BlockCache.collect(members, self.width)

    def _open_span(self, adapter: DenoiserAdapter, states: list[State], steady: bool) -> tuple[list[_Span], int]:
        """The rows' spans in the next forward, and their length: whole rows, or what a cache does not hold."""
        plans = [state.plan for state in states]
        longest = max(plan.length for plan in plans)
        if self.cache_kind == "exact":
            return self._open_blocks(adapter, states, steady)
        for kept in self.caches:
            kept.length = longest
        if self.cache_kind == "none" or all(plan.first for plan in plans):
            return [_Span(0, 0, plan.length) for plan in plans], longest
        if new := [row for row, plan in enumerate(plans) if plan.first]:
            self._refresh(adapter, new, [plans[row].length for row in new])
        lows = [max(0, plan.start - max(adapter.reach, int(self.shift))) for plan in plans]
        stops = [plan.length if self.cache_kind == "prefix" else plan.stop for plan in plans]
        spans = [_Span(low, low, stop) for low, stop in zip(lows, stops, strict=True)]
        return spans, max(stop - low for low, stop in zip(lows, stops, strict=True))

    def _refresh(self, adapter: DenoiserAdapter, rows: list[int], lengths: list[int]) -> None:
        """Compute whole rows that begin a block, for the caches of a batch in which others do not."""
        ends, longest = torch.tensor(lengths)[:, None].to(self.device), max(lengths)
        for cache, tokens in zip(self.caches, (self.tokens, self._blank()), strict=False):
            found = BlockCache(longest)
            found.row_end = longest if min(lengths) == longest else ends
            adapter.logits(tokens[rows, :longest], ends - 1, None, found)
            cache.take(rows, found, range(len(rows)))

    def _open_blocks(self, adapter: DenoiserAdapter, states: list[State], steady: bool) -> tuple[list[_Span], int]:
        """Prefill what rows are more than a block behind, and open the exact caches for a forward of the current blocks, and of
        those before them that are not kept yet."""
        spans = [state.request.model_block(state.plan.start) for state in states]
        kept = self._kept()
        behind = [
            row
            for row, (state, (begin, _)) in enumerate(zip(states, spans, strict=True))
            if begin > kept[row] and (not state.steps or begin - kept[row] > self.block_size)
        ]
        for cache, tokens in zip(self.caches, (self.tokens, self._blank()), strict=False):
            for begin in {spans[row][0] for row in behind}:
                self._prefill(adapter, cache, tokens, [row for row in behind if spans[row][0] == begin], begin)
        kept = self._kept()
        length = max(stop - min(begin, own) for own, (begin, stop) in zip(kept, spans, strict=True))
        if steady and len(states) * 2 * self.block_size <= _SMALL_SPANS:
            length = 2 * self.block_size
        for cache in self.caches:
            cache.open(spans, length, steady=steady)
        return [_Span(stop - length, own, stop, begin) for own, (begin, stop) in zip(kept, spans, strict=True)], length

    def _kept(self) -> list[int]:
        """Tokens of each row that all its exact caches hold."""
        return [min(own) for own in zip(*(cache.kept for cache in self.caches), strict=True)]

    def _prefill(self, adapter: DenoiserAdapter, cache: PrefixCache, tokens: Tensor, rows: list[int], begin: int) -> None:
        """Compute the finished blocks in front of rows."""
        texts = [tuple(row) for row in tokens[rows, :begin].tolist()]
        found = compute_prefixes(adapter, texts, self.block_size, self.device)
        for one in {id(one): one for one, _ in found.values()}.values():
            pairs = [(row, found[text][1]) for row, text in zip(rows, texts, strict=True) if found[text][0] is one]
            cache.take([row for row, _ in pairs], one, [source for _, source in pairs])

    def _blank(self) -> Tensor:
        """The canvases without their given tokens, for the unconditional branch of guidance."""
        return self.tokens.masked_fill(~self.editable, self.mask_id)

    def _shape(self, plans: list[StepPlan], spans: list[_Span], count: int, span: int, steady: bool) -> _Shape:
        lengths, window = {plan.length for plan in plans}, max(plan.stop - plan.start for plan in plans)
        if steady:
            count = round_width(count, window, len(plans))
        if self.fixed:  # whole rows, with a mask even where no row is padded
            width = fixed_width(max(lengths))
            return _Shape(fixed_count(count, width), width, True, width, width)
        shape = _Shape(count, max(lengths), len(lengths) > 1, min(max(count, window), max(lengths)), span)
        if self.cache_kind == "exact":
            one = self.caches[0]
            return shape._replace(apart=not one.alike, joins=one.joins)
        return shape._replace(apart=not all(plan.first for plan in plans) and len(set(spans)) > 1)

    def _forward(self, adapter: DenoiserAdapter, control: Tensor, shape: _Shape, steady: bool) -> None:
        if steady:
            self.graphs.run(shape, control, lambda given: self._compute(adapter, given, shape))
        else:
            self._compute(adapter, control, shape)
        if self.cache_kind == "exact":
            for cache in self.caches:
                cache.keep()

    def _place(self, shape: _Shape, length: Tensor, low: Tensor, first: Tensor, stop: Tensor, begins: Tensor) -> None:
        """Tell the caches where the spans lie, (B, 1) each."""
        for cache in self.caches:
            if self.cache_kind == "exact":
                if shape.apart:
                    cache.place(low, first, stop, begins)
                continue
            cache.row_end = length if shape.padded else shape.width
            if shape.apart:
                cache.place(low, first, stop)
            else:
                cache.place(0 if shape.span == shape.width else low[0, 0])

    def _compute(self, adapter: DenoiserAdapter, control: Tensor, shape: _Shape) -> None:
        """Everything of a step that runs on the device, without waiting for it."""
        step, begin, stop, length, counts, quota, low, *kept = control[:, :, None]  # (B, 1) each
        self._place(shape, length, low, *kept)
        window = begin.clamp_max(shape.width - shape.window) + counter(shape.window, self.device)
        inside = (window >= begin) & (window < stop)
        ranks = self.priority.gather(1, window).masked_fill(~(inside & self.open.gather(1, window)), math.inf)
        positions = window.gather(1, ranks.argsort(dim=1, stable=True)[:, : shape.n])  # (B, n)
        valid = counter(shape.n, self.device) < counts
        queried = (positions - 1).clamp_min(0) if self.shift else positions
        query = _Query(self.tokens[:, : shape.width], queried, length[:, 0] if shape.padded else None, shape.span, low)
        tokens, score, sure, judged = self._propose(adapter, query, positions, step)
        taken = self._take(score, sure, valid, quota)
        if self.constrained:
            keys = cast(Tensor, fold(self.keys[:, None], step, positions))
            chosen = {"keys": keys, "positions": positions, "taken": taken, "tokens": tokens, "sure": sure}
            for (policy, _), logits, rows in zip(self.groups, judged, self.constrained_rows, strict=True):
                fit_tokens(policy, logits, rows, **chosen)
        self._commit(positions, taken, tokens, sure)

    def _propose(self, adapter: DenoiserAdapter, query: _Query, positions: Tensor, step: Tensor) -> _Proposal:
        """Draw a token for every position."""
        conditional = self._logits(adapter, query, 0)
        found, judged = [], []
        for (policy, rows), logged in zip(self.groups, self.logged, strict=True):
            logits = conditional[rows]
            if policy.guidance:
                blank = self._blank()[rows, : query.tokens.shape[1]]
                lengths = None if query.lengths is None else query.lengths[rows]
                unconditional = query._replace(tokens=blank, positions=query.positions[rows], lengths=lengths)
                logits = guide(logits, self._logits(adapter, unconditional, 1), policy.guidance)
            logits = logits.index_fill_(-1, self._forbidden(policy, logits.shape[-1], adapter.barred), -math.inf)
            if self.logprobs is not None and logged:
                self.logprobs.read(rows, logits)
            if policy.repetition_penalty != 1:
                exempt = [self.mask_id, *([] if policy.eos_id is None else [policy.eos_id])]
                logits = penalise(logits, query.tokens[rows], policy.repetition_penalty, exempt)
            needed = policy.temperature > 0 or policy.order_temperature > 0
            keys = fold(self.keys[rows][:, None], step[rows], positions[rows]) if needed else None
            found.append(self._score(policy, logits, cast("Tensor | None", keys)))
            judged += [logits] if self.constrained else []
        if len(found) == 1:
            return _Proposal(*found[0], judged)
        order = torch.cat([rows for _, rows in self.groups]).argsort()
        tokens, score, sure = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
        return _Proposal(tokens, score, sure, judged)

    def _score(self, policy: Policy, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return score_candidates(policy, logits, keys)

    def _logits(self, adapter: DenoiserAdapter, query: _Query, branch: int) -> Tensor:
        if self.cache_kind == "none":
            return adapter.logits(query.tokens, query.positions, query.lengths, None)
        inside = (query.positions - query.low).clamp(0, query.span - 1)  # logits of positions outside are never read
        span = (query.low + counter(query.span, self.device)).clamp(0, query.tokens.shape[1] - 1)
        return adapter.logits(query.tokens.gather(1, span), inside, None, self.caches[branch])

    def _forbidden(self, policy: Policy, vocab: int, barred: Sequence[int]) -> Tensor:
        if policy not in self.forbidden:
            ids = [*policy.suppressed, *([self.mask_id] if self.mask_id < vocab else []), *barred]
            for name, given in (("suppressed", ids), ("last_ids", policy.last_ids)):
                if any(not 0 <= token < vocab for token in given):
                    raise SamplingError(f"{name} = {getattr(policy, name)}: ids must be below the vocabulary size {vocab}")
            if len(set(ids)) >= vocab:
                raise SamplingError(f"suppressed: leaves none of the vocabulary's {vocab} tokens; suppress fewer")
            self.forbidden[policy] = torch.tensor(ids, dtype=torch.int64).to(self.device)
        return self.forbidden[policy]

    def _take(self, score: Tensor, sure: Tensor, valid: Tensor, quota: Tensor) -> Tensor:
        """(B, n): the `quota` best of each row, ties to the left, and every position that reaches the threshold."""
        order = score.masked_fill(~valid, -math.inf).argsort(dim=1, descending=True, stable=True)
        best = (counter(score.shape[1], self.device) < quota).expand(score.shape)
        taken = torch.zeros_like(valid).scatter_(1, order, best)
        for policy, rows in self.groups:
            if policy.threshold is not None:
                taken[rows] |= (sure[rows] >= policy.threshold) & (score[rows] > -math.inf)  # -inf: one of its last_ids
        return taken & valid

    def _commit(self, positions: Tensor, taken: Tensor, proposal: Tensor, sure: Tensor) -> None:
        self.committed.zero_().scatter_(1, positions, taken)
        for mine, new in ((self.tokens, proposal), (self.confidence, sure)):
            mine.scatter_(1, positions, torch.where(taken, new.to(mine.dtype), mine.gather(1, positions)))
        if self.logprobs is not None:
            self.logprobs.write(positions, taken, proposal)
        self.open &= ~self.committed
        self.report[0] = self.committed.sum(1)
        self.report[2] += (taken & sure.isnan()).sum(1)
        for policy, rows in self.groups:
            if policy.eos_id is not None:
                self._end_rows(rows, policy.eos_id)

    def _end_rows(self, rows: Any, eos_id: int) -> None:
        """End rows with nothing open before their first EOS; whatever they wrote after it becomes EOS too."""
        everywhere = counter(self.width, self.device)
        tokens, editable, open_ = self.tokens[rows], self.editable[rows], self.open[rows]
        first_end, first_open = (
            everywhere.expand(tokens.shape).masked_fill(~found, self.width).amin(1)
            for found in ((tokens == eos_id) & editable, open_)
        )
        ended = first_end < first_open
        beyond = ended[:, None] & editable & (everywhere > first_end[:, None])
        self.tokens[rows] = tokens.masked_fill(beyond, eos_id)
        self.open[rows] = open_ & ~beyond
        self.report[1, rows] = ended.to(torch.int64)

    def _move_on(self, states: list[State], plans: list[StepPlan]) -> None:
        """Plan the next step of each row. Reads from the device only where a plan needs the outcome."""
        reads = any(state.policy.threshold is not None or state.policy.eos_id is not None for state in states)
        nothing = [0] * len(plans)
        counts, ended, lost = self.report.tolist() if reads else ([plan.quota for plan in plans], nothing, nothing)
        for state, plan, committed, over in zip(states, plans, counts, ended, strict=True):
            state.steps += plan.n_predicted > 0
            state.forwards += plan.n_predicted > 0
            if over and state.policy.eos_id is not None:
                state.end()
            else:
                state.advance(committed)
        if not reads and any(state.done for state in states):
            lost = self.report[2].tolist()
        if any(lost):
            rows = [state for state, bad in zip(states, lost, strict=True) if bad]
            for state in rows:
                state.end()
            raise ModelError(rows)


@functools.lru_cache(maxsize=256)
def scoring_policy(policy: Policy) -> Policy:
    """Keep only the fields that matter once a step is planned; rows that agree in them are scored together."""
    return replace(policy, steps=None, schedule="linear", last_time=1.0, speculate=None, draft="linear")
