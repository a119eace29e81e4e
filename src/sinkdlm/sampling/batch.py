"""One denoising step of a batch of rows: query the denoiser, draw candidates, commit the best.

`Batch.advance` takes the plans of its rows (requests.py) and runs, on the device: choose positions, `_propose` a token for each
(drawing.py), `_take` the best, `_commit` them; `_move_on` then plans the next step of each row. Rows of any length, policy and
progress share a batch; no row's result depends on the others. Takes a denoiser; knows no model.

A step waits for a GPU only where the next plan needs its outcome: how many positions passed a threshold, whether a row has ended
with EOS, or the confidences for remasking. Steps of repeating shapes are captured as CUDA graphs and replayed.

B rows of a batch, T canvas, n positions predicted in a row, V vocabulary.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sinkdlm.errors import ModelError, SamplingError
from sinkdlm.kernels.cuda_graph import StepGraphs, can_capture, round_width
from sinkdlm.kernels.sampling import keep_eager
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.drawing import guide, score_candidates
from sinkdlm.sampling.prefix_cache import PrefixCache
from sinkdlm.sampling.requests import State, StepPlan, reveal_times
from sinkdlm.sampling.unmasking import PLANNED_ORDERS, Policy

Denoise = Callable[..., Tensor]


class BlockCache:
    """Keys and values of whole rows, kept from a block's first step for its later ones: approximate, as in Fast-dLLM.

    The first forward covers whole rows of `length` and fills it; later ones replace a span from `start`, and the rest stays as it
    was when the block began. The sink lane is not cached here: it is exact with or without a cache. The model calls `join`; a fast
    block writes into `rows`. start: index of the span's first token; a () tensor where only the device knows it.
    B rows, K key/value heads, T tokens, D head width.
    """

    def __init__(self, length: int) -> None:
        self.start: int | Tensor = 0
        self.length = length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values (B, K, S + T, D)
        keep_eager(self, "join")  # in a compiled block it would be recompiled for every start

    def rows(self, layer: int, k: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """The layer's key and value buffers, for keys like k (B, K, any, D), with room for the sinks in front.

        They stay in place as long as the cache lives: captured steps write to them.
        """
        if layer not in self._layers:
            shape = (*k.shape[:2], n_sinks + self.length, k.shape[3])
            self._layers[layer] = (k.new_empty(shape), k.new_empty(shape))
        return self._layers[layer]

    def join(self, layer: int, k: Tensor, v: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """Store the span's rotated keys and values (B, K, span, D); return those of the whole row, without the sinks'."""
        positions = torch.arange(n_sinks, n_sinks + k.shape[2], device=k.device) + self.start
        whole = self.rows(layer, k, n_sinks)
        for mine, span in zip(whole, (k, v), strict=True):
            mine.index_copy_(2, positions, span)
        return whole[0][:, :, n_sinks:], whole[1][:, :, n_sinks:]

    @classmethod
    def collect(cls, rows: "Sequence[tuple[BlockCache, int]]") -> "BlockCache":
        """Build one cache from single rows of others, all of one length."""
        found = cls(rows[0][0].length)
        for layer in rows[0][0]._layers:
            k, v = (torch.stack([cache._layers[layer][part][row] for cache, row in rows]) for part in (0, 1))
            found._layers[layer] = (k, v)
        return found


class DenoiserAdapter:
    """Give every denoiser one interface. Only ours take lengths=, where= (positions (B, n) -> logits (B, n, V)) and cache=."""

    def __init__(self, denoiser: Denoise) -> None:
        names: Any = ()
        with contextlib.suppress(TypeError, ValueError):
            names = inspect.signature(denoiser).parameters
        self.call = denoiser
        self.takes_lengths, self.takes_where, self.takes_cache = (name in names for name in ("lengths", "where", "cache"))
        self.takes_cache &= getattr(denoiser, "cacheable", True)
        self.block_size: int | None = getattr(denoiser, "block_size", None)  # of block diffusion
        self.reach = int(getattr(denoiser, "reach", 0))  # tokens to the left of a span that its forward also needs
        self.capturable = bool(getattr(denoiser, "capturable", False))
        self.barred: Sequence[int] = getattr(denoiser, "barred", ())  # ids that are never written
        self.pace: Any = None  # speculation.Pace

    @classmethod
    def of(cls, denoiser: "Denoise | DenoiserAdapter") -> "DenoiserAdapter":
        return denoiser if isinstance(denoiser, DenoiserAdapter) else cls(denoiser)

    def logits(self, tokens: Tensor, positions: Tensor, lengths: Tensor | None, cache: Any) -> Tensor:
        """Logits (B, n, V) in a tensor that the caller may overwrite."""
        given = {name: value for name, value in (("lengths", lengths), ("cache", cache)) if value is not None}
        if self.takes_where:
            return self.call(tokens, where=positions, **given)
        logits = self.call(tokens, **given)
        return logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))


class _Shape(NamedTuple):
    """Everything that fixes the shapes of a step's tensors, known on the host."""

    n: int  # positions of each row that are predicted
    width: int  # tokens of the longest row
    padded: bool  # whether rows differ in length
    span: int  # tokens that the forward computes; fewer than all with a cache, after a block's first step


