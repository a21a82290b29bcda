"""Keeping: a page of plaintext that landed is sealed, put into memory and sent to its disk.

Layer: read; loop thread, sealing on the `open` threads. It starts when the readers have been handed
their shares, so that bytes reach clients first. Where the arena has no slots and none come free,
because every page in it stays in use, the page is served and not kept, which is counted.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from racerd.crypto.keyring import Keyring
from racerd.crypto.sealing import PageSealer
from racerd.ids import PageId
from racerd.pages import Seal
from racerd.read.flight import Flight, FlightTable
from racerd.read.memory import FrameSlots, MemoryTier, PageLease
from racerd.read.settings import ReadSettings
from racerd.read.sources import PlainShare
from racerd.read.writeback import WriteBack
from racerd.runtime.threads import Job, WorkerThreads, finished
from racerd.telemetry import Metrics


class Keeper:
    """Keeps what flights bring from origins."""

    def __init__(
        self,
        memory: MemoryTier,
        write_back: WriteBack,
        flights: FlightTable,
        threads: WorkerThreads,
        keyring: Keyring,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        self._memory = memory
        self._write_back = write_back
        self._flights = flights
        self._threads = threads
        self._keyring = keyring
        self._settings = settings
        self._run_frames = max(1, settings.run_bytes // memory.geometry.frame_bytes)
        self._fallbacks = metrics.fallbacks
        self._seconds = metrics.stage_seconds.labels("seal")

    async def keep(self, flight: Flight, plain: PlainShare) -> None:
        """Seals and keeps the page of a landed flight, and resolves `flight.kept`.

        Ends the flight's share of the plaintext as soon as memory has the page. Cancelling: what
        runs on threads is waited for; the page is then not kept.
        """
        lease = await self._sealed(flight, plain)
        self._flights.over(flight)
        if lease is None:
            return
        try:
            writing = await self._write_back.accept(lease, patient=flight.patient)
        finally:
            lease.release()
        on_disk = False
        if writing is not None and flight.patient:
            await asyncio.wait([writing])
            on_disk = not writing.exception() and writing.result()
        flight.kept.set_result(on_disk or self._memory.contains(flight.page))

    async def _sealed(self, flight: Flight, plain: PlainShare) -> PageLease | None:
        if flight.unwanted:
            return None
        slots = await self._slots(flight, len(plain.view))
        if slots is None:
            self._fallbacks.labels("memory", "no_frames").inc()
            return None
        started_at = time.perf_counter()
        try:
            seal = await finished(self.seal(flight.page, plain.view, slots))
        except BaseException:
            self._memory.return_slots(slots)
            raise
        self._seconds.observe(time.perf_counter() - started_at)
        if flight.unwanted:
            self._memory.return_slots(slots)
            return None
        lease = self._memory.insert(flight.page, seal, slots, rung="origin")
        lease.touch(0, flight.wide_to)
        return lease

    async def _slots(self, flight: Flight, length: int) -> FrameSlots | None:
        """Waits for slots as long as some come free: readers and disks are done with theirs soon.

        The plaintext waits too, and its budget holds up the pages behind it.
        """
        settings = self._settings
        return await self._memory.reserve(
            0,
            self._memory.geometry.frame_count(length),
            length,
            patience_seconds=settings.fetch_seconds
            if flight.patient
            else settings.progress_seconds,
        )

    def seal(self, page: PageId, view: memoryview, slots: FrameSlots) -> Job[Seal]:
        """Hands the frames of a whole page to the threads, plaintext in `view`, ciphertext to
        `slots`; as in `Delivery`, only the job has views of them. The caller keeps both."""
        geometry = self._memory.geometry
        sealer = PageSealer(page, len(view), geometry, self._keyring.active)
        step = self._run_frames
        pieces = [
            partial(
                sealer.seal_frames,
                first,
                view[first * geometry.frame_bytes : (first + step) * geometry.frame_bytes],
                slots.frames[first : first + step],
            )
            for first in range(0, slots.count, step)
        ]
        return self._threads.submit_pieces(pieces, then=sealer.finish)
