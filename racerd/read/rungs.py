"""The rungs of a node without peers: its disks, and the origin.

Layer: read; loop thread. The blocking calls run on the `disk` and `origin` threads with buffers
that belong to the flight; whoever stops waiting leaves the call behind as a stray with them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from functools import partial

from racerd.errors import SourceError
from racerd.ids import PageId
from racerd.origin.protocol import Origin
from racerd.pages import PageGeometry, Seal
from racerd.read.admission import Admission
from racerd.read.flight import Flight
from racerd.read.ladder import Miss
from racerd.read.memory import FrameSlots, MemoryTier, PageLease
from racerd.read.rooms import Rooms
from racerd.read.settings import ReadSettings
from racerd.read.sources import Place, PlainPage, PlainShare
from racerd.read.strays import Strays
from racerd.runtime.budget import Charge
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import Job, WorkerThreads
from racerd.store import Store
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)


class DiskRung:
    """Pages from the slab store, read into arena slots and kept in memory.

    A read that takes longer than `disk_seconds` is left behind and the next rung is asked (F18);
    one that is queued waits as long as others come back. While any read that was left behind has
    not returned, one page at a time may try the disks: a disk that hangs delays a page now and
    then, not every page.
    """

    name = "disk"

    def __init__(
        self,
        store: Store,
        threads: WorkerThreads,
        memory: MemoryTier,
        admission: Admission,
        strays: Strays,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._threads = threads
        self._memory = memory
        self._admission = admission
        self._strays = strays
        self._settings = settings
        self._seconds = metrics.stage_seconds.labels("disk")
        self._overdue = 0
        self._progress_at = time.monotonic()
        self._probing = False

    async def acquire(self, flight: Flight) -> PageLease | Miss:
        page = flight.page
        if not self._store.contains(page):
            return Miss("absent", "no disk has it")
        if not self._overdue:
            return await self._read(flight)
        if self._probing:
            return Miss("stuck", f"{self._overdue} disk reads have not returned")
        self._probing = True
        try:
            return await self._read(flight)
        finally:
            self._probing = False

    async def _read(self, flight: Flight) -> PageLease | Miss:
        page, geometry = flight.page, self._memory.geometry
        page_length = geometry.page_length(page.version.size, page.index)
        first, stop = flight.key.span or (0, geometry.frame_count(page_length))
        with await self._admission.take(
            self._admission.reading,
            (stop - first) * geometry.frame_bytes,
            connection=flight.connection,
            deadline=Deadline.after(self._settings.fetch_seconds),
        ):
            slots = await self._memory.reserve(
                first, stop, page_length, patience_seconds=self._settings.frames_seconds
            )
            if slots is None:
                return Miss("no_frames", "the memory tier had no room to read it into")
            return await self._read_into(flight, slots)

    async def _read_into(self, flight: Flight, slots: FrameSlots) -> PageLease | Miss:
        call = partial(_read_frames, self._store, flight.page, slots)
        job = self._threads.submit(call, urgent=True)
        try:
            while not job.future.done():
                left = self._patience_ends(job) - time.monotonic()
                if left <= 0:
                    return self._left_behind(job, slots)
                await asyncio.wait([job.future], timeout=left)
        except asyncio.CancelledError:
            self._strays.leave(job, partial(self._memory.return_slots, slots))
            raise
        self._progress_at = time.monotonic()
        self._seconds.observe(time.perf_counter() - job.submitted_at)
        return self._caught(flight, job, slots)

    def _patience_ends(self, job: Job[Seal | None]) -> float:
        """When to stop waiting for `job`, on the monotonic clock, as far as is known now."""
        if job.started_at is not None:
            # The job's clock is the performance counter, which has an origin of its own.
            since = time.monotonic() - (time.perf_counter() - job.started_at)
        else:
            since = max(self._progress_at, time.monotonic() - job.queued_seconds)
        return since + self._settings.disk_seconds

    def _caught(self, flight: Flight, job: Job[Seal | None], slots: FrameSlots) -> PageLease | Miss:
        error = job.future.exception()
        if error is not None:
            _LOG.error("reading %s from disk failed", flight.page.text, exc_info=error)
        seal = None if error is not None else job.future.result()
        if seal is None:
            self._memory.return_slots(slots)
            if error is None:
                return Miss("unreadable", "the copy on disk could not be used and was dropped")
            return Miss("failed", f"the disk failed: {error}")
        if flight.key.span is not None or flight.unwanted:
            return self._memory.hold(flight.page, seal, slots, rung=self.name)
        return self._memory.insert(flight.page, seal, slots, rung=self.name)

    def _left_behind(self, job: Job[Seal | None], slots: FrameSlots) -> Miss:
        was_queued = not job.started
        self._overdue += 1
        self._strays.leave(job, partial(self._returned, slots))
        if was_queued:
            return Miss("busy", f"no disk read came back in {self._settings.disk_seconds:g} s")
        return Miss("slow", f"the disk did not answer in {self._settings.disk_seconds:g} s")

    def _returned(self, slots: FrameSlots) -> None:
        self._overdue -= 1
        self._memory.return_slots(slots)


class OriginRung:
    """Pages from the origin of one cache, as plaintext that is charged until nobody needs it."""

    name = "origin"

    def __init__(
        self,
        origin: Origin,
        threads: WorkerThreads,
        admission: Admission,
        rooms: Rooms,
        strays: Strays,
        geometry: PageGeometry,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        self._origin = origin
        self._threads = threads
        self._admission = admission
        self._rooms = rooms
        self._strays = strays
        self._geometry = geometry
        self._settings = settings
        self._seconds = metrics.stage_seconds.labels("origin")

    async def acquire(self, flight: Flight) -> PlainShare:
        """Raises what the origin raised; ResourceError `overloaded` for want of the budget."""
        page = flight.page
        length = self._geometry.page_length(page.version.size, page.index)
        deadline = Deadline.after(self._settings.fetch_seconds)
        charge = await self._admission.take(
            self._admission.plaintext, length, connection=flight.connection, deadline=deadline
        )
        place, flight.place = flight.place, None
        room = self._rooms.take() if place is None else None
        release = partial(self._release, charge, room)
        call = partial(self._fetch, flight, length, deadline, _memory(place, room))
        job = self._threads.submit(call)
        del call  # Only the job has the writable view, and drops it at its end.
        try:
            await asyncio.wait([job.future])
        except asyncio.CancelledError:
            self._strays.leave(job, release)
            raise
        if job.future.exception() is not None:
            release()
            # The error refers to this frame, and must not keep the memory.
            del release
            place = room = None
        view = job.future.result()
        if place is not None and view.obj is place.writable.obj:
            view = place.settled  # Of an origin that sends bodies in memory of its own, it is not.
        self._seconds.observe(time.perf_counter() - job.submitted_at)
        return PlainShare(PlainPage(page, view, release), self.name)

    def _release(self, charge: Charge, room: mmap.mmap | None) -> None:
        charge.release()
        self._rooms.give_back(room)

    def _fetch(
        self, flight: Flight, length: int, deadline: Deadline, room: memoryview | None
    ) -> memoryview:
        """Runs on an `origin` thread."""
        page = flight.page
        start = page.index * self._geometry.page_bytes
        view = self._origin.fetch(
            page.version,
            start,
            start + length,
            deadline=deadline,
            cancel=flight.cancel,
            room=room,
        )
        if len(view) != length:
            raise SourceError(
                "origin_protocol",
                f"{self._origin.description} gave {len(view)} bytes of {page.text}, not {length}",
            )
        return view


def _memory(place: Place | None, room: mmap.mmap | None) -> memoryview | None:
    if place is not None:
        return place.writable
    return None if room is None else memoryview(room)


def _read_frames(store: Store, page: PageId, slots: FrameSlots) -> Seal | None:
    """Runs on a `disk` thread. None is a miss, and so is a seal that covers other frames."""
    return store.read(page, slots.first, slots.frames)
