"""Tombstones that wait to be written.

Layer: store; thread-safe. A dropped record keeps its segment pinned until its tombstone is on the
medium, so that the tombstone cannot hit what comes there next. While the disk fails they wait for
it to come back; the oldest are given up beyond a bound, which costs no more than that a dropped
page may be found again after a restart without a checkpoint. Who drops many has them written on
the way, as soon as they are `crowded`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from racerd.store.claims import Dropped
from racerd.store.device import DiskError
from racerd.store.engine import Engine
from racerd.store.record_io import RecordIO
from racerd.store.watch import DiskWatch

TOMBSTONES_MAX = 4096


class Tombstones:
    """Of one slab. `lock` is the engine's."""

    def __init__(
        self, engine: Engine, lock: threading.Lock, record_io: RecordIO, watch: DiskWatch
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._record_io = record_io
        self._watch = watch
        self._waiting: list[Dropped] = []
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def crowded(self) -> bool:
        """Whether so many wait that some should be written before there are many more."""
        return len(self._waiting) > TOMBSTONES_MAX // 2

    def add(self, dropped: Iterable[Dropped]) -> None:
        with self._lock:
            self._waiting += dropped
            while len(self._waiting) > TOMBSTONES_MAX:
                self._engine.tombstone_done(self._waiting.pop(0))
                self.given_up += 1

    def bury_all(self, dropped: Sequence[Dropped]) -> None:
        """Adds any number and writes them, on the disk's own thread; what fails waits."""
        portion = max(1, TOMBSTONES_MAX // 2)
        for start in range(0, len(dropped), portion):
            self.add(dropped[start : start + portion])
            self.bury()

    def bury(self) -> bool:
        """Writes what waits, on the disk's own thread. Returns whether all of it is written."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        failed = []
        for dropped in waiting:
            try:
                with self._watch.operation():
                    self._record_io.bury(dropped)
            except DiskError:
                failed.append(dropped)
                continue
            with self._lock:
                self._engine.tombstone_done(dropped)
        self.add(failed)
        return not failed
