"""Writes pages to one slab, and makes room for them.

Layer: store; thread-safe, on the callers' disk threads. One thread at a time asks the engine for a
place and does what the engine wants done first: preparing a segment, or evicting one. The record
itself is written with no lock held.
"""

from __future__ import annotations

import logging
import threading
import time

from racerd.errors import IntegrityError
from racerd.ids import PageId
from racerd.pages import SealedPage
from racerd.store.budget import WriteBudget
from racerd.store.buffers import aligned_buffer
from racerd.store.claims import Evict, Found, Prepare, Refused, Reservation
from racerd.store.device import DiskError, Extent
from racerd.store.geometry import BLOCK_BYTES
from racerd.store.live import LiveSlab
from racerd.store.settings import StoreSettings
from racerd.store.superblock import encode_segment_header
from racerd.store.troubles import floor_meaning, floor_reason
from racerd.store.watch import DiskWatch
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)

FULL_PAUSE_SECONDS = 10.0
FLOOR_QUIET_SECONDS = 600.0  # At the floor again within that: it was said already.
_TURN_SECONDS = 0.1


class SlabWriter:
    """Of one live slab. Results are words that go into metrics: "kept", or why not."""

    def __init__(
        self, live: LiveSlab, watch: DiskWatch, budget: WriteBudget, metrics: Metrics, *,
        label: str, settings: StoreSettings,
    ) -> None:  # fmt: skip
        self._live = live
        self._watch = watch
        self._budget = budget
        self._metrics = metrics
        self._label = label
        self._settings = settings
        self._full_until = 0.0
        self.at_floor = False  # The floor of free space keeps the slab from growing.
        self._floor_said = ""
        self._floor_said_until = 0.0
        self._space = threading.Lock()  # Held by the one thread that reserves or evicts.

    def full_seconds(self, now: float) -> float:
        """For how long nothing is written because the medium is full."""
        return max(0.0, self._full_until - now)

    def write(self, sealed: SealedPage) -> str:
        """Writes a page; a medium without space gets one eviction and one more try.

        If that does not help, nothing is written for a while: evicting more would only empty the
        cache.
        """
        now = self._watch.now()
        if now < self._full_until:
            return "disk_full"
        size = self._live.slab.geometry.record_bytes(sealed.seal.length)
        with self._live.lock:
            if not self._budget.take(now, size):
                return "write_budget"
        result = self._write_once(sealed)
        if result == "disk_full" and self._evict_for_space():
            result = self._write_once(sealed)
        if result == "disk_full":
            self._full_until = now + FULL_PAUSE_SECONDS
        return result

    def _write_once(self, sealed: SealedPage) -> str:
        if not self._take_space_lock():
            return self._nothing_written(sealed, "busy")
        try:
            space = self._reserve(sealed.page, sealed.seal.length)
        finally:
            self._space.release()
        if isinstance(space, str):
            return self._nothing_written(sealed, space)
        return self._write_record(space, sealed)

    def _nothing_written(self, sealed: SealedPage, result: str) -> str:
        """Gives the budget back what the page would have cost it."""
        with self._live.lock:
            size = self._live.slab.geometry.record_bytes(sealed.seal.length)
            self._budget.give_back(self._watch.now(), size)
        return result

    def _take_space_lock(self) -> bool:
        """Waits its turn for a bounded time, and not at all for a disk that is in trouble."""
        deadline = time.monotonic() + self._settings.wait_seconds_max
        while not self._space.acquire(timeout=_TURN_SECONDS):
            if not self._watch.writable or time.monotonic() > deadline:
                return False
        return True

    def _reserve(self, page: PageId, length: int) -> Reservation | str:
        """Does what the engine asks for until it has a place. Returns the reason if it has none."""
        live = self._live
        evict = True
        while True:
            with live.lock:
                trimmed = live.engine.trim(page, length)
                answer = live.engine.reserve(page, length, evict=evict)
            if trimmed:
                live.tombstones.add(trimmed)
                self._count_evicted("quota", len(trimmed))
            match answer:
                case Reservation():
                    return answer
                case Refused():
                    unknown = answer.reason == "no_space" and not live.progress.done
                    return "recovering" if unknown else answer.reason
                case Prepare():
                    self._prepare(answer)
                case Evict():
                    evict = self._evict()

    def _write_record(self, space: Reservation, sealed: SealedPage) -> str:
        live = self._live
        try:
            with self._watch.operation():
                live.io.write(space, sealed)
        except IntegrityError as error:
            with live.lock:
                live.engine.abort(space, written=False)
            return self._nothing_written(sealed, error.code)
        except DiskError as error:
            self._abort(space)
            return "disk_full" if error.full else "io_error"
        with live.lock:
            dropped = live.engine.commit(space)
        live.changed = True
        self._metrics.store_written_bytes.labels(self._label).inc(space.record_bytes)
        if dropped is None:
            return "kept"
        live.tombstones.add([dropped])
        return "dropped_meanwhile"

    def _abort(self, space: Reservation) -> None:
        """Part of a record may be on the medium: a tombstone makes sure that it is not found."""
        with self._live.lock:
            dropped = self._live.engine.abort(space, written=True)
        if dropped is not None:
            self._live.tombstones.add([dropped])

    def _prepare(self, todo: Prepare) -> None:
        """Gets a segment ready to be filled, or tells the engine that it cannot be."""
        live, slab = self._live, self._live.slab
        offset = slab.geometry.segment_offset(todo.segment)
        extent = Extent(offset, slab.geometry.segment_size(todo.segment))
        full = False
        try:
            with self._watch.operation():
                full = todo.allocate and not slab.may_grow(extent.length)
                self.at_floor |= full
                if todo.allocate and not full:
                    slab.device.allocate(extent)
                if not full:
                    self._write_header(todo.segment, todo.generation)
        except DiskError as error:
            with live.lock:
                live.engine.not_prepared(todo, no_space=error.full and todo.allocate)
            return
        with live.lock:
            if full:
                live.engine.not_prepared(todo, no_space=True)
            else:
                live.engine.prepared(todo)

    def _write_header(self, segment: int, generation: int) -> None:
        slab = self._live.slab
        offset = slab.geometry.segment_offset(segment)
        block = aligned_buffer(BLOCK_BYTES)
        encode_segment_header(
            block, slab=slab.id, segment=segment, generation=generation, offset=offset
        )
        slab.device.write(offset, [block])

    def renew_header(self, segment: int) -> None:
        """Writes the header of a segment in use that was lost. Raises DiskError.

        Nobody else writes it: a segment in use gets another header only after it was emptied, and
        that takes the space lock.
        """
        if not self._take_space_lock():
            return  # Another start will see it again.
        try:
            with self._live.lock:
                in_use = self._live.engine.segments.in_use(segment)
                generation = self._live.engine.segments.generations[segment]
            if in_use:
                with self._watch.operation():
                    self._write_header(segment, generation)
        finally:
            self._space.release()

    # Eviction

    def _evict_for_space(self) -> bool:
        """The medium is full though the slab is not: give up a segment and try once more."""
        if not self._take_space_lock():
            return False
        try:
            return self._evict()
        finally:
            self._space.release()

    def _evict(self) -> bool:
        """Evicts one segment, with the space lock held. False if there is no victim."""
        live = self._live
        with live.lock:
            victim = live.engine.next_victim()
        if victim is None:
            return False
        if victim.moves:
            for found in victim.moves:
                self._move(found)
            self._flush_moves()
        with live.lock:
            todo, pages = live.engine.evicted(victim)
        self._count_evicted("capacity", pages)
        live.changed = True
        self._prepare(todo)
        return True

    def _count_evicted(self, reason: str, pages: int) -> None:
        self._metrics.store_evicted_pages.labels(self._label, reason).inc(pages)

    def _move(self, found: Found) -> None:
        """Copies a hot record out of a victim. If that fails it goes with the rest."""
        live = self._live
        with live.lock:
            space = live.engine.start_move(found)
            if space is None:
                return
            # What is worth a copy, or pinned, would cost a write all the same when it comes again.
            self._budget.spend(self._watch.now(), found.record_bytes)
        try:
            with self._watch.operation():
                live.io.move(found, space)
        except IntegrityError as error:
            self._metrics.corrupt_pages.labels("disk", error.code).inc()
            self._abort(space)
            return
        except DiskError:
            self._abort(space)
            return
        with live.lock:
            dropped = live.engine.commit_move(space)
        self._metrics.store_written_bytes.labels(self._label).inc(space.record_bytes)
        if dropped is not None:
            live.tombstones.add([dropped])

    def _flush_moves(self) -> None:
        """Copies are durable before the header that ends the life of what they were copied from:
        a power loss in between must not cost pages that were durable already."""
        try:
            with self._watch.operation():
                self._live.slab.device.flush()
        except DiskError as error:
            log.warning("%s: %s; %s", self._label, error.message, error.hint)

    def keep_floor(self) -> None:
        """Gives a segment back to a file system that others have filled up to the floor.

        Called now and then on the disk's own thread; does nothing while somebody makes room.
        Raises DiskError.
        """
        live, slab = self._live, self._live.slab
        with self._watch.operation():
            missing = slab.missing_bytes()
            wanted = slab.geometry.segment_bytes if live.engine.segments.fresh else 0
            self.at_floor = slab.missing_bytes(wanted) > 0
        self._tell_floor(wanted)
        live.engine.retrying = True
        if missing == 0:
            live.engine.growing = True
            return
        if not self._space.acquire(blocking=False):
            return
        try:
            live.engine.growing = False
            if not live.engine.can_spare_segment:
                self._evict()
            with live.lock:
                # What was emptied may still be read: then the room for copies is not given back.
                last = not live.engine.segments.queue
                spare = last or live.engine.can_spare_segment
                segment = live.engine.give_up_free_segment() if spare else None
            if segment is not None:
                offset = slab.geometry.segment_offset(segment)
                with self._watch.operation():
                    slab.device.release(Extent(offset, slab.geometry.segment_size(segment)))
        finally:
            self._space.release()

    def _tell_floor(self, wanted: int) -> None:
        """`wanted`: bytes that the slab would grow by. Once an incident, and when its meaning
        changes."""
        self._metrics.store_at_floor.labels(self._label).set(self.at_floor)
        if not self.at_floor:
            return
        now = self._watch.now()
        meaning = floor_meaning(self._live.engine.segments.taking_space)
        if now >= self._floor_said_until or meaning != self._floor_said:
            why = floor_reason(self._settings.free_floor_ratio, wanted)
            log.warning("%s: %s: %s", self._label, why, meaning)
            self._floor_said = meaning
        self._floor_said_until = now + FLOOR_QUIET_SECONDS
