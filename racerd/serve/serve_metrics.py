"""The serve layer's metrics of one cache, with their labels looked up once.

Layer: serve. Looking up a label costs more than counting; on the path of a 4 KiB read it shows.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from racerd.telemetry import Metrics


class ServeMetrics:
    """What the connections of one cache count."""

    def __init__(self, metrics: Metrics, cache: str) -> None:
        self._metrics = metrics
        self._cache = cache
        self.connections: Gauge = metrics.connections.labels(cache)
        self.descriptors_dropped: Counter = metrics.descriptors_dropped
        self.waiting: Gauge = metrics.newcomers_waiting.labels(cache)
        self._requests: dict[tuple[str, int], Counter] = {}
        self._operations: dict[str, tuple[Histogram, Counter]] = {}

    def answered(self, operation: str, status: int, seconds: float, payload: int) -> None:
        """Counts one exchange. `payload` is how many bytes of the object it handed over."""
        requests = self._requests.get((operation, status))
        if requests is None:
            requests = self._metrics.requests.labels(self._cache, operation, str(status))
            self._requests[operation, status] = requests
        requests.inc()
        times_and_bytes = self._operations.get(operation)
        if times_and_bytes is None:
            times_and_bytes = (
                self._metrics.request_seconds.labels(self._cache, operation),
                self._metrics.request_bytes.labels(self._cache, operation),
            )
            self._operations[operation] = times_and_bytes
        times_and_bytes[0].observe(seconds)
        if payload:
            times_and_bytes[1].inc(payload)

    def overloaded(self, budget: str) -> None:
        self._metrics.overloaded.labels(budget).inc()

    def delayed(self, reason: str) -> None:
        self._metrics.newcomers_delayed.labels(self._cache, reason).inc()

    def connection_refused(self, reason: str) -> None:
        self._metrics.connections_refused.labels(reason).inc()
