"""Serve models on a Ray cluster: replicas behind one OpenAI address. It needs pip install 'sinkdlm[serve,ray]'.

    python launch/ray_serve.py CKPT [CKPT2] --replicas 4 [--cpu] [--deterministic] [--port 8000] ...

Without --address it starts a cluster of this machine alone and serves until a signal. With --address auto, on a node of a cluster,
it deploys and ends; the same command again replaces the replicas one after the other, without losing a request.

A request goes to a replica with a short queue. When a replica dies, its requests are made again on others: every request has a
seed, so the answer is the same (with --deterministic, always). What a stream has sent is not sent again.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

APP, REPLICA = "sinkdlm", "replica"
ATTEMPTS = 10  # replicas that may die of one request before it is refused
_WRITES = ("/v1/completions", "/v1/chat/completions")


class LostError(Exception):
    """The replica of a request has died, or has ended its answer too early."""


# -- what is not said twice -------------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """What the client of a stream has got. `rest` takes each event of an attempt and returns what is new in it."""

    head: dict[str, Any] = field(default_factory=dict)  # id and creation time: those of the first attempt
    n_said: Counter[Any] = field(default_factory=Counter)
    n_seen: Counter[Any] = field(default_factory=Counter)  # of this attempt

    def rest(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in event:
            return event
        self.head = self.head or {name: event[name] for name in ("id", "created")}
        event = event | self.head
        if frame := (event.get("sinkdlm") or {}).get("frame"):
            return event if self._new(("frame", frame["choice"]), 1) else None
        if not event["choices"]:
            return event
        choices = [choice for choice in map(self._choice, event["choices"]) if choice is not None]
        return {**event, "choices": choices} if choices else None

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index, delta = choice["index"], choice.get("delta")
        text = choice.get("text", "") if delta is None else delta.get("content", "")
        n_text = self._new(("text", index), len(text))
        logprobs, n_logged = choice.get("logprobs"), 0
        if logprobs:
            lists = {name: entries for name, entries in logprobs.items() if isinstance(entries, list)}
            n_logged = self._new(("logprobs", index), len(next(iter(lists.values()))))
            choice = {**choice, "logprobs": {**logprobs, **{name: own[len(own) - n_logged :] for name, own in lists.items()}}}
        new_role = delta is not None and "role" in delta and self._new(("role", index), 1)
        ends = choice["finish_reason"] is not None and self._new(("end", index), 1)
        if not (n_text or n_logged or new_role or ends):
            return None
        text = text[len(text) - n_text :]
        if delta is None:
            return {**choice, "text": text}
        kept = {name: value for name, value in delta.items() if name != "role" or new_role}
        return {**choice, "delta": kept | ({"content": text} if "content" in delta else {})}

    def _new(self, what: Any, n: int) -> int:
        """How many of n more have not been said."""
        self.n_seen[what] += n
        new = min(n, max(0, self.n_seen[what] - self.n_said[what]))
        self.n_said[what] += new
        return new


async def tell(attempt: Callable[[], AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """The events of a stream that is made again where its replica dies. attempt: raises LostError then."""
    said = Said()
    for _ in range(ATTEMPTS):
        said.n_seen.clear()
        try:
            async for part in attempt():
                for text in filter(None, part.decode().split("\n\n")):
                    data = text.removeprefix("data: ")
                    if text.startswith(":") or data == "[DONE]":
                        yield f"{text}\n\n".encode()
                    elif (event := said.rest(json.loads(data))) is not None:
                        yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
                    if data == "[DONE]":
                        return
        except LostError:
            continue
    yield f"data: {json.dumps(_died())}\n\ndata: [DONE]\n\n".encode()


def _died() -> dict[str, Any]:
    message = f"{ATTEMPTS} replicas died while they worked on this request"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "replicas_died"}}


def seeded(body: bytes) -> tuple[bytes, bool]:
    """The request with a seed, so that it can be made again, and whether it asks for a stream. Replicas refuse what is wrong."""
    from sinkdlm.serving.bodies import parse

    try:
        asked = parse(body)
    except ValueError:
        return body, False
    if not isinstance(asked, dict):
        return body, False
    if asked.get("seed") is None:
        asked["seed"] = secrets.randbits(63)
    return json.dumps(asked).encode(), asked.get("stream") is True


# -- replicas ---------------------------------------------------------------------------------------------------------------------


class Replica:
    """The server of `sinkdlm serve`, without a socket."""

    def __init__(self, job: dict[str, Any]) -> None:
        os.chdir(job["folder"])
        self._site = make_site(job)
        from sinkdlm.serving.app import make_app

        self._app = make_app(self._site)

    def check_health(self) -> None:
        if not all(served.engine.alive for served in self._site.models.values()):
            raise RuntimeError("an engine has stopped")

    async def answer(self, method: str, path: str, query: str, body: bytes) -> AsyncIterator[Any]:
        """Yield the status and headers, then the parts of the body."""
        parts: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query.encode(),
            "headers": [(b"host", b"replica"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "client": None, "server": None,
        }  # fmt: skip
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            return await asyncio.Future()  # a client that leaves cancels all of it

        async def work() -> None:
            try:
                await self._app(scope, receive, parts.put)
            finally:
                await parts.put(None)

        working = asyncio.create_task(work())
        try:
            while (part := await parts.get()) is not None:
                if part["type"] == "http.response.start":
                    yield part["status"], [(key.decode(), value.decode()) for key, value in part["headers"]]
                elif part.get("body"):
                    yield part["body"]
        finally:
            working.cancel()


def make_site(job: dict[str, Any]) -> Any:
    from sinkdlm.cli.loading import choose_device, load_model, name_models
    from sinkdlm.serving.engine import Capacity
    from sinkdlm.serving.served import Limits
    from sinkdlm.serving.server import make_site
    from sinkdlm.serving.site import Settings

    paths, place = job["models"], choose_device("cpu" if job["cpu"] else None)
    models = {
        name: load_model(path, place, job["dtype"], writes=True) for name, path in zip(name_models(paths), paths, strict=True)
    }
    capacity = Capacity(rows=job["max_batch"], waiting=job["max_queue"], seconds=job["timeout"])
    settings = Settings(frame_bytes=0, lenient=job["lenient"])  # frames of a request would lie in one replica
    return make_site(models, capacity, Limits(), settings, deterministic=job["deterministic"])


# -- the door ---------------------------------------------------------------------------------------------------------------------


class Door:
    """What clients talk to: keys and sizes are checked here, requests go to replicas, and are made again where one dies."""

    def __init__(self, ask: Callable[..., AsyncIterator[Any]], site: Any, timeout: float) -> None:
        self._ask, self._site, self._timeout = ask, site, timeout

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        from sinkdlm.serving.guard import Guard
        from sinkdlm.serving.problems import ApiError

        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        app.add_middleware(Guard, site=self._site)

        async def fail(request: Any, failure: Any) -> Any:
            if isinstance(failure, HTTPException):
                failure = ApiError(failure.status_code, f"{request.method} {request.url.path}: {failure.detail}")
            return failure.response()

        for kind in (ApiError, HTTPException):
            app.add_exception_handler(kind, fail)
        return app

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, Response, StreamingResponse

        from sinkdlm.serving.problems import ApiError

        path, body, streams = request.url.path, await request.body(), False
        if path == "/metrics":
            return Response(self._site.metrics.text(), media_type="text/plain; version=1.0.0; charset=utf-8")
        if path.startswith("/v1/inspect"):
            raise ApiError(404, "requests are not kept behind several replicas; use sinkdlm serve to inspect them")
        if path in _WRITES:
            body, streams = seeded(body)
        asked = (request.method, path, request.url.query, body)
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(ATTEMPTS):
                    try:
                        found = self._ask(*asked)
                        status, headers = await anext(found)
                        if streams and status == 200:
                            return StreamingResponse(tell(self._again(asked, found)), status, dict(headers))
                        return Response(b"".join([part async for part in found]), status, dict(headers))
                    except LostError:
                        continue
        except TimeoutError:
            raise ApiError(504, f"not done within {self._timeout:g} s", code="timeout") from None
        return JSONResponse(_died(), 503)

    def _again(self, asked: Any, first: AsyncIterator[Any]) -> Callable[[], AsyncIterator[bytes]]:
        """Attempts of a stream whose first is begun."""
        begun: list[AsyncIterator[Any]] = [first]

        async def attempt() -> AsyncIterator[bytes]:
            found = begun.pop() if begun else self._ask(*asked)
            async for part in found:
                if isinstance(part, bytes):  # not the status, which is sent
                    yield part
            raise LostError  # before [DONE]

        return attempt


def asks(handle: Any) -> Callable[..., AsyncIterator[Any]]:
    """Ask a replica through Ray Serve's router, which compares queues."""
    import ray
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    from sinkdlm.serving.problems import ApiError

    async def ask(*asked: Any) -> AsyncIterator[Any]:
        parts = handle.options(method_name="answer", stream=True).remote(*asked)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        except BackPressureError:
            raise ApiError(429, "too many requests are waiting; try again later", retry_after=1) from None
        except DeploymentUnavailableError as failure:
            raise ApiError(503, "no replica could be started", code="no_replica", retry_after=10) from failure
        except (ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError):
            raise
        except ray.exceptions.RayError:
            raise LostError from None
        finally:
            if not ended:
                parts.cancel()

    return ask


