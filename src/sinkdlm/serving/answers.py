"""Turn an engine's events into OpenAI's answers: whole, or as a stream of chunks and frames.

Owns the event loop's side of a request; its events come from the engine's thread.
"""

import asyncio
import json
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from sinkdlm.serving.engine import Event, Frame, Over, Ticket
from sinkdlm.serving.engine import Written as Tokens
from sinkdlm.serving.frames import RequestFrames
from sinkdlm.serving.logprobs import in_chat, in_completion
from sinkdlm.serving.problems import api_error
from sinkdlm.serving.schemas import Answer, ChatCompletion, Completion, FinishReason, Timing, Usage, Written
from sinkdlm.serving.served import Order, Served

_QUIET = 15.0  # seconds of silence before a stream sends a keep-alive line
_DIGITS = 4  # of a confidence
_SHORT = 1e-6  # least seconds by which a rate is taken
_AHEAD = 1 << 14  # tokens of events that wait for a client to read


class _Inbox:
    """Events on their way from the engine's thread to the event loop. Where a client reads more slowly than the model writes, it
    misses some of them, but none of a row's last step: what waits is bounded. keep: takes every frame, read or not."""

    def __init__(self, keep: Callable[[Frame], None] | None) -> None:
        self._loop, self._keep = asyncio.get_running_loop(), keep
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._n_tokens = 0

    def tell(self, events: list[Event]) -> None:
        """May be called in any thread."""
        self._loop.call_soon_threadsafe(self._put, events)

    def _put(self, events: list[Event]) -> None:
        done = {event.row for event in events if isinstance(event, Tokens) and event.done}
        for event in events:
            if self._keep is not None and isinstance(event, Frame):
                self._keep(event)
            if isinstance(event, Over):
                self._events.append(event)
            elif event.row in done or self._n_tokens < _AHEAD:
                self._events.append(event)
                self._n_tokens += len(event.tokens)
        self._arrived.set()

    async def take(self) -> Event | None:
        """None where nothing has happened for a while."""
        if not self._events:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), _QUIET)
            except TimeoutError:
                return None
        else:
            await asyncio.sleep(0)  # else a client that has left is not noticed before all that waits is written to it
        event = self._events.popleft()
        self._n_tokens -= 0 if isinstance(event, Over) else len(event.tokens)
        return event


