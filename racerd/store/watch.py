"""Watches one disk's operations: its health, what is running, what failed.

Layer: store; thread-safe. Every I/O runs inside `operation`, so that a disk that fails or hangs is
noticed by whoever asks next, and so that a device is closed only when nothing is running on it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from racerd.store.device import DiskError
from racerd.store.health import DiskHealth, DiskState
from racerd.telemetry import Metrics


class DiskWatch:
    """Health and metrics of the disk at `path`. `clock` is monotonic, in seconds."""

    def __init__(
        self, path: Path, metrics: Metrics, *, hang_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._label = str(path)
        self._metrics = metrics
        self._health = DiskHealth(hang_seconds)
        self._shut = False
        self._lock = threading.Lock()
        self.now = clock

    @property
    def state(self) -> DiskState:
        with self._lock:
            return self._health.state(self.now())

    @property
    def readable(self) -> bool:
        with self._lock:
            return self._health.readable(self.now())

    @property
    def writable(self) -> bool:
        with self._lock:
            return self._health.writable(self.now())

    @property
    def reason(self) -> str:
        """Why the disk is not normal, or nothing."""
        with self._lock:
            return self._health.reason

    def start_down(self, reason: str) -> None:
        """The slab could not be opened: the disk is down until a probe opens it."""
        with self._lock:
            self._health.start_down(self.now(), reason)

    def probe_due(self) -> bool:
        """Whether a probe should be made now."""
        with self._lock:
            return self._health.probe_due(self.now())

    def probed(self, failure: str | None) -> None:
        """The result of a probe."""
        with self._lock:
            self._health.probed(self.now(), failure)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Around an I/O: DiskErrors are counted and passed on. Raises DiskError once shut."""
        with self._lock:
            if self._shut:
                raise DiskError("use", self._path, errno.EBADF, detail="the slab is closed")
            token = self._health.started(self.now())
        failure, gone = None, False
        try:
            yield
        except DiskError as error:
            self.count(error)
            if not error.full:  # Being full is not a fault of the disk.
                failure, gone = error.message, error.gone
            raise
        finally:
            with self._lock:
                self._health.finished(token, self.now(), failure, gone=gone)

    def count(self, error: DiskError) -> None:
        labels = self._metrics.store_errors
        labels.labels(self._label, error.operation, error.errno_name).inc()

    def shut(self) -> bool:
        """Lets no further operation begin. Returns whether none is running any more."""
        with self._lock:
            self._shut = True
            return self._health.idle

    def unshut(self) -> None:
        """The device was opened again."""
        with self._lock:
            self._shut = False

    def publish(self) -> None:
        """Shows the state in the metrics."""
        state = self.state
        for each in DiskState:
            self._metrics.store_state.labels(self._label, each.value).set(each is state)
