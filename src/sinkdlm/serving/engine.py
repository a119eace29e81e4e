"""Continuous batching: one model, one bounded queue, and one thread that steps all requests that run.

Requests join and leave between steps, whatever their lengths, policies and progress. Owns admission, limits of time and size,
cancellation, and a shutdown that finishes accepted requests. Knows no HTTP, tokenizer or text: canvases in, tokens out.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from sinkdlm.errors import ModelError
from sinkdlm.kernels.cuda_graph import many_shapes
from sinkdlm.model.model import DiffusionLM
from sinkdlm.sampling import DenoiserAdapter, Request, State, start, step
from sinkdlm.sampling.logprobs import LogProbs
from sinkdlm.sampling.prefill import PrefixStore, missing_prefix, prefill
from sinkdlm.sampling.speculation import Speculator, most_canvases

_RECENT = 32  # finished requests from which the rate is taken
_FORWARD_TOKENS = 512  # fixed cost of a forward, in tokens: a rough figure for models of any size
_PREFILL_TOKENS = 512  # of prompts, computed between two steps, where those compute fewer
_CPU_CACHE = 4 << 30  # bytes for caches on a CPU
LONGEST_RETRY = 60  # most seconds that a client is told to wait
_log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """Refused: too many requests wait. retry_after: seconds until there should be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


class ClosedError(Exception):
    """Refused: the engine is shutting down."""


class ExpiredError(Exception):
    """A request took longer than it may."""


@dataclass(frozen=True)
class Capacity:
    rows: int = 64  # denoised at a time
    tokens: int = 16_384  # in a forward: rows times the longest of them; a single row may be longer
    waiting: int = 256  # requests that wait for a place
    queries: int = 16  # about finished requests, that may wait for an answer
    seconds: float = 300.0  # that a request may take, waiting included
    cache_bytes: int | None = None  # for keys and values kept between steps; None: half of a GPU's free memory, 4 GiB on a CPU


class Written(NamedTuple):
    """The tokens of a row that can no longer change; once `done`, all of them."""

    row: int
    tokens: list[int]
    done: bool
    steps: int
    forwards: int = 0
    logprobs: LogProbs | None = None  # of these tokens, where the request asks for them
    log_weight: float | None = None  # with a constraint
    accepted: int = 0  # tokens beyond those of one step per forward


class Frame(NamedTuple):
    """A whole row after a step; before the first, as it was given. confidence: NaN where nothing was written."""

    row: int
    steps: int
    tokens: list[int]
    confidence: list[float]


class Over(NamedTuple):
    """The last event of a ticket, with its failure, if any."""

    failure: Exception | None


Event = Written | Frame | Over


class _Row:
    """A canvas being written, in one gap from `first` to `stop`."""

    def __init__(self, ticket: "Ticket", index: int, state: State) -> None:
        canvas, mask_id = state.request.canvas, state.request.mask_id
        self.ticket, self.index, self.state = ticket, index, state
        self.first = canvas.index(mask_id)
        self.stop = self.first + list(canvas).count(mask_id)
        self.told = 0  # final tokens already told to the ticket