def deploy(job: dict[str, Any]) -> Any:
    """The application: doors in front of replicas."""
    from ray import serve

    def build() -> Any:
        from sinkdlm.serving.server import LOOPBACK
        from sinkdlm.serving.site import Metrics, Settings, Site

        hosts = frozenset(LOOPBACK) if job["local"] and not job["api_key"] else None
        site = Site({}, Metrics(), Settings(api_key=job["api_key"], hosts=hosts))
        return Door(asks(serve.get_deployment_handle(REPLICA, APP)), site, job["timeout"]).app()

    limits: dict[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 30.0}
    limits["logging_config"] = {"enable_access_log": False}
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        num_replicas=job["replicas"],
        max_ongoing_requests=job["max_batch"],
        max_queued_requests=job["max_queue"],
        graceful_shutdown_timeout_s=job["timeout"] + 10,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": job["cpus"], "num_gpus": 0 if job["cpu"] else job["gpus"]},
        **limits,
    )
    # Ray starts no door without what it is bound to.
    return serve.deployment(
        serve.ingress(build)(), name="door", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}, **limits
    ).bind(replica.bind(job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="CKPT", help="one or two checkpoints, under paths that all hosts share")
    parser.add_argument("--address", help="a running cluster: auto on one of its nodes, or HOST:PORT of its head")
    parser.add_argument("--replicas", type=int, default=1, help="processes that hold the models (1)")
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of a replica (1); a share where several fit on one")
    parser.add_argument("--cpus", type=float, default=1, help="cores of a replica, which are its threads too (1)")
    parser.add_argument("--cpu", action="store_true", help="without GPUs")
    parser.add_argument("--host", default="127.0.0.1", help="address of the doors, one on every node with replicas (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port of the doors (8000)")
    parser.add_argument(
        "--api-key", default=os.environ.get("SINKDLM_API_KEY"), help="key that clients must send; or SINKDLM_API_KEY"
    )
    parser.add_argument("--allow-anyone", action="store_true", help="serve other machines without a key")
    parser.add_argument("--max-batch", type=int, default=64, help="requests of a replica at the same time (64)")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait; the next gets status 429 (256)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a request may take, with all its attempts (300)")
    parser.add_argument("--dtype", default="auto", help="as in sinkdlm serve (auto)")
    parser.add_argument("--deterministic", action="store_true", help="answers do not depend on other requests, to the last bit")
    parser.add_argument("--lenient", action="store_true", help="leave out request fields of other servers")
    given = parser.parse_args()

    local = given.host in ("127.0.0.1", "::1", "localhost")
    if not (local or given.api_key or given.allow_anyone):
        sys.exit(
            f"sinkdlm: --host {given.host}: anybody who reaches it could use this server; set --api-key, or give --allow-anyone"
        )
    try:
        import ray
        from ray import serve

        import sinkdlm.serving.server  # noqa: F401
    except ImportError as failure:
        sys.exit(f"sinkdlm: {failure}; pip install 'sinkdlm[serve,ray]'")
    job = vars(given) | {"local": local, "folder": str(Path.cwd())}
    alone = given.address is None
    ray.init(address="local", include_dashboard=False) if alone else ray.init(address=given.address)
    serve.start(http_options={"host": given.host, "port": given.port})
    serve.run(deploy(job), name=APP)
    where = f"http://{given.host}:{given.port} by {given.replicas} replicas of the cluster {ray.get_runtime_context().gcs_address}"
    print(f"serving {', '.join(given.models)} at {where}", flush=True)
    if alone:
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
