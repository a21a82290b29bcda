"""Every metric, declared once with its unit and help: the one door to prometheus_client.

Layer: bottom. One `Metrics` is built by `app` and handed down; nothing here is global. Counters
may be touched from any thread. Label sets are closed: values come from code, never from clients.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

RUNGS = ("memory", "cufile", "disk", "origin")


class Metrics:
    """All metrics of one daemon on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._serve()
        self._read()
        self._store()
        self._origin()
        self._process()
        self._gpu()

    def _serve(self) -> None:
        self.requests = self._counter(
            "racer_requests_total", "Requests answered.", "cache", "operation", "status"
        )
        self.request_seconds = self._histogram(
            "racer_request_seconds", "From head to answer, in seconds.", "cache", "operation"
        )
        self.request_bytes = self._counter(
            "racer_request_bytes_total", "Plaintext bytes handed to clients.", "cache", "operation"
        )
        self.connections = self._gauge(
            "racer_connections", "Client connections that are open.", "cache"
        )
        self.connections_refused = self._counter(
            "racer_connections_refused_total", "Connections closed by the daemon.", "reason"
        )
        self.newcomers_delayed = self._counter(
            "racer_newcomers_delayed_total",
            "Times that connections which came were not let in at once: the door was shut, because"
            " newcomers have had their share of the loop while others are served, or there was a"
            " queue.",
            "cache", "reason",
        )  # fmt: skip
        self.newcomers_waiting = self._gauge(
            "racer_newcomers_waiting", "Connections that wait to be let in.", "cache"
        )
        self.newcomer_loop_seconds = self._counter(
            "racer_newcomer_loop_seconds_total",
            "Time of the event loop that newcomers took while others were served.",
        )
        self.targets = self._gauge("racer_targets", "Registered targets.", "kind")
        self.target_bytes = self._gauge(
            "racer_target_mapped_bytes", "Client memory that is mapped here.", "kind"
        )
        self.targets_refused = self._counter(
            "racer_targets_refused_total", "Targets refused on receipt.", "code"
        )
        self.descriptors_dropped = self._counter(
            "racer_descriptors_dropped_total", "Descriptors closed because no request took them."
        )

    def _read(self) -> None:
        self.rung_pages = self._counter(
            "racer_rung_pages_total", "Page reads by the rung that served them.", "rung"
        )
        self.rung_bytes = self._counter(
            "racer_rung_bytes_total", "Plaintext bytes by the rung that served them.", "rung"
        )
        self.stage_seconds = self._histogram(
            "racer_stage_seconds",
            "Time in one stage of reading a page, or several at once from memory: queue, disk,"
            " origin, seal, open.",
            "stage",
        )
        self.fallbacks = self._counter(
            "racer_fallbacks_total", "Steps down to a slower way, by reason.", "step", "reason"
        )
        self.budget_used = self._gauge("racer_budget_used_bytes", "Bytes charged.", "budget")
        self.budget_limit = self._gauge("racer_budget_limit_bytes", "Hard limit.", "budget")
        self.overloaded = self._counter(
            "racer_overloaded_total", "Requests refused for want of a budget.", "budget"
        )
        self.flights = self._gauge("racer_flights", "Pages being acquired now.")
        self.flight_joins = self._counter(
            "racer_flight_joins_total", "Readers that joined a flight instead of starting one."
        )
        self.corrupt_pages = self._counter(
            "racer_corrupt_pages_total", "Pages that failed verification.", "rung", "reason"
        )

        self.shared_reads = self._counter(
            "racer_shared_reads_total",
            "Chunks of shared memory given to a reader: filled for it, or joined.",
            "result",
        )
        self.shares_evicted = self._counter(
            "racer_shares_evicted_total", "Chunks of shared memory given up, by reason.", "reason"
        )
        self.shares_refused = self._counter(
            "racer_shares_refused_total",
            "Shared memory that was not given: off, full, or refused by the system.",
            "reason",
        )

    def _store(self) -> None:
        self.store_pages = self._gauge("racer_store_pages", "Pages indexed.", "disk")
        self.store_bytes = self._gauge(
            "racer_store_bytes", "Slab bytes taken by live records.", "disk"
        )
        self.store_pinned_bytes = self._gauge(
            "racer_store_pinned_bytes",
            "Slab bytes taken by pinned records; half of the capacity at most is honoured.",
            "disk",
        )
        self.store_capacity_bytes = self._gauge(
            "racer_store_capacity_bytes", "Slab bytes that may be used.", "disk"
        )
        self.store_evicted_pages = self._counter(
            "racer_store_evicted_pages_total", "Pages evicted.", "disk", "reason"
        )
        self.store_reads = self._counter(
            "racer_store_reads_total", "Page lookups by result: hit or a miss's reason.",
            "disk", "result",
        )  # fmt: skip
        self.store_writes = self._counter(
            "racer_store_writes_total", "Page writes by result: kept, or why not.",
            "disk", "result",
        )  # fmt: skip
        self.store_written_bytes = self._counter(
            "racer_store_written_bytes_total", "Bytes written to the medium.", "disk"
        )
        self.store_scrubbed_bytes = self._counter(
            "racer_store_scrubbed_bytes_total", "Bytes that the scrubber read.", "disk"
        )
        self.store_errors = self._counter(
            "racer_store_device_errors_total", "Device errors by operation and errno name.",
            "disk", "operation", "errno",
        )  # fmt: skip
        self.store_state = self._gauge(
            "racer_store_state", "1 for the state that the disk is in.", "disk", "state"
        )
        self.store_buffered = self._gauge(
            "racer_store_buffered", "1 where O_DIRECT is refused and the page cache is used.",
            "disk",
        )  # fmt: skip
        self.store_bounced_bytes = self._gauge(
            "racer_store_bounced_bytes",
            "Bytes copied because their memory was not aligned for O_DIRECT; should be 0.",
            "disk",
        )  # fmt: skip
        self.store_at_floor = self._gauge(
            "racer_store_at_floor",
            "1 while the file system's floor of free space keeps the slab from growing.",
            "disk",
        )
        self.store_write_budget_left = self._gauge(
            "racer_store_write_budget_left_bytes",
            "What may still be written today; there only where there is a limit.",
            "disk",
        )
        self.store_recovering = self._gauge(
            "racer_store_recovering", "1 while recovery looks for pages.", "disk"
        )
        self.store_recovery_segments = self._gauge(
            "racer_store_recovery_segments",
            "Segments by how far recovery is: total, done, unreadable.",
            "disk", "what",
        )  # fmt: skip
        self.store_recovery_pages = self._gauge(
            "racer_store_recovery_pages", "Pages found by recovery so far, by source.",
            "disk", "source",
        )  # fmt: skip
        self.store_recovery_seconds = self._gauge(
            "racer_store_recovery_seconds", "Length of the last recovery.", "disk"
        )

    def _origin(self) -> None:
        self.origin_requests = self._counter(
            "racer_origin_requests_total", "Requests to origins by result.",
            "cache", "operation", "result",
        )  # fmt: skip
        self.origin_retries = self._counter(
            "racer_origin_retries_total", "Requests to origins made again, by reason.",
            "cache", "reason",
        )  # fmt: skip
        self.origin_bytes = self._counter(
            "racer_origin_bytes_total", "Bytes received from origins.", "cache"
        )
        self.origin_seconds = self._histogram(
            "racer_origin_request_seconds", "Length of origin requests.", "cache", "operation"
        )

    def _process(self) -> None:
        self.loop_lag_seconds = self._histogram(
            "racer_loop_lag_seconds", "How late a timer of the event loop fired."
        )
        self.loop_lag_max_seconds = self._gauge(
            "racer_loop_lag_max_seconds", "Largest lag since the last scrape."
        )
        self.open_descriptors = self._gauge("racer_open_descriptors", "Descriptors open now.")
        self.resident_bytes = self._gauge("racer_resident_bytes", "Resident memory.")
        self.tasks = self._gauge("racer_tasks", "Tasks of the event loop now.")
        self.reloads = self._counter(
            "racer_reloads_total", "Reloads of settings and keys, by result.", "what", "result"
        )
        self.ready = self._gauge("racer_ready", "1 while /readyz says yes.")

    def _gpu(self) -> None:
        self.cufile_pages = self._counter(
            "racer_cufile_pages_total", "Disk pages that cuFile read straight into GPU memory."
        )
        self.gpu_host_pages = self._counter(
            "racer_gpu_host_path_pages_total",
            "Disk pages for a GPU that took the host path, by reason.",
            "reason",
        )
        self.gpu_host_pages.labels("gpu_off")  # Present though zero.
        self.gpu_up = self._gauge("racer_gpu_up", "1 while the GPU's worker serves.", "gpu")
        self.gpu_worker_deaths = self._counter(
            "racer_gpu_worker_deaths_total", "Ends of GPU workers, by reason.", "gpu", "reason"
        )
        self.gpu_pages = self._counter(
            "racer_gpu_pages_total", "Pages opened on a GPU: ok, or why not.", "gpu", "result"
        )
        self.cufile_open_seconds = self._gauge(
            "racer_cufile_open_seconds", "How long the cuFile driver took to open.", "gpu"
        )

    def exposition(self) -> tuple[bytes, str]:
        """The text format of Prometheus and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=_SECONDS)
