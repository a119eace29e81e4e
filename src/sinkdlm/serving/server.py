"""Run a server: engines for the models, a socket, a uvicorn server, and an orderly shutdown.

On SIGTERM or SIGINT new requests get 503 while accepted ones finish; then the process ends with status 0. A deadline cuts
what is not done and read by then. A second signal ends it at once.
"""

import asyncio
import ipaddress
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import UserError
from sinkdlm.serving.app import make_app
from sinkdlm.serving.connection import IDLE, Connection, raw
from sinkdlm.serving.engine import Capacity, Engine, FairLock, cache_room
from sinkdlm.serving.problems import ApiError
from sinkdlm.serving.served import Limits, Served
from sinkdlm.serving.site import Metrics, Settings, Site
from sinkdlm.text.prompts import check_bos

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048  # connections that the system holds until they are taken
_MOST = 1024  # connections; fewer where the process may not open so many files
_AT_ONCE = 16  # of them that are taken in one go
_PAUSE = 0.1  # seconds, after which a connection may be taken that could not be
_DRAIN = 10.0  # seconds beyond the time of a request
_FLUSH = 3  # seconds in which last answers are read
_FULL = raw(ApiError(503, "too many connections; try again later", code="busy", retry_after=1))


class Server(uvicorn.Server):
    """The uvicorn server of a site. ready: called once it accepts requests."""

    def __init__(self, site: Site, ready: Callable[[], None] = lambda: None) -> None:
        # One parser and one loop, whatever else is installed. Warnings are about what clients send: they could fill a log.
        given: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "ws": "none", "loop": "asyncio"}
        given |= {"http": Connection, "timeout_keep_alive": IDLE, "timeout_graceful_shutdown": 2 * _FLUSH}
        super().__init__(uvicorn.Config(make_app(site), **given))
        self._site, self._ready = site, ready
        self._drain = _DRAIN + max(served.engine.capacity.seconds for served in site.models.values())
        self._deadline: float | None = None
        self._taking: list[asyncio.Task[None]] = []
        self._most = most_connections()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to drain. uvicorn's own handler closes the socket at once and ends the process by the signal."""
        if self._site.draining:
            self.should_exit = self.force_exit = True
        self._site.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._taking = [asyncio.create_task(self._take(bound)) for bound in sockets or ()]
        self._ready()

    async def _take(self, bound: socket.socket) -> None:
        """Accept connections. asyncio's own way logs a failure thousands of times a second when no file can be opened."""
        loop = asyncio.get_running_loop()
        bound.setblocking(False)
        while True:
            try:
                found = [(await loop.sock_accept(bound))[0]]
            except OSError:
                self._make_room(_AT_ONCE)
                await asyncio.sleep(_PAUSE)
                continue
            with suppress(OSError):  # no more are there
                while len(found) < _AT_ONCE:
                    found.append(bound.accept()[0])
            n_beyond = len(self.server_state.connections) + len(found) - self._most
            n_taken = len(found) - max(0, n_beyond - self._make_room(n_beyond))
            for refused in found[max(0, n_taken) :]:
                with refused, suppress(OSError):
                    refused.send(_FULL)
            made = (loop.connect_accepted_socket(self._connection, taken) for taken in found[: max(0, n_taken)])
            await asyncio.gather(asyncio.sleep(0), *made, return_exceptions=True)  # a client that has left fails alone

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    def _make_room(self, n: int) -> int:
        """Cut n connections that have been idle for longest, first those that never asked; return how many there were."""
        idle = [connection for connection in self._connections() if connection.idle] if n > 0 else []
        idle.sort(key=lambda connection: (connection.cycle is not None, connection.since))
        for connection in idle[:n]:
            connection.transport.abort()
        return len(idle[: max(n, 0)])

    async def on_tick(self, counter: int) -> bool:
        now, draining = time.monotonic(), self._site.draining
        if counter % 10 == 0:  # a tick is 0.1 s
            for connection in self._connections():
                connection.check(now, draining=draining)
        if draining:
            self._deadline = self._deadline or now + self._drain
            if not self._site.n_inside or now > self._deadline:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._taking:
            task.cancel()
        asyncio.get_running_loop().call_later(_FLUSH, self._cut_all)
        await super().shutdown(sockets)

    def _cut_all(self) -> None:
        for connection in self._connections():
            connection.transport.abort()


def most_connections() -> int:
    """Three quarters of the files that the process may open, and never more than enough."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else min(_MOST, files * 3 // 4)


def make_site(
    models: Mapping[str, Loaded],
    capacity: Capacity,
    limits: Limits,
    settings: Settings,
    *,
    deterministic: bool = False,
    bos: bool | None = None,
) -> Site:
    """Make an engine for each model. They share the device and take turns on it."""
    metrics, lock = Metrics(), FairLock()
    if len(models) > 1:  # they share the memory too
        device = next(iter(models.values())).model.embed.weight.device
        room = cache_room(device) if capacity.cache_bytes is None else capacity.cache_bytes
        capacity = replace(capacity, cache_bytes=room // len(models))
    served = {}
    for name, lm in models.items():
        check_bos(lm.tokenizer, bos)
        lm.model.requires_grad_(False).eval()
        engine = Engine(
            lm.model,
            capacity,
            deterministic=deterministic,
            lock=lock,
            stepped=partial(metrics.stepped, name),
            name=f"engine {name}",
            barred=absent_ids(lm.tokenizer, lm.config.vocab_size),
        )
        metrics.watch(name, engine)
        served[name] = Served(name, lm, engine, limits, bos)
    return Site(served, metrics, settings)


def bind(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as failure:
        raise UserError(f"--host {host} --port {port}: cannot be bound: {failure.strerror}; choose another") from None


def is_local(bound: socket.socket) -> bool:
    """Whether this machine alone can reach it."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(site: Site, bound: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal, then finish accepted requests."""
    Server(site, ready).run(sockets=[bound])
    for served in site.models.values():
        served.engine.close(_DRAIN)