class _Query(NamedTuple):
    """One call of the denoiser: logits at positions (B, n) of tokens (B, T). low: start of the span, on the device; (B, 1) where
    rows have their own."""

    tokens: Tensor
    positions: Tensor
    lengths: Tensor | None
    span: int
    low: Tensor


class Batch:
    """Rows that share a forward, and their tokens as long as they stay together. Holds no states: a reference cycle would keep the
    memory alive."""

    def __init__(self, states: list[State], device: torch.device) -> None:
        policies = [scoring_policy(state.policy) for state in states]
        self.n_rows, self.device = len(states), device
        self.mask_id, self.cache_kind, self.shift = states[0].request.mask_id, policies[0].cache, policies[0].shift
        self.width = max(len(state.request.canvas) for state in states)
        self.keys = torch.tensor([state.key for state in states], dtype=torch.uint64).view(torch.int64).to(device)
        # Each policy with the rows that it scores: all, or an index of them.
        alike: dict[Policy, Any] = {}
        for row, policy in enumerate(policies):
            alike.setdefault(policy, []).append(row)
        self.groups: list[tuple[Policy, Any]] = [(policies[0], slice(None))]
        if len(alike) > 1:
            self.groups = [(policy, torch.tensor(rows).to(device)) for policy, rows in alike.items()]
        self.caches: list[Any] = []
        self.block_size = states[0].request.block_size or 1  # of block diffusion, where it is read
        if self.cache_kind == "exact":
            olds = [state.batch for state in states]
            members = [
                [None if old is None else (old.caches[branch], state.row) for old, state in zip(olds, states, strict=True)]
                for branch in range(2 if policies[0].guidance else 1)
            ]
            self.caches = [PrefixCache.collect(rows, self.block_size, self.width) for rows in members]
        elif self.cache_kind != "none" and not states[0].plan.first:
            members = [[(cache, state.row) for cache in state.batch.caches] for state in states]
            self.caches = [BlockCache.collect(branch) for branch in zip(*members, strict=True)]
        self._collect(states)
        # The lowest comes first: latest reveal time where noise decides the order, else by position (the sort is stable).
        planned = torch.tensor([[policy.order in PLANNED_ORDERS] for policy in policies]).to(device)
        self.priority = -reveal_times(self.keys[:, None], self.width) * planned
        self.remasked = torch.tensor([[policy.remask != "none"] for policy in policies]).to(device)
        self.forbidden: dict[Policy, Tensor] = {}
        self.graphs = StepGraphs(device)
        for row, state in enumerate(states):
            state.batch, state.row, state.passed = self, row, []

    @classmethod
    def of(cls, states: list[State], device: torch.device) -> "Batch":
        """Return the rows' common batch if no row has joined or left it; else make a new one."""
        old: Batch | None = states[0].batch
        if type(old) is not cls or [(old, row) for row in range(old.n_rows)] != [(state.batch, state.row) for state in states]:
            return cls(states, device)
        return old

    def _collect(self, states: list[State]) -> None:
        """Lay out the canvases and copy the rows' progress from their old batches. All are (B, T), the report (3, B)."""
        canvases = [torch.tensor(state.request.canvas) for state in states]
        tokens = torch.nn.utils.rnn.pad_sequence(canvases, batch_first=True, padding_value=-1)
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
            self.report[2, here] = old.report[2, there]

    def advance(self, states: list[State], adapter: DenoiserAdapter) -> None:
        plans = [state.plan for state in states]
        lows, span = self._open_span(adapter, states)
        if any(plan.reveal is not None for plan in plans):  # ReMDM: the positions that this step reveals come first
            revealed = self._mark([plan.reveal or () for plan in plans])
            self.priority.copy_(torch.where(self.remasked, (~revealed).double(), self.priority))
        count = max(plan.n_predicted for plan in plans)
        if count:
            control = torch.tensor([(*plan[:6], low) for plan, low in zip(plans, lows, strict=True)]).T.contiguous()  # (7, B)
            self._forward(adapter, plans, control.to(self.device, non_blocking=True), count, span)
        else:
            self.committed.zero_()
        if any(plan.remask for plan in plans):
            again = self._mark([plan.remask for plan in plans])
            self.tokens.masked_fill_(again, self.mask_id)
            self.confidence.masked_fill_(again, math.nan)
            self.open |= again
        self._move_on(states, plans)

    def _mark(self, rows: list[tuple[int, ...]]) -> Tensor:
        """(B, T): True at the given positions of each row."""
        marked = torch.zeros(self.tokens.shape, dtype=torch.bool)
        for row, positions in enumerate(rows):
            marked[row, list(positions)] = True
        return marked.to(self.device)

    def _open_span(self, adapter: DenoiserAdapter, states: list[State]) -> tuple[list[int], int]:
        """Starts of the rows' spans in the next forward, and their length: whole rows, or what a cache does not hold."""
        plan = states[0].plan
        if self.cache_kind == "exact":
            return self._open_blocks(adapter, states)
        if self.cache_kind == "none" or plan.first:
            return [0] * len(states), plan.length
        low = max(0, plan.start - max(adapter.reach, int(self.shift)))
        return [low] * len(states), (plan.length if self.cache_kind == "prefix" else plan.stop) - low

    def _open_blocks(self, adapter: DenoiserAdapter, states: list[State]) -> tuple[list[int], int]:
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
        length = max(stop - min(begin, kept[row]) for row, (begin, stop) in enumerate(spans))
        for cache in self.caches:
            cache.open(spans, length, self.device)
        return [stop - length for _, stop in spans], length

    def _kept(self) -> list[int]:
        """Tokens of each row that all its exact caches hold."""
        return [min(own) for own in zip(*(cache.kept for cache in self.caches), strict=True)]

    def _prefill(self, adapter: DenoiserAdapter, cache: PrefixCache, tokens: Tensor, rows: list[int], begin: int) -> None:
        """Compute the finished blocks in front of rows; equal ones once."""
        texts = [tuple(row) for row in tokens[rows, :begin].tolist()]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        found = PrefixCache(cache.block_size, len(numbers), begin)
        found.open([(begin, begin)] * len(numbers), begin, self.device)
        last = torch.full((len(numbers), 1), begin - 1, device=self.device)
        adapter.logits(torch.tensor(list(numbers)).to(self.device), last, None, found)
        found.keep()
        cache.take(rows, found, [numbers[text] for text in texts])

    def _blank(self) -> Tensor:
        """The canvases without their given tokens, for the unconditional branch of guidance."""
        return self.tokens.masked_fill(~self.editable, self.mask_id)

    def _forward(self, adapter: DenoiserAdapter, plans: list[StepPlan], control: Tensor, count: int, span: int) -> None:
        lengths = {plan.length for plan in plans}
        capturing = adapter.capturable and can_capture(self.device) and self.cache_kind != "exact"
        if capturing:
            count = round_width(count, max(plan.stop - plan.start for plan in plans), len(plans))
        shape = _Shape(count, max(lengths), len(lengths) > 1, span)
        if capturing:
            self.graphs.run(shape, control, lambda given: self._compute(adapter, given, shape))
        else:
            self._compute(adapter, control, shape)

    def _compute(self, adapter: DenoiserAdapter, control: Tensor, shape: _Shape) -> None:
        """Everything of a step that runs on the device, without waiting for it."""
        step, begin, stop, length, counts, quota, low = control[:, :, None]  # (B, 1) each
        everywhere = counter(shape.width, self.device)
        eligible = self.open[:, : shape.width] & (everywhere >= begin) & (everywhere < stop)
        ranks = self.priority[:, : shape.width].masked_fill(~eligible, math.inf)
        positions = ranks.argsort(dim=1, stable=True)[:, : shape.n]  # (B, n)
        valid = counter(shape.n, self.device) < counts
        queried = (positions - 1).clamp_min(0) if self.shift else positions
        start = low if self.cache_kind == "exact" else low[0, 0]
        query = _Query(self.tokens[:, : shape.width], queried, length[:, 0] if shape.padded else None, shape.span, start)
        proposal, score, sure = self._propose(adapter, query, positions, step)
        self._commit(positions, self._take(score, sure, valid, quota), proposal, sure)

    def _propose(self, adapter: DenoiserAdapter, query: _Query, positions: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for every position: tokens, scores to order them by, and probabilities, (B, n) each."""
        conditional = self._logits(adapter, query, 0)
        found = []
        for policy, rows in self.groups:
            logits = conditional[rows]
            if policy.guidance:
                blank = self._blank()[rows, : query.tokens.shape[1]]
                lengths = None if query.lengths is None else query.lengths[rows]
                unconditional = query._replace(tokens=blank, positions=query.positions[rows], lengths=lengths)
                logits = guide(logits, self._logits(adapter, unconditional, 1), policy.guidance)
            logits = logits.index_fill_(-1, self._forbidden(policy, logits.shape[-1], adapter.barred), -math.inf)
            needed = policy.temperature > 0 or policy.order_temperature > 0
            keys = fold(self.keys[rows][:, None], step[rows], positions[rows]) if needed else None
            found.append(self._score(policy, logits, cast("Tensor | None", keys)))
        if len(found) == 1:
            return found[0]
        order = torch.cat([rows for _, rows in self.groups]).argsort()
        proposal, score, sure = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
        return proposal, score, sure

    def _score(self, policy: Policy, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return score_candidates(policy, logits, keys)

    def _logits(self, adapter: DenoiserAdapter, query: _Query, branch: int) -> Tensor:
        if self.cache_kind == "none":
            return adapter.logits(query.tokens, query.positions, query.lengths, None)
        inside = (query.positions - query.low).clamp(0, query.span - 1)  # logits of positions outside are never read
        span = query.low + counter(query.span, self.device)
        if self.cache_kind == "exact":
            logits = adapter.logits(query.tokens.gather(1, span.clamp_min(0)), inside, None, self.caches[branch])
            self.caches[branch].keep()
            return logits
        if query.span == query.tokens.shape[1]:
            if branch == len(self.caches) or self.caches[branch].length != query.span:
                self.caches[branch:] = [BlockCache(query.span)]
            self.caches[branch].start = 0
            return adapter.logits(query.tokens, query.positions, None, self.caches[branch])
        self.caches[branch].start = query.low
        return adapter.logits(query.tokens.index_select(1, span), inside, None, self.caches[branch])

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
