"""Count requests, tokens and steps for Prometheus. Each site has a registry of its own."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sinkdlm.serving.engine import Engine

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        of_model: dict[str, Any] = {"labelnames": ["model"], "registry": registry}
        self.requests = Counter("sinkdlm_requests", "Answers by status.", ["path", "status"], registry=registry)
        self.seconds = Histogram("sinkdlm_request_seconds", "From a request's arrival to its end.", buckets=_SECONDS, **of_model)
        self.queued = Histogram(
            "sinkdlm_queue_seconds", "From a request's arrival to its first step.", buckets=_SECONDS, **of_model
        )
        self.prompt_tokens = Counter("sinkdlm_prompt_tokens", "Tokens that were given.", **of_model)
        self.completion_tokens = Counter("sinkdlm_completion_tokens", "Tokens that were written.", **of_model)
        self.rows = Histogram("sinkdlm_batch_rows", "Texts in a step.", buckets=_ROWS, **of_model)
        self.step_seconds = Counter("sinkdlm_step_seconds", "Time spent in steps.", **of_model)
        self.waiting = Gauge("sinkdlm_waiting_requests", "Requests in the queue.", **of_model)
        self.running = Gauge("sinkdlm_running_rows", "Texts that are being written.", **of_model)

    def watch(self, model: str, engine: Engine) -> None:
        """Read the gauges of a model from its engine whenever they are collected."""
        self.waiting.labels(model).set_function(lambda: len(engine.waiting))
        self.running.labels(model).set_function(lambda: len(engine.running))

    def stepping(self, model: str) -> Callable[[int, float], None]:
        """What an engine calls after every step."""
        rows, seconds = self.rows.labels(model), self.step_seconds.labels(model)

        def stepped(n_rows: int, taken: float) -> None:
            rows.observe(n_rows)
            seconds.inc(taken)

        return stepped

    def text(self) -> bytes:
        return generate_latest(self._registry)