class Exchange:
    """One request and its answer. finished: called once, when all rows are done."""

    def __init__(
        self,
        served: Served,
        order: Order,
        *,
        chat: bool,
        inspect: bool,
        finished: Callable[["Exchange"], None],
        ignored: list[str] | None = None,
    ) -> None:
        self.served, self.order, self.chat, self._finished, self._ignored = served, order, chat, finished, ignored
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.steps, self.forwards, self.accepted = ([0] * len(order.rows) for _ in range(3))
        self.log_weights: list[float | None] = [None] * len(order.rows)
        self._n_logged = [0] * len(order.rows)  # tokens whose log-probabilities are told
        self.frames = None
        if inspect:
            given = [row.canvas.index(row.mask_id) for row in order.rows]
            self.frames = RequestFrames(self.id, served.name, served.lm.config.mask_id, given, [[] for _ in order.rows])
        # The ticket holds only the inbox: if it held the exchange, the cycle would keep both until garbage is collected.
        self._inbox = _Inbox(self.frames.add if self.frames is not None else None)
        self.ticket: Ticket | None = None

    def submit(self, *, progress: bool, frames: bool) -> None:
        """Queue the request. Slow, since it plans every row: call it in another thread."""
        transcripts, frames = self.order.transcripts, frames or self.frames is not None
        ends = (lambda row, tokens: transcripts[row].stops_in(tokens)) if transcripts[0].stops else None
        ticket = Ticket(self.order.rows, self._inbox.tell, ends=ends, progress=progress, frames=frames)
        self.served.engine.submit(ticket)
        self.ticket = ticket

    def cancel(self) -> None:
        if self.ticket is not None:
            self.served.engine.cancel(self.ticket)

    async def events(self) -> AsyncIterator[Tokens | Frame | None]:
        """Yield events until all rows are done; None where nothing has happened for a while."""
        while True:
            event = await self._inbox.take()
            if isinstance(event, Over):
                if event.failure is not None:
                    raise api_error(event.failure)
                if self.frames is not None:
                    n_tokens = [transcript.n_tokens for transcript in self.order.transcripts]
                    self.frames.written = [*zip(self.forwards, self.accepted, n_tokens, strict=True)]
                self._finished(self)
                return
            if isinstance(event, Tokens):
                self.steps[event.row], self.forwards[event.row] = event.steps, event.forwards
                self.accepted[event.row] = event.accepted
                self.log_weights[event.row] = event.log_weight
            yield event

    async def answer(self) -> Answer:
        transcripts = self.order.transcripts
        logprobs: list[Any] = [None] * len(transcripts)
        async for event in self.events():
            if isinstance(event, Tokens) and event.done:
                transcripts[event.row].read(event.tokens, done=True)
                if event.logprobs is not None:
                    logprobs[event.row] = await asyncio.to_thread(self._log, event)
        choices = []
        for index, transcript in enumerate(transcripts):
            text = transcript.echo + transcript.text
            written = {"message": {"content": text}} if self.chat else {"text": text}
            choices.append({"index": index, "finish_reason": self._reason(index), "logprobs": logprobs[index], **written})
        kind: type[Answer] = ChatCompletion if self.chat else Completion
        return kind.model_validate({**self._head(), "choices": choices, "usage": self.usage(), "sinkdlm": self._written()})

    def usage(self) -> Usage:
        given, written = self.order.n_prompt_tokens, sum(transcript.n_tokens for transcript in self.order.transcripts)
        return Usage(prompt_tokens=given, completion_tokens=written, total_tokens=given + written)

    def _head(self) -> dict[str, Any]:
        served = self.served
        return {"id": self.id, "created": self.created, "model": served.name, "system_fingerprint": served.fingerprint}

    def _written(self) -> Written:
        policy, ticket, n_tokens = asdict(self.order.policy), self.ticket, self.usage().completion_tokens
        assert ticket is not None  # something is written
        if ticket.without_cache:
            policy["cache"] = "none"
        now = ticket.ended or time.monotonic()
        timing = Timing(
            queue_seconds=ticket.began - ticket.submitted,
            first_frame_seconds=(ticket.stepped or now) - ticket.submitted,
            seconds=now - ticket.submitted,
            tokens_per_second=n_tokens / max(now - ticket.began, _SHORT),
        )
        return Written(
            seed=self.order.seed,
            steps=self.steps,
            forwards=self.forwards,
            accepted=self.accepted,
            tokens_per_forward=n_tokens / max(1, sum(self.forwards)),
            timing=timing,
            policy=policy,
            inspect=self.frames is not None,
            ignored=self._ignored,
            log_weights=self.log_weights if self.order.rows[0].constraint is not None else None,
        )

    def _reason(self, row: int) -> FinishReason:
        return "stop" if self.order.transcripts[row].stopped else "length"

    async def stream(self, *, with_usage: bool, frames: bool) -> AsyncIterator[str]:
        """Lines of server-sent events. An error comes as an event of its own, since the status is sent by then."""
        try:
            for row, transcript in enumerate(self.order.transcripts):
                if self.chat or transcript.echo:
                    yield self._line([self._piece(row, transcript.echo, first=True)], with_usage)
            async for event in self.events():
                if event is None:
                    yield ": still writing\n\n"
                elif isinstance(event, Tokens):
                    new = self.order.transcripts[event.row].read(event.tokens, done=event.done)
                    before, logprobs = self._n_logged[event.row], self._log(event)
                    if new or self._n_logged[event.row] > before:
                        yield self._line([self._piece(event.row, new, logprobs=logprobs)], with_usage)
                    if event.done:
                        last = self._piece(event.row, "", reason=self._reason(event.row))
                        yield self._line([last], with_usage, **self._written().model_dump())
                elif frames:
                    yield self._line([], with_usage, frame=self._frame(event))
            if with_usage:
                yield self._line([], True, usage=self.usage().model_dump())
        except Exception as failure:
            yield f"data: {json.dumps(api_error(failure).body())}\n\n"
        yield "data: [DONE]\n\n"

    def _line(self, choices: list[dict[str, Any]], with_usage: bool, usage: Any = None, **ours: Any) -> str:
        """Make a line of the stream. usage: null in all but the last if the client asked for it, as in OpenAI's API."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body = {**self._head(), "object": kind, "choices": choices}
        if with_usage:
            body["usage"] = usage
        if ours:
            body["sinkdlm"] = ours
        return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"

    def _log(self, event: Tokens) -> Any:
        """The log-probabilities of tokens that the text shows and that were not told before; None where nobody asks."""
        if event.logprobs is None:
            return None
        transcript, name, start = self.order.transcripts[event.row], self.served.name_token, self._n_logged[event.row]
        stop = self._n_logged[event.row] = transcript.n_shown(event.tokens, done=event.done)
        found, tokens = event.logprobs.cut(start, stop), event.tokens[start:stop]
        if self.chat:
            return in_chat(found, tokens, name)
        return in_completion(found, tokens, transcript.offsets(event.tokens[:stop])[start:], name)

    def _piece(
        self, row: int, text: str, *, first: bool = False, reason: FinishReason | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        written: dict[str, Any] = {"text": text}
        if self.chat:
            delta = {} if reason is not None else {"content": text}
            written = {"delta": {"role": "assistant", **delta} if first else delta}
        return {"index": row, "logprobs": logprobs, "finish_reason": reason, **written}

    def _frame(self, frame: Frame) -> dict[str, Any]:
        """The whole canvas: ids and pieces of text, null where a token is still to be written."""
        mask_id = self.served.lm.config.mask_id
        tokens = [None if token == mask_id else token for token in frame.tokens]
        return {
            "choice": frame.row,
            "step": frame.steps,
            "tokens": tokens,
            "pieces": [None if token is None else self.served.piece(token) for token in tokens],
            "confidence": [None if math.isnan(sure) else round(sure, _DIGITS) for sure in frame.confidence],
        }
