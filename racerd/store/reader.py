"""Reads pages of one slab: for callers, for borrowers, and for nobody, to find rot.

Layer: store; thread-safe, on the callers' disk threads; scrubbing on a thread of its own. A record
that is not what the index promised is counted, dropped and a miss: nobody gets bytes of it. One
that cannot be read is given up the second time, if the disk is well otherwise. While a record is
read or lent its segment is not given to other records.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from racerd.errors import IntegrityError
from racerd.ids import PageId
from racerd.pages import Seal
from racerd.store.claims import Found
from racerd.store.device import DiskError
from racerd.store.fates import UNREADABLE, Fates, damage
from racerd.store.live import LiveSlab
from racerd.store.loan import NotLent, RecordLoan
from racerd.store.watch import DiskWatch
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)


class SlabReader:
    """Of one live slab. Results are words that go into metrics."""

    def __init__(
        self, live: LiveSlab, watch: DiskWatch, fates: Fates, metrics: Metrics, *, label: str
    ) -> None:
        self._live = live
        self._watch = watch
        self._fates = fates
        self._metrics = metrics
        self._label = label
        self._scrub_row = 0  # The scrubber's alone.

    def read(self, page: PageId, first: int, frames: Sequence[memoryview]) -> Seal | None:
        """See `Store.read`."""
        live = self._live
        with live.lock:
            found = live.engine.start_read(page)
        if found is None:
            self._count("absent" if live.progress.done else "recovering")
            return None
        try:
            return self._read_found(found, first, frames)
        finally:
            live.end_read(found)

    def _read_found(self, found: Found, first: int, frames: Sequence[memoryview]) -> Seal | None:
        live = self._live
        if found.v1 and len(frames) != live.slab.geometry.page.frame_count(found.length):
            self._count("v1_needs_whole_page")
            return None
        try:
            with self._watch.operation():
                seal = live.io.read(found, first, frames)
        except IntegrityError as error:
            self._count("absent" if error.code == "tombstone" else "corrupt")
            self._lose(found, error)
            return None
        except DiskError:
            self._count("io_error")
            self._suspect(found)
            return None
        if not found.proven:
            with live.lock:
                live.engine.prove(found)
        self._count("hit")
        return seal

    def confirm(self, page: PageId) -> None:
        """See `Store.confirm`. Counts no read."""
        live = self._live
        with live.lock:
            found = live.engine.start_check(page)
        if found is None:
            return
        try:
            if not found.proven:
                self._prove(found)
        finally:
            live.end_read(found)

    def _prove(self, found: Found) -> None:
        live = self._live
        try:
            with self._watch.operation():
                live.io.header(found)
        except IntegrityError as error:
            self._lose(found, error)
        except DiskError:
            self._suspect(found)
        else:
            with live.lock:
                live.engine.prove(found)

    # Lending

    def lend(self, page: PageId) -> RecordLoan | NotLent:
        """See `Store.lend`."""
        live = self._live
        if not live.slab.device.direct:
            return NotLent("not_direct")
        with live.lock:
            found = live.engine.start_read(page)
        if found is None:
            return NotLent("absent")
        try:
            lent = self._lend_found(found)
        except BaseException:
            live.end_read(found)
            raise
        if isinstance(lent, NotLent):
            live.end_read(found)
        return lent

    def _lend_found(self, found: Found) -> RecordLoan | NotLent:
        live = self._live
        if found.v1:
            return NotLent("v1_record")
        try:
            with self._watch.operation():
                header = live.io.header(found)
        except IntegrityError as error:
            result = "absent" if error.code == "tombstone" else "corrupt"
            self._count(result)
            self._lose(found, error)
            return NotLent(result)
        except DiskError:
            self._count("io_error")
            self._suspect(found)
            return NotLent("io_error")
        self._count("lent")
        return RecordLoan(
            live.number,
            header.data_offset,
            header.seal,
            reopen=self._reopen,
            release=partial(live.end_read, found),
        )

    def _reopen(self) -> int:
        with self._watch.operation():  # The device is not closed meanwhile.
            return self._live.slab.device.reopen()

    # Scrubbing

    def scrub_next(self) -> int | None:
        """See `scrub.Scrubbed`."""
        live = self._live
        with live.lock:
            chosen = live.engine.next_to_check(self._scrub_row)
        if chosen is None:
            self._scrub_row = 0
            return None
        row, found = chosen
        self._scrub_row = row + 1
        try:
            return self._scrub(found)
        finally:
            live.end_read(found)

    def _scrub(self, found: Found) -> int:
        try:
            with self._watch.operation():
                self._live.io.check(found)
        except IntegrityError as error:
            self._lose(found, error)
        except DiskError:
            self._suspect(found)
        self._metrics.store_scrubbed_bytes.labels(self._label).inc(found.record_bytes)
        return found.record_bytes

    # What is lost

    def _count(self, result: str) -> None:
        self._metrics.store_reads.labels(self._label, result).inc()

    def _lose(self, found: Found, error: IntegrityError) -> None:
        """A record is not what the index promised: count it and drop it."""
        if error.code == "tombstone":
            self._forget_buried(found)
            return
        self._metrics.corrupt_pages.labels("disk", error.code).inc()
        self._fates.note(found.page, damage(error.code))
        log.warning("%s: %s: dropped, to be fetched again", self._label, error.message)
        self._drop(found)

    def _forget_buried(self, found: Found) -> None:
        """What was dropped before a crash, after the last checkpoint, has its tombstone."""
        live = self._live
        with live.lock:
            dropped = live.engine.drop_found(found)
            if dropped is not None:
                live.engine.tombstone_done(dropped)
        live.changed = True

    def _suspect(self, found: Found) -> None:
        """A record that cannot be read twice, on a disk that is well otherwise, is given up."""
        live = self._live
        with live.lock:
            again = live.engine.suspect(found)
        if again and self._watch.writable:
            self._fates.note(found.page, UNREADABLE)
            self._metrics.store_evicted_pages.labels(self._label, "unreadable").inc()
            self._drop(found)

    def _drop(self, found: Found) -> None:
        live = self._live
        with live.lock:
            dropped = live.engine.drop_found(found)
        live.bury_soon([] if dropped is None else [dropped])
