"""The rows of one forward: their tokens on a device, and one step of them.

Owns what happens between a denoiser and the canvases: which positions are asked for, what is drawn, what is committed. Rows of
other lengths, policies and ages share a batch; nothing that a row gets depends on the others. Takes a denoiser; knows no model.

A step waits for nothing on a GPU, unless a policy must know what it did: a threshold how many positions passed it, EOS whether it
stands, remasking by confidence how sure the tokens were. Where shapes repeat, its kernels are replayed as a CUDA graph.

B rows of a batch, T canvas, n positions of a row whose prediction is needed, V vocabulary.
"""

import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sinkdlm.errors import ModelError, SamplingError
from sinkdlm.kernels.cuda_graph import record_graph
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.block_cache import BlockCache
from sinkdlm.sampling.drawing import guide, judge
from sinkdlm.sampling.requests import State, Turn, reveal_times
from sinkdlm.sampling.unmasking import PLANNED_ORDERS, Policy

Denoise = Callable[..., Tensor]
_GRAPH_AFTER = 2  # steps of one shape before its kernels are recorded as a CUDA graph
_SMALL_BATCH = 4096  # positions up to which a GPU gains nothing from narrower predictions
_LEAST_WIDTH = 8  # positions of a row that are predicted at least, in larger batches


class _PlansOff:
    """For as long as anybody is inside, in whichever thread: the switch is the process's."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


# Where shapes hardly repeat: cuDNN's attention makes a plan for every new one, about 80 ms on an H200, longer than most forwards.
many_shapes = _PlansOff()


class Access:
    """A denoiser and what it can do. Only our own take lengths=, where= (positions (B, n) -> logits (B, n, V)) and cache=."""

    def __init__(self, denoiser: Denoise) -> None:
        try:
            names = set(inspect.signature(denoiser).parameters)
        except (TypeError, ValueError):
            names = set()
        self.call = denoiser
        self.takes_lengths, self.takes_where, self.takes_cache = (name in names for name in ("lengths", "where", "cache"))
        self.takes_cache &= getattr(denoiser, "cacheable", True)
        self.reach = int(getattr(denoiser, "reach", 0))  # tokens to the left that a span must have beside its own
        self.capturable = bool(getattr(denoiser, "capturable", False))
        self.barred: Sequence[int] = getattr(denoiser, "barred", ())  # ids that are never written

    @classmethod
    def of(cls, denoiser: "Denoise | Access") -> "Access":
        return denoiser if isinstance(denoiser, Access) else cls(denoiser)

    def logits(self, tokens: Tensor, places: Tensor, lengths: Tensor | None, cache: BlockCache | None) -> Tensor:
        """(B, n, V), a tensor of its own."""
        given: dict[str, Any] = {} if lengths is None else {"lengths": lengths}
        if cache is not None:
            given["cache"] = cache
        if self.takes_where:
            return self.call(tokens, where=places, **given)
        logits = self.call(tokens, **given)
        return logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))


# -- the rows of one forward --------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Rows of a batch that are judged alike; None: all of them."""

    policy: Policy
    rows: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[self.rows]


class _Span(NamedTuple):
    """The tokens that a forward computes. low is known to the host; kernels that are replayed read it on the device."""

    low: int
    size: int
    alone: bool  # without a cache


class _Ask(NamedTuple):
    """One question to the denoiser: places (B, n) of rows whose first `width` tokens count."""

    access: Access
    places: Tensor
    lengths: Tensor | None
    width: int
    span: _Span
    low: Tensor


