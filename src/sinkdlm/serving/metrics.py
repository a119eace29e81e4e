"""What the server counts, in Prometheus' form. Each site has a registry of its own."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Gauges(Collector):
    """Read when they are asked for."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        waiting = GaugeMetricFamily("sinkdlm_waiting_requests", "Requests in the queue.", labels=["model"])
        running = GaugeMetricFamily("sinkdlm_running_rows", "Texts that are being written.", labels=["model"])
        for model, n_waiting, n_running in self._read():
            waiting.add_metric([model], n_waiting)
            running.add_metric([model], n_running)
        return [waiting, running]


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("sinkdlm_requests", "Answers by status.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "sinkdlm_request_seconds", "From a request's arrival to its end.", ["model"], buckets=_SECONDS, registry=registry
        )
        self.queued = Histogram(
            "sinkdlm_queue_seconds", "From a request's arrival to its first step.", ["model"], buckets=_SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("sinkdlm_prompt_tokens", "Tokens that were given.", ["model"], registry=registry)
        self.completion_tokens = Counter("sinkdlm_completion_tokens", "Tokens that were written.", ["model"], registry=registry)
        self.rows = Histogram("sinkdlm_batch_rows", "Texts in a step.", ["model"], buckets=_ROWS, registry=registry)
        self.step_seconds = Counter("sinkdlm_step_seconds", "Time spent in steps.", ["model"], registry=registry)

    def watch(self, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        """read: (model, requests that wait, rows that run) of every model."""
        self._registry.register(_Gauges(read))

    def stepping(self, model: str) -> Callable[[int, float], None]:
        """For an engine, which tells of every step."""
        rows, seconds = self.rows.labels(model), self.step_seconds.labels(model)

        def stepped(n_rows: int, taken: float) -> None:
            rows.observe(n_rows)
            seconds.inc(taken)

        return stepped

    def text(self) -> bytes:
        return generate_latest(self._registry)
