"""One client's connection: how long it may keep the server waiting, and errors of protocol as OpenAI's clients know them.

Knows no route. The server (server.py) checks its connections once a second.
"""

import asyncio
import math
import time
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sinkdlm.serving.engine import LONGEST_RETRY
from sinkdlm.serving.problems import ApiError

# Longer than any Retry-After: to a client, a connection that closes as it is used again is an error.
IDLE = LONGEST_RETRY + 15  # seconds between an answer and the next request
_HEAD = 10.0  # seconds for the head of a request
_STALL, _STALL_DRAINING = 20.0, 5.0  # seconds in which a client must read some of its answer
_SOME = 1 << 14  # bytes


class Connection(H11Protocol):
    """since: when the client last did what it is its turn to do."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since, self._last = time.monotonic(), self._turn()

    def _turn(self) -> tuple[str, object] | None:
        """What the client is to do next, and how far it is; None where the server is to answer."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            return "read", unread // _SOME
        if self.cycle is None or (self.cycle.response_complete and self.conn.trailing_data[0]):
            return "head", self.cycle
        if self.cycle.response_complete:
            return "ask", self.cycle
        return ("body", self.cycle) if self.cycle.more_body else None  # guard.py limits its time

    @property
    def idle(self) -> bool:
        """Whether it can be cut for the sake of another: no answer is being made for it."""
        return self._turn() is not None

    def check(self, now: float, *, draining: bool) -> None:
        """Cut the connection of a client that does nothing. Closing it would wait for the client to read."""
        turn = self._turn()
        if turn is None or turn != self._last:
            self.since, self._last = now, turn
        seconds = {"head": _HEAD, "ask": IDLE, "read": _STALL_DRAINING if draining else _STALL}
        if turn is not None and now - self.since > seconds.get(turn[0], math.inf):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is half sent
            self.transport.write(raw(ApiError(400, f"{msg} Send HTTP/1.1 as RFC 9112 has it.")))
        self.transport.close()


def raw(problem: ApiError) -> bytes:
    """The answer to what never becomes a request."""
    answer = problem.response()
    first = f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()
    headers = [name + b": " + value for name, value in [*answer.raw_headers, (b"connection", b"close")]]
    return b"\r\n".join([first, *headers, b"", bytes(answer.body)])
