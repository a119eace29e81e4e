"""Check every request before it is read: its host, key and size, and whether the server is shutting down.

A plain ASGI layer, so that a handler learns at once that its client has left.
"""

import asyncio
import hmac
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sinkdlm.serving.problems import ApiError, shutting_down
from sinkdlm.serving.site import Site

_OPEN = ("/", "/health")  # without a key; and /page/, which asks for it
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/inspect", "/metrics", "/health", "/page")
_SLOW = 60.0  # seconds for a body to arrive
_LARGE, _PAUSE = 1 << 16, 0.01  # bytes of a body that holds the event loop up as it is parsed; seconds for others before it


class Guard:
    """Refuses a request by its host, key or size. The host matters without a key: another site's page can point its own name at
    127.0.0.1 and make a browser send requests here; only the Host header tells them apart."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app, self._site, self._settings = app, site, site.settings
        self._large = asyncio.Lock()  # large bodies are parsed one by one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._site.metrics.requests.labels(_path(scope["path"]), message["status"]).inc()
            await send(message)

        problem = self._problem(scope)
        if problem is not None:
            answer = problem.response()
            if problem.status == 400:
                answer.headers["connection"] = "close"
            await answer(scope, receive, count)
            return
        if scope["method"] == "HEAD":  # what GET answers; the server leaves the body out
            scope = {**scope, "method": "GET"}
        writes = scope["method"] == "POST"
        self._site.n_inside += writes
        try:
            await self._app(scope, self._measured(receive), count)
        finally:
            self._site.n_inside -= writes

    def _problem(self, scope: Scope) -> ApiError | None:
        headers, hosts, key = dict(scope["headers"]), self._settings.hosts, self._settings.api_key
        if hosts is not None and _host(headers) not in hosts:
            return ApiError(403, "this server answers to its own address only; start it with --api-key to serve under other names")
        path = scope["path"]
        is_open = key is None or path in _OPEN or path.startswith("/page/")
        if not is_open and not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {key}".encode()):
            return ApiError(401, "no API key, or a wrong one; send it as Authorization: Bearer KEY")
        if self._site.draining and scope["method"] == "POST":
            return shutting_down()
        if b"content-length" in headers and b"transfer-encoding" in headers:  # where would the next request begin?
            return ApiError(400, "a body has Content-Length or Transfer-Encoding, not both; send one of them")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._settings.most_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than the {self._settings.most_bytes} bytes that this server reads")

    def _measured(self, receive: Receive) -> Receive:
        """Pass the parts of the body on while it is neither too large nor too slow."""
        n_bytes, whole, end = 0, False, time.monotonic() + _SLOW

        async def take() -> Message:
            nonlocal n_bytes, whole
            if whole:  # only the client's leaving can follow
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            if message["type"] == "http.request":
                n_bytes += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if n_bytes > self._settings.most_bytes:
                    raise HTTPException(413, str(self._too_large()))
                if whole and n_bytes > _LARGE:
                    async with self._large:
                        await asyncio.sleep(_PAUSE)
            return message

        return take


def _host(headers: dict[bytes, bytes]) -> str:
    """Without its port: "[::1]:8000" is "::1"."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _path(path: str) -> str:
    """Reduce a path to one of few values, because it is a label of counters."""
    return next((known for known in _PATHS if path == known or path.startswith(f"{known}/")), "other")