class Batch:
    """Rows that are computed in one forward. It holds their tokens as long as they stay together."""

    def __init__(self, states: list[State], device: torch.device) -> None:
        self.states = states  # only during a call: states hold their batch, and a cycle would keep its memory
        self.n_rows = len(states)
        self.mask_id = states[0].request.mask_id
        self.device = device
        self.width = max(len(state.request.canvas) for state in states)
        self.keys = torch.stack([state.key for state in states]).to(device)
        self.caches = self._collect_caches()
        self.tokens, self.open, self.editable, self.confidence = self._collect_rows()
        self.committed = torch.zeros_like(self.open)
        # Tokens committed, whether EOS stands, whether a token was ever chosen by what is no number.
        self.report = self._collect_report()
        self.parts = self._split()
        self.planned = self._columns([float(state.policy.order in PLANNED_ORDERS) for state in states])
        self.priority = self._priorities()
        self.forbidden: dict[Policy, Tensor] = {}
        self.graphs: dict[Any, Any] = {}  # shape of a step -> times seen, its input, its replay
        self.pool: Any = None
        for row, state in enumerate(states):
            state.home, state.row = self, row
        self.states = []

    @classmethod
    def of(cls, states: list[State], device: torch.device) -> "Batch":
        """The batch these rows are in, if they are all of it; else a new one."""
        home = states[0].home
        together = home is not None and home.n_rows == len(states)
        if together and all(state.home is home and state.row == row for row, state in enumerate(states)):
            return cast(Batch, home)
        return cls(states, device)

    def _columns(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(self.device)[:, None]

    def _split(self) -> list[_Part]:
        policies = list(dict.fromkeys(judging(state.policy) for state in self.states))
        if len(policies) == 1:
            return [_Part(policies[0], None)]
        rows = [[row for row, state in enumerate(self.states) if judging(state.policy) == policy] for policy in policies]
        return [_Part(policy, torch.tensor(part).to(self.device)) for policy, part in zip(policies, rows, strict=True)]

    def _priorities(self) -> Tensor:
        """(B, T), least first: by the time of being revealed where noise decides, else by position alone (the sort is stable)."""
        if not any(state.policy.order in PLANNED_ORDERS for state in self.states):
            return torch.zeros(1, self.width, dtype=torch.float64, device=self.device)
        return -reveal_times(self.keys, self.width) * self.planned

    def _collect_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, open, editable and confidence, (B, T) each, from the canvases or from where the rows have been."""
        homes = {id(state.home): state.home for state in self.states}
        home = next(iter(homes.values()))
        if len(homes) == 1 and home is not None and home.width == self.width:
            rows = torch.tensor([state.row for state in self.states]).to(self.device)
            return home.tokens[rows], home.open[rows], home.editable[rows], home.confidence[rows]
        # Shorter canvases are filled up with [MASK] that is not open.
        canvases = [[*state.request.canvas, *[self.mask_id] * (self.width - len(state.request.canvas))] for state in self.states]
        tokens = torch.tensor(canvases)
        sizes = torch.tensor([len(state.request.canvas) for state in self.states])
        editable = (tokens == self.mask_id) & (torch.arange(self.width) < sizes[:, None])
        tokens, editable = tokens.to(self.device), editable.to(self.device)
        open_, confidence = editable.clone(), torch.full(tokens.shape, math.nan, device=self.device)
        for row, state in enumerate(self.states):
            if state.home is not None:
                span = min(self.width, state.home.width)
                for mine, theirs in ((tokens, "tokens"), (open_, "open"), (confidence, "confidence")):
                    mine[row, :span] = getattr(state.home, theirs)[state.row, :span]
        return tokens, open_, editable, confidence

    def _collect_report(self) -> Tensor:
        """(3, B): nothing yet, but what was chosen by no number before the rows came here."""
        report = torch.zeros(3, self.n_rows, dtype=torch.int64, device=self.device)
        homes = {id(state.home): state.home for state in self.states if state.home is not None}
        for home in homes.values():
            moved = [(row, state.row) for row, state in enumerate(self.states) if state.home is home]
            here, there = torch.tensor(moved).T.to(self.device)
            report[2, here] = home.report[2, there]
        return report

    def _collect_caches(self) -> list[BlockCache]:
        first = self.states[0]
        if first.policy.cache == "none" or first.turn is None or first.turn.first:
            return []
        return [
            BlockCache.collect([(state.home.caches[branch], state.row) for state in self.states])
            for branch in range(len(first.home.caches))
        ]

    # -- one step -----------------------------------------------------------------------------------------------------------------

    def advance(self, states: list[State], access: Access) -> None:
        self.states = states
        turns = [cast(Turn, state.turn) for state in self.states]
        span = self._span(access, turns[0])
        control = torch.tensor([(*turn.control(), span.low) for turn in turns]).T.contiguous()  # (7, B)
        if any(turn.reveal is not None for turn in turns):
            self._load_exchange(turns)
        count = max(turn.n_places for turn in turns)
        if count:
            self._forward(access, turns, control.to(self.device, non_blocking=True), count, span)
        else:
            self.committed.zero_()
        if any(turn.remask for turn in turns):
            self._mask_again(turns)
        self._tell(turns)
        self.states = []

    def _span(self, access: Access, turn: Turn) -> "_Span":
        """What the next forward computes of rows of this turn: with a cache, after a block's first step, not all of it."""
        policy = self.parts[0].policy
        if policy.cache == "none" or turn.first:
            return _Span(0, turn.length, policy.cache == "none")
        low = max(0, turn.start - max(access.reach, int(policy.shift)))
        return _Span(low, (turn.length if policy.cache == "prefix" else turn.stop) - low, False)

    def _forward(self, access: Access, turns: list[Turn], control: Tensor, count: int, span: "_Span") -> None:
        lengths = {turn.length for turn in turns}
        width, padded = max(lengths), len(lengths) > 1
        static = self._is_static(access)
        if static:
            count = _round_up(count, max(turn.stop - turn.start for turn in turns), len(turns))
        key = (count, width, padded, span.size)
        seen, control_seen, replay = self.graphs.get(key, (0, None, None))
        if replay is not None:
            control_seen.copy_(control)
            replay()
            return
        if static and seen == _GRAPH_AFTER:
            replay = self._record(lambda: self._compute(access, control, count, width, padded, span))
            self.graphs[key] = (seen, control, replay)
            replay()
            return
        self.graphs[key] = (seen + 1, None, None)
        self._compute(access, control, count, width, padded, span)

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """The kernels of a step as one CUDA graph. Graphs of a batch run one after another, so they share their memory."""
        pool, self.pool = self.pool or torch.cuda.graph_pool_handle(), None
        graph = record_graph(run, self.device, pool)
        self.pool = pool
        return graph.replay

    def _is_static(self, access: Access) -> bool:
        """Whether a step's kernels may be recorded: our denoiser, on a GPU; autocast keeps copies of its own."""
        return access.capturable and self.device.type == "cuda" and not torch.is_autocast_enabled("cuda")

    def _compute(self, access: Access, control: Tensor, count: int, width: int, padded: bool, span: "_Span") -> None:
        """Everything of a step that runs on the device, without waiting for it."""
        step, begin, stop, length, counts, quota, low = control[:, :, None]  # (B, 1) each
        positions = counter(width, self.device)
        eligible = self.open[:, :width] & (positions >= begin) & (positions < stop)
        ranks = self.priority[:, :width].expand(eligible.shape).masked_fill(~eligible, math.inf)
        places = ranks.argsort(dim=1, stable=True)[:, :count]  # (B, n)
        valid = counter(count, self.device) < counts
        lengths = length[:, 0] if padded else None
        predicted = self._predict(_Ask(access, places, lengths, width, span, low[0, 0]))
        proposal, score, sure = self._judge(predicted, places, step, access.barred)
        taken = self._take(score, sure, valid, quota)
        self._commit(places, taken, proposal, sure)

    def _predict(self, ask: "_Ask") -> list[Tensor]:
        """Logits of each part, (rows, n, V), guided where asked; nothing is forbidden yet."""
        if self.parts[0].policy.shift:
            ask = ask._replace(places=(ask.places - 1).clamp_min(0))
        conditional = self._logits(ask, self.tokens[:, : ask.width], 0)
        found = []
        for part in self.parts:
            logits = part.of(conditional)
            if part.policy.guidance:
                # The unconditional branch sees nothing that was given.
                blank = part.of(self.tokens.masked_fill(~self.editable, self.mask_id))[:, : ask.width]
                inside = None if ask.lengths is None else part.of(ask.lengths)
                unconditional = self._logits(ask._replace(places=part.of(ask.places), lengths=inside), blank, 1)
                logits = guide(logits, unconditional, part.policy.guidance)
            found.append(logits)
        return found

    def _logits(self, ask: "_Ask", tokens: Tensor, branch: int) -> Tensor:
        access, places, span = ask.access, ask.places, ask.span
        if span.alone:
            return access.logits(tokens, places, ask.lengths, None)
        if span.size == tokens.shape[1]:
            if branch == len(self.caches) or self.caches[branch].length != span.size:
                self.caches[branch:] = [BlockCache(span.size)]
            self.caches[branch].start = 0
            return access.logits(tokens, places, None, self.caches[branch])
        self.caches[branch].start = ask.low
        inside = (places - ask.low).clamp(0, span.size - 1)  # rows with fewer open positions ask for others too, which nobody reads
        here = tokens.index_select(1, ask.low + counter(span.size, self.device))
        return access.logits(here, inside, None, self.caches[branch])

    def _judge(self, predicted: list[Tensor], places: Tensor, step: Tensor, barred: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A token for every place, the order among them, and how sure each is: (B, n) each."""
        found = []
        for part, logits in zip(self.parts, predicted, strict=True):
            logits = logits.index_fill_(-1, self._forbidden(part.policy, logits, barred), -math.inf)
            keys = None
            if part.policy.temperature > 0:
                keys = fold(part.of(self.keys)[:, None], part.of(step), part.of(places))
            found.append(judge(part.policy, logits, cast("Tensor | None", keys)))
        if len(found) == 1:
            return found[0]
        whole = [torch.empty(places.shape, dtype=kind.dtype, device=self.device) for kind in found[0]]
        for part, values in zip(self.parts, found, strict=True):
            for mine, theirs in zip(whole, values, strict=True):
                mine[part.rows] = theirs.to(mine.dtype)
        return whole[0], whole[1], whole[2]

    def _forbidden(self, policy: Policy, logits: Tensor, barred: Sequence[int]) -> Tensor:
        if policy not in self.forbidden:
            vocab = logits.shape[-1]
            ids = [*policy.suppressed, *([self.mask_id] if self.mask_id < vocab else []), *barred]
            if any(not 0 <= token < vocab for token in ids):
                raise SamplingError(f"suppressed = {policy.suppressed}: ids are below the vocabulary's {vocab}")
            if len(set(ids)) >= vocab:
                raise SamplingError(f"suppressed: no token of the vocabulary of {vocab} is left")
            self.forbidden[policy] = torch.tensor(ids, dtype=torch.int64).to(self.device)
        return self.forbidden[policy]

    def _take(self, score: Tensor, sure: Tensor, valid: Tensor, quota: Tensor) -> Tensor:
        """(B, n): the `quota` best of each row, ties to the left, and whatever is as sure as the threshold."""
        order = score.masked_fill(~valid, -math.inf).argsort(dim=1, descending=True, stable=True)
        best = (counter(score.shape[1], self.device) < quota).expand(score.shape)
        taken = torch.zeros_like(valid).scatter_(1, order, best)
        for part in self.parts:
            if part.policy.threshold is not None:
                passed = part.of(taken) | (part.of(sure) >= part.policy.threshold)
                taken = passed if part.rows is None else taken.index_copy(0, part.rows, passed)
        return taken & valid

    def _commit(self, places: Tensor, taken: Tensor, proposal: Tensor, sure: Tensor) -> None:
        self.committed.zero_().scatter_(1, places, taken)
        self.tokens.scatter_(1, places, torch.where(taken, proposal, self.tokens.gather(1, places)))
        kept = self.confidence.gather(1, places)
        self.confidence.scatter_(1, places, torch.where(taken, sure.to(kept.dtype), kept))
        self.open &= ~self.committed
        self.report[0] = self.committed.sum(1)
        self.report[2] += (taken & sure.isnan()).sum(1)
        for part in self.parts:
            if part.policy.eos_id is not None:
                self._end_rows(part, part.policy.eos_id)

    def _end_rows(self, part: _Part, eos_id: int) -> None:
        """A row has ended where nothing is open before its first EOS; what it had written after it becomes EOS too."""
        positions = counter(self.width, self.device)
        tokens, editable, open_ = part.of(self.tokens), part.of(self.editable), part.of(self.open)
        first_end, first_open = (
            positions.expand(tokens.shape).masked_fill(~found, self.width).amin(1)
            for found in ((tokens == eos_id) & editable, open_)
        )
        ended = first_end < first_open
        beyond = ended[:, None] & editable & (positions > first_end[:, None])
        tokens, open_ = tokens.masked_fill(beyond, eos_id), open_ & ~beyond
        if part.rows is None:
            self.tokens.copy_(tokens)
            self.open.copy_(open_)
            self.report[1] = ended
        else:
            self.tokens[part.rows] = tokens
            self.open[part.rows] = open_
            self.report[1, part.rows] = ended.to(torch.int64)

    # -- around a step ------------------------------------------------------------------------------------------------------------

    def _load_exchange(self, turns: list[Turn]) -> None:
        """ReMDM's rows: the positions that this step reveals come first."""
        rows = [row for row, turn in enumerate(turns) if turn.reveal is not None]
        wanted = torch.full((len(rows), self.width), math.inf, dtype=torch.float64)
        for row, turn in enumerate(turns[row] for row in rows):
            wanted[row, list(turn.reveal or ())] = 0.0
        self.priority[torch.tensor(rows).to(self.device)] = wanted.to(self.device)

    def _mask_again(self, turns: list[Turn]) -> None:
        again = torch.zeros(self.tokens.shape, dtype=torch.bool)
        for row, turn in enumerate(turns):
            again[row, list(turn.remask)] = True
        again = again.to(self.device)
        self.tokens.masked_fill_(again, self.mask_id)
        self.confidence.masked_fill_(again, math.nan)
        self.open |= again

    def _tell(self, turns: list[Turn]) -> None:
        """Moves the states on. The device is asked only where a policy must know."""
        asks = any(state.policy.threshold is not None or state.policy.eos_id is not None for state in self.states)
        counts, ended, lost = self.report.tolist() if asks else ([turn.quota for turn in turns], *[[0] * len(turns)] * 2)
        for state, turn, committed, over in zip(self.states, turns, counts, ended, strict=True):
            state.steps += turn.n_places > 0
            if over and state.policy.eos_id is not None:
                state.end()
            else:
                state.advance(committed)
        if not asks and any(state.done for state in self.states):
            lost = self.report[2].tolist()
        if any(lost):
            rows = [state for state, bad in zip(self.states, lost, strict=True) if bad]
            for state in rows:
                state.end()
            raise ModelError(rows)


@functools.lru_cache(maxsize=256)
def judging(policy: Policy) -> Policy:
    """What of a policy matters once the turn is known."""
    return replace(policy, steps=None, schedule="linear", last_time=1.0)


def _round_up(count: int, most: int, rows: int) -> int:
    """Few widths, so that few graphs are recorded: quarters of the block, halves of the first; the whole where that is small."""
    if rows * most <= _SMALL_BATCH:
        return most
    unit = -(-most // 4)
    while count <= unit // 2 and unit > _LEAST_WIDTH:
        unit = -(-unit // 2)
    return min(most, -(-count // unit) * unit)
