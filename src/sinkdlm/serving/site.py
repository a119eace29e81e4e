"""State that the parts of a server share: models, settings, counters, frames of finished requests, and whether it shuts down."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sinkdlm.serving.answers import Exchange
from sinkdlm.serving.engine import Engine
from sinkdlm.serving.frames import FrameStore
from sinkdlm.serving.problems import ApiError
from sinkdlm.serving.served import Served

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Settings:
    api_key: str | None = None
    hosts: frozenset[str] | None = None  # host names under which the server may be called; None: any
    origins: Sequence[str] = ()  # CORS: origins whose pages may read answers
    most_bytes: int = 1 << 20  # of a request's body
    frame_bytes: int = 64 << 20  # kept of finished requests
    frame_seconds: float = 600.0
    lenient: bool = False  # whether unknown fields are left out instead of refused


class Metrics:
    """Requests, tokens and steps for Prometheus. Each site has a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        of_model: dict[str, Any] = {"labelnames": ["model"], "registry": registry}
        self.requests = Counter("sinkdlm_requests", "Answers by status.", ["path", "status"], registry=registry)
        self.seconds = Histogram("sinkdlm_request_seconds", "Seconds from arrival to the last step.", buckets=_SECONDS, **of_model)
        self.queued = Histogram("sinkdlm_queue_seconds", "Seconds from arrival to the first step.", buckets=_SECONDS, **of_model)
        self.prompt_tokens = Counter("sinkdlm_prompt_tokens", "Tokens of prompts.", **of_model)
        self.completion_tokens = Counter("sinkdlm_completion_tokens", "Tokens written.", **of_model)
        self.rows = Histogram("sinkdlm_batch_rows", "Texts per step.", buckets=_ROWS, **of_model)
        self.step_seconds = Counter("sinkdlm_step_seconds", "Seconds spent in steps.", **of_model)
        self.waiting = Gauge("sinkdlm_waiting_requests", "Requests in the queue.", **of_model)
        self.running = Gauge("sinkdlm_running_rows", "Texts being written.", **of_model)

    def watch(self, model: str, engine: Engine) -> None:
        """Read the gauges of a model from its engine whenever they are collected."""
        self.waiting.labels(model).set_function(lambda: len(engine.waiting))
        self.running.labels(model).set_function(lambda: len(engine.running))

    def stepped(self, model: str, n_rows: int, seconds: float) -> None:
        self.rows.labels(model).observe(n_rows)
        self.step_seconds.labels(model).inc(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


@dataclass
class Site:
    models: dict[str, Served]
    metrics: Metrics
    settings: Settings
    draining: bool = False  # whether it refuses new requests
    n_inside: int = 0  # POST requests that are being answered

    def __post_init__(self) -> None:
        self.frames = FrameStore(self.settings.frame_bytes, self.settings.frame_seconds)

    def find(self, name: str) -> Served:
        if name not in self.models:
            there = ", ".join(self.models)
            raise ApiError(404, f"model {name!r}: not served here; there is {there}", code="model_not_found", param="model")
        return self.models[name]

    def finish(self, exchange: Exchange) -> None:
        name, ticket, usage = exchange.served.name, exchange.ticket, exchange.usage()
        self.metrics.prompt_tokens.labels(name).inc(usage.prompt_tokens)
        self.metrics.completion_tokens.labels(name).inc(usage.completion_tokens)
        if ticket is not None:
            self.metrics.seconds.labels(name).observe(ticket.ended - ticket.submitted)
            self.metrics.queued.labels(name).observe(ticket.began - ticket.submitted)
        if exchange.frames is not None:
            self.frames.add(exchange.frames)