class Ticket:
    """A request of one or several rows.

    tell: takes the events of a step, in the engine's thread; must not block. ends(row, tokens): whether the row ends at its
    final tokens. progress, frames: whether to tell `Written` and `Frame` before a row is done.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tell: Callable[[list[Event]], object],
        *,
        ends: Callable[[int, list[int]], bool] | None = None,
        progress: bool = False,
        frames: bool = False,
    ) -> None:
        self.tell, self.ends, self.progress, self.frames = tell, ends, progress, frames
        self.pending = deque(_Row(self, index, state) for index, state in enumerate(start(requests)))
        self.n_left = len(self.pending)
        self.submitted = self.began = self.stepped = self.ended = 0.0  # times; stepped: after the first step
        self.deadline = math.inf
        self.over = False  # finished, failed, or nobody waits for it any longer
        self.without_cache = False  # whether its rows would need more memory for a cache than there is

    def leave_cache(self) -> None:
        """Before the first step."""
        self.without_cache = True
        for row in self.pending:
            row.state.leave_cache()

    def close(self) -> None:
        """Send no more events, and drop rows that will never begin: they hold the ticket and would keep it in memory."""
        self.over = True
        for row in self.pending:
            row.state.end()
        self.pending.clear()


def share_forwards(rows: Sequence[_Row], most_tokens: int) -> list[Sequence[_Row]]:
    """Group rows of similar length: padding the short ones to the longest must not cost more than another forward."""
    ordered = sorted(rows, key=_n_computed)  # stable, so that rows stay together from step to step
    found: list[Sequence[_Row]] = []
    for part in _cut(ordered):
        while part:
            begin = max(0, len(part) - max(1, most_tokens // _n_computed(part[-1])))
            found.append(part[begin:])
            part = part[:begin]
    return found


def _n_computed(row: _Row) -> int:
    """The most tokens of a row that its next forward computes."""
    state, size = row.state, row.state.request.block_size
    cache, block = state.policy.cache, state.policy.block
    if cache == "exact" and size is not None:  # the current block and the one before it; at first the prompt too
        return 2 * size + missing_prefix(state)
    return block if cache == "dual" and block is not None else state.length


def _cut(ordered: Sequence[_Row]) -> list[Sequence[_Row]]:
    longest = _n_computed(ordered[-1])
    saved, cut = max((cut * (longest - _n_computed(ordered[cut - 1])), cut) for cut in range(len(ordered)))
    return [ordered] if saved <= _FORWARD_TOKENS else _cut(ordered[:cut]) + _cut(ordered[cut:])


class FairLock:
    """A lock granted in the order of asking: engines that share a device alternate, and none starves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._now = 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._now == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._now += 1
            self._changed.notify_all()


