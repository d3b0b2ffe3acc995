"""Figures of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.responses import Response

from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.serve.pool import SessionPool

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counts what a server does.

    Args:
        pool: whose queue is shown.
        depth: D, edges of the longest path of a tree; a round publishes at most D + 1 tokens.
    """

    def __init__(self, pool: SessionPool, *, depth: int) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = self._counter("requests", "Requests that have ended.", "endpoint", "status")
        self._answers = self._counter("answers", "Answers that have ended, cancelled ones as closed.", "finish_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._counter("cached_tokens", "Tokens of prompts that a session had kept.")
        self._generated_tokens = self._counter("generated_tokens", "Tokens of answers.")
        published = tuple(range(1, depth + 2))
        self._round_tokens = self._histogram(
            "round_tokens", "Tokens that a round published, its root included.", published
        )
        self._round_seconds = self._histogram(
            "round_seconds", "Wall time of a round.", (0.001, 0.0025, 0.005, *_SECONDS)
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request, its time in the queue included, to its first token.",
            _SECONDS,
        )
        self._queue_seconds = self._histogram("queue_seconds", "Time in the queue.", (0.001, *_SECONDS))
        self._request_seconds = self._histogram("request_seconds", "Wall time of a request.", _SECONDS, "endpoint")
        self._gauge("queue_depth", "Requests that wait for a session.").set_function(lambda: pool.waiting)
        self._gauge("running_answers", "Requests that have a session.").set_function(lambda: pool.running)

    def requested(self, endpoint: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(endpoint, str(status)).inc()
        self._request_seconds.labels(endpoint).observe(seconds)

    def queued(self, seconds: float) -> None:
        """A request has left the queue."""
        self._queue_seconds.observe(seconds)

    def begun(self, seconds: float) -> None:
        """An answer has its first token."""
        self._first_token.observe(seconds)

    def answered(self, generation: Generation) -> None:
        """An answer has ended."""
        self._answers.labels(generation.finish_reason).inc()
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._cached_tokens.inc(generation.cached_tokens)
        self._generated_tokens.inc(generation.generated_tokens)
        for published, seconds in zip(generation.published_per_round, generation.round_seconds, strict=True):
            self._round_tokens.observe(published)
            self._round_seconds.observe(seconds)

    def failed(self) -> None:
        """An answer was ended by an error."""
        self._answers.labels("error").inc()

    def response(self) -> Response:
        """All figures in Prometheus' text format."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"medusa_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"medusa_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"medusa_{name}", text, labels, buckets=buckets, registry=self._registry)
