"""The HTTP API: OpenAI's routes for diffusion models, health, metrics, and inspection of finished requests.

A request passes guard.py, is parsed by bodies.py, checked by schemas.py, becomes canvases in served.py and tokens in engine.py,
and is answered by answers.py. No path that a client sends is ever looked up on disk: the page's files are read once, at the start.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from sinkdlm import __version__
from sinkdlm.errors import SamplingError
from sinkdlm.page.bundle import PAGE
from sinkdlm.serving import inspecting, problems
from sinkdlm.serving.answers import Exchange
from sinkdlm.serving.bodies import Route
from sinkdlm.serving.frames import size_of
from sinkdlm.serving.guard import Guard
from sinkdlm.serving.problems import RESPONSES
from sinkdlm.serving.schemas import Card, Cards, ChatCompletion, ChatRequest, Completion, CompletionRequest, Health, ignored
from sinkdlm.serving.served import Order
from sinkdlm.serving.site import Site

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
# The page may run its own modules and talk to this server, nothing else.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def make_app(site: Site) -> FastAPI:
    app = FastAPI(title="sinkdlm", version=__version__, docs_url=None, redoc_url=None, responses=RESPONSES)
    app.state.site = site
    app.router.route_class = Route
    problems.register(app)
    _serve_facts(app, site)
    _serve_answers(app, site)
    app.include_router(inspecting.router)
    _serve_page(app)
    app.add_middleware(Guard, site=site)
    if origins := list(site.settings.origins):  # outside the guard: a browser's preflight request has no key
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _serve_facts(app: FastAPI, site: Site) -> None:
    @app.get("/v1/models")
    def list_models() -> Cards:
        return Cards(data=[served.card() for served in site.models.values()])

    @app.get("/v1/models/{model}")
    def describe_model(model: str) -> Card:
        return site.find(model).card()

    @app.get("/health", responses={503: {"model": Health}})
    async def health() -> Response:  # not in a thread: all threads may be taken
        alive = all(served.engine.alive for served in site.models.values())
        report = Health(status="draining" if site.draining else "ok" if alive else "failed", models=list(site.models))
        return JSONResponse(report.model_dump(), 200 if report.status == "ok" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    def metrics() -> Response:
        return Response(site.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _serve_answers(app: FastAPI, site: Site) -> None:
    events: dict[str, Any] = {"text/event-stream": {}}

    @app.post("/v1/completions", responses={200: {"model": Completion, "content": events}})
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await _answer(site, body, request)

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": events}})
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(site, body, request)


async def _answer(site: Site, body: CompletionRequest | ChatRequest, request: Request) -> Response:
    served = site.find(body.model)
    served.engine.check_room()
    prepare: Any = served.chat if isinstance(body, ChatRequest) else served.complete
    order: Order = await run_in_threadpool(prepare, body)
    inspect, frames, is_chat = body.sinkdlm.inspect, body.sinkdlm.frames, isinstance(body, ChatRequest)
    size, most = size_of(((row.policy.steps or len(row.canvas)) + 1, len(row.canvas)) for row in order.rows), site.frames.most_bytes
    if inspect and size > most:
        raise SamplingError(f"sinkdlm.inspect: {size} bytes of frames, and this server keeps {most}; ask for fewer texts or steps")
    exchange = Exchange(served, order, chat=is_chat, inspect=inspect, finished=site.finish, ignored=ignored.get())
    try:
        await run_in_threadpool(exchange.submit, progress=bool(body.stream), frames=frames)
        if body.stream:
            return _Events(exchange, exchange.stream(with_usage=body.with_usage, frames=frames))
        return await _unless_client_leaves(request, exchange)
    except BaseException:
        exchange.cancel()
        raise


async def _unless_client_leaves(request: Request, exchange: Exchange) -> Response:
    answering = asyncio.ensure_future(exchange.answer())
    leaving = asyncio.ensure_future(request.receive())  # the body is read: only the client's leaving can follow
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return JSONResponse((await answering).model_dump())
        raise HTTPException(499, "the client left")  # nobody reads it
    finally:
        answering.cancel()
        leaving.cancel()


class _Events(StreamingResponse):
    """A stream that cancels its request when it ends, however it ends."""

    def __init__(self, exchange: Exchange, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._exchange = exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.cancel()


def _serve_page(app: FastAPI) -> None:
    """Serve the inspector where it is installed: / is its index.html, /page/NAME its other files."""
    names = [path for path in PAGE.rglob("*") if path.suffix in _KINDS] if PAGE.is_dir() else []
    files = {path.relative_to(PAGE).as_posix(): (path.read_bytes(), _KINDS[path.suffix]) for path in names}

    def send(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "nothing here; the API is under /v1")
        body, kind = files[name]
        return Response(body, media_type=kind, headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return send("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    def page(name: str) -> Response:
        return send(name)