def cache_room(device: torch.device) -> int:
    """Bytes for caches, where none are given."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _CPU_CACHE


class Engine:
    """A model with its queue and thread. stepped(rows, seconds): called after every step. barred: ids never written."""

    def __init__(
        self,
        model: DiffusionLM,
        capacity: Capacity | None = None,
        *,
        deterministic: bool = False,
        lock: FairLock | None = None,
        stepped: Callable[[int, float], None] = lambda rows, seconds: None,
        name: str = "engine",
        barred: Sequence[int] = (),
    ) -> None:
        self.capacity = capacity or Capacity()
        self.deterministic = deterministic
        self._model, self._lock, self._stepped, self.barred = model, lock or FairLock(), stepped, barred
        denoiser = model.denoiser(barred)
        self._device, self._adapter = denoiser.device, DenoiserAdapter(denoiser)
        self._adapter.speculator = Speculator(shared=True)  # rows come before guesses
        room = self.capacity.cache_bytes
        room = cache_room(self._device) if room is None else room
        self._cache_room, config = room - room // 4, model.config  # for rows; the rest for shared prompts
        self._token_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * model.embed.weight.element_size()
        if not deterministic:  # a row that finds its prompt would compute less than alone
            self._adapter.prefixes = PrefixStore(room // 4)
        self._changed = threading.Condition()
        self.waiting: deque[Ticket] = deque()
        self.running: list[_Row] = []
        self._queries: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._finished: deque[float] = deque(maxlen=_RECENT)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def check_room(self) -> None:
        """Raise what `submit` would raise now. Call it before a request costs anything."""
        self._check_open()
        if len(self.waiting) >= self.capacity.waiting:
            raise QueueFullError(self._retry_after())

    def _check_open(self) -> None:
        if self._closed or not self.alive:
            raise ClosedError("shutting down")

    def submit(self, ticket: Ticket) -> None:
        with self._changed:
            self.check_room()
            ticket.submitted = time.monotonic()
            ticket.deadline = ticket.submitted + self.capacity.seconds
            self.waiting.append(ticket)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket: its rows leave before the next step, and no events follow. Its place in the queue is free at once."""
        with self._changed:
            ticket.close()
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            self._changed.notify()

    def query(self, compute: Callable[[], Any]) -> "Future[Any]":
        """Run a function between two steps, in the engine's thread, which alone may use the model."""
        future: Future[Any] = Future()
        with self._changed:
            self._check_open()
            if len(self._queries) >= self.capacity.queries:
                raise QueueFullError(1)
            self._queries.append((future, compute))
            self._changed.notify()
        return future

    def close(self, timeout: float | None = None) -> bool:
        """Refuse new requests, finish accepted ones, and return whether that was done in time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self.alive

    def _retry_after(self) -> int:
        """Estimate the seconds that the queue will take, at the rate of the last requests."""
        if len(self._finished) < 2:
            return 1
        pace = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        return min(LONGEST_RETRY, max(1, math.ceil(pace * len(self.waiting))))

    def _work(self) -> None:
        try:
            with self._model.inference():
                while self._wait():
                    self._admit()
                    with self._lock:
                        self._answer_query()
                        self._advance()
                    self._report()
        except BaseException as failure:
            _log.exception("the engine stopped")
            with self._changed:
                self._closed = True
            self._abandon(failure if isinstance(failure, Exception) else RuntimeError("the engine stopped"))
            raise

    def _abandon(self, failure: Exception) -> None:
        """Fail everything that waits for an answer."""
        for ticket in self._tickets():
            self._end(ticket, failure)
        for future, _ in self._queries:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)

    def _tickets(self) -> dict[Ticket, None]:
        return dict.fromkeys([*self.waiting, *(row.ticket for row in self.running)])

    def _wait(self) -> bool:
        """Wait for something to do; False if the engine is closed and idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.waiting or self.running or self._queries)
            return bool(self.waiting or self.running or self._queries)

    def _admit(self) -> None:
        """Drop what is cancelled or took too long, then fill free slots in the order of arrival."""
        now = time.monotonic()
        begun = []
        with self._changed:
            for ticket in self._tickets():
                if ticket.deadline < now:
                    self._end(ticket, ExpiredError(f"not done within {self.capacity.seconds:g} s"))
            self._let_go()
            self.waiting = deque(ticket for ticket in self.waiting if not ticket.over)
            while self.waiting and len(self.running) < self.capacity.rows:
                ticket = self.waiting[0]
                if not ticket.began and any(self._goes_without(row) for row in ticket.pending):
                    ticket.leave_cache()
                if self._cache_bytes([*self.running, ticket.pending[0]]) > self._cache_room:
                    break  # until others are done
                begun.append(ticket.pending.popleft())
                self.running.append(begun[-1])
                ticket.began = ticket.began or now
                if not ticket.pending:
                    self.waiting.popleft()
        for row in begun:
            if row.ticket.frames:
                tokens = row.state.tokens.tolist()
                self._tell(row.ticket, [Frame(row.index, 0, tokens, [math.nan] * len(tokens))])

    def _goes_without(self, row: _Row) -> bool:
        """Whether a row that asks for a cache is written without one."""
        return self._cache_bytes([row]) > self._cache_room

    def _cache_bytes(self, rows: Sequence[_Row]) -> int:
        """Most memory of rows' caches: they share buffers of the longest row's length, copied when a row joins or leaves."""
        kept = [row.state for row in rows if row.state.policy.cache != "none"]
        widths = [len(state.request.canvas) for state in kept]
        branches = 2 if any(state.policy.guidance for state in kept) else 1
        n_canvases = sum(most_canvases(state.policy) for state in kept)
        return 2 * branches * self._token_bytes * n_canvases * max(widths, default=0)

    def _let_go(self) -> None:
        """Drop rows that are done or whose ticket is over: a state would keep its batch in memory."""
        for row in self.running:
            if row.ticket.over:
                row.state.end()
        self.running = [row for row in self.running if not row.state.done]

    def _answer_query(self) -> None:
        """Answer one query per step, so that queries do not hold up requests."""
        with self._changed:
            if not self._queries:
                return
            future, compute = self._queries.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(compute())
            except Exception as failure:
                future.set_exception(failure)

    def _advance(self) -> None:
        """Take one step of all rows, in as many forwards as their lengths need."""
        if not self.running:
            return
        began, n_rows = time.perf_counter(), len(self.running)
        with many_shapes:
            ready = self._prefill()
            for rows in share_forwards(ready, self.capacity.tokens) if ready else ():
                self._step(rows)
        self._stepped(n_rows, time.perf_counter() - began)

    def _prefill(self) -> list[_Row]:
        """Rows that take the next step. A long prompt is computed ahead of its row's first one, in parts: others go on between. At
        most as many tokens are computed as the step itself has, so that it takes no more than twice its time."""
        behind = {row: missing_prefix(row.state) for row in self.running}
        most = room = max(_PREFILL_TOKENS, sum(_n_computed(row) - missing for row, missing in behind.items()))
        ready = []
        for row, missing in behind.items():
            if missing <= room and not (missing and row.state.caches):
                room -= missing
                ready.append(row)
            elif room == most:
                room = 0
                try:
                    prefill(row.state, self._adapter, self._device, most)
                except Exception as failure:
                    self._end(row.ticket, failure)
        return ready

    def _step(self, rows: Sequence[_Row]) -> None:
        """Step rows together. If that fails, rows that have not taken the step take it alone; one that fails alone ends with that.

        A ModelError names the rows whose outputs were NaN: these end with it; the others of the forward have taken the step."""
        plans = [row.state.plan for row in rows]
        take = partial(step, denoiser=self._adapter, device=self._device, deterministic=self.deterministic)
        try:
            take([row.state for row in rows])
        except Exception as broken:
            lost = broken.rows if isinstance(broken, ModelError) else ()
            if not lost:
                _log.exception("a step of %d rows failed; each is tried alone", len(rows))
            for row, plan in zip(rows, plans, strict=True):
                if any(row.state is state for state in lost):
                    self._end(row.ticket, ModelError())  # without the states, which hold their batch
                elif row.state.plan is plan and not (row.state.done or row.ticket.over):
                    try:
                        take([row.state])
                    except Exception as failure:
                        self._end(row.ticket, failure)

    def _report(self) -> None:
        """Tell the tickets what the step did, and let finished rows go."""
        now = time.monotonic()
        for row in self.running:
            if row.state.steps:  # not where its prompt alone is computed
                row.ticket.stepped = row.ticket.stepped or now
        events: dict[Ticket, list[Event]] = {}
        for row, tokens, n_final, confidence in _views(self.running):
            events.setdefault(row.ticket, []).extend(self._events(row, tokens, n_final, confidence))
        self._let_go()  # first, so that listeners find the rows gone
        for ticket, told in events.items():
            self._tell(ticket, told)
            if not ticket.n_left:
                self._finished.append(time.monotonic())
                self._end(ticket, None)

    def _events(self, row: _Row, tokens: list[int], n_final: int, confidence: list[float]) -> Iterable[Event]:
        ticket, state = row.ticket, row.state
        written = tokens[row.first : row.first + n_final]
        if ticket.ends is not None and not state.done and n_final > row.told:
            try:
                if ticket.ends(row.index, written):
                    state.end()
            except Exception as failure:
                self._end(ticket, failure)
                return
        if ticket.frames:
            for place, plan, steps in state.passed[:-1]:  # a forward may have taken several steps
                seen = (values[place, : plan.length].tolist() for values in (state.batch.tokens, state.batch.confidence))
                yield Frame(row.index, steps, *seen)
            yield Frame(row.index, state.steps, tokens, confidence)
        if state.done or (ticket.progress and n_final > row.told):
            logprobs = None if state.request.logprobs is None else state.logprobs.cut(row.first, row.first + n_final)
            yield Written(row.index, written, state.done, state.steps, state.forwards, logprobs, state.log_weight, state.accepted)
        row.told = n_final
        ticket.n_left -= state.done

    def _end(self, ticket: Ticket, failure: Exception | None) -> None:
        with self._changed:
            ticket.ended = time.monotonic()
            self._tell(ticket, [Over(failure)])
            ticket.close()

    def _tell(self, ticket: Ticket, events: list[Event]) -> None:
        if events and not ticket.over:
            try:
                ticket.tell(events)
            except Exception:  # the listener is gone
                self.cancel(ticket)


def _views(rows: list[_Row]) -> Iterable[tuple[_Row, list[int], int, list[float]]]:
    """Yield rows with news: tokens, how many of the written ones are final, and confidences. One transfer per batch."""
    batches: dict[int, list[list[list[Any]]]] = {}
    with_frames = any(row.ticket.frames for row in rows)
    for row in rows:
        state, ticket = row.state, row.ticket
        if ticket.over or state.batch is None or not (state.done or ticket.progress or ticket.frames or ticket.ends):
            continue
        batch = state.batch
        if id(batch) not in batches:
            values = (batch.tokens, batch.open, batch.confidence if with_frames else batch.confidence[:, :0])
            batches[id(batch)] = [value.tolist() for value in values]
        tokens, still_open, sure = (value[state.row][: state.length] for value in batches[id(batch)])
        yield row, tokens, _n_final(row, still_open), sure


def _n_final(row: _Row, still_open: list[bool]) -> int:
    """Count final tokens: those before the first open one; where tokens may be masked again, those before the block."""
    stop = min(row.stop, len(still_open))
    if not row.state.done and row.state.policy.remask != "none":
        return min(stop, row.state.plan.start) - row.first
    return next((place for place in range(row.first, stop) if still_open[place]), stop) - row.first
