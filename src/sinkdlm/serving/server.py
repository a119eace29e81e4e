"""The process that serves: engines for the models, a socket, a uvicorn server, and an orderly shutdown.

On SIGTERM or SIGINT new requests get 503 while those inside are finished; then the process ends with status 0. A second signal ends
it at once.
"""

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import uvicorn

from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import UserError
from sinkdlm.serving.app import make_app
from sinkdlm.serving.engine import LONGEST_RETRY, Capacity, Engine, FairLock
from sinkdlm.serving.served import Limits, Served
from sinkdlm.serving.site import Metrics, Settings, Site
from sinkdlm.text.prompts import check_bos

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE = 15  # seconds
_BACKLOG = 2048  # connections that the system holds until they are taken


class Server(uvicorn.Server):
    """ready: called once requests are taken."""

    def __init__(self, site: Site, ready: Callable[[], None] = lambda: None) -> None:
        # A client that was told to come back finds its connection open: one that closes as it is used is an error to the client.
        idle = LONGEST_RETRY + _GRACE
        given: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(make_app(site), timeout_keep_alive=idle, **given))
        self._site, self._ready = site, ready

    def handle_exit(self, sig: int, frame: Any) -> None:
        """uvicorn's own closes the socket at once, and ends the process by the signal."""
        if self._site.draining:
            self.should_exit = self.force_exit = True
        self._site.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._site.draining and not self._site.n_inside:
            self.should_exit = True
        return await super().on_tick(counter)


def make_site(
    models: Mapping[str, Loaded],
    capacity: Capacity,
    limits: Limits,
    settings: Settings,
    *,
    deterministic: bool = False,
    bos: bool | None = None,
) -> Site:
    """Make an engine for each model. They share the device, and alternate in it."""
    metrics, lock = Metrics(), FairLock()
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


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(site: Site, bound: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal, and finish the requests inside."""
    Server(site, ready).run(sockets=[bound])
    for served in site.models.values():
        served.engine.close()
