"""The plain stream: verified plaintext in order, a few chunks ahead of its consumer (R3).

Layer: read; loop thread. Chunks lie in scratch memory that is charged to the `streams` budget. A
stream waits for budget only while it holds no chunk; under pressure it looks ahead less. It asks
for the next pages before it comes to them, so that a cold stream keeps more than one origin request
in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from racerd.errors import RacerError
from racerd.ids import ObjectVersion, PageId
from racerd.read.flight import FlightKey
from racerd.read.holds import PlainHold
from racerd.read.page_reader import PageReader
from racerd.read.plan import PagePart, part_count, part_of_page, plan_pages
from racerd.read.request import ReadReport, RequestContext
from racerd.read.services import ReadServices
from racerd.read.sources import PlainShare
from racerd.runtime.budget import Charge
from racerd.runtime.threads import settled


@dataclass(frozen=True, slots=True)
class _Step:
    """A chunk of a part of a page; both have offset 0 in their own destination."""

    part: PagePart
    chunk: PagePart


def _steps(parts: Iterator[PagePart], chunk_bytes: int) -> Iterator[_Step]:
    """Chunks that end on multiples of `chunk_bytes` in their page, so that they cut few frames."""
    for part in parts:
        start = part.start
        while start < part.stop:
            stop = min((start // chunk_bytes + 1) * chunk_bytes, part.stop)
            yield _Step(part, PagePart(part.index, part.page_length, start, stop, 0))
            start = stop


class _Scratch:
    """Memory for one chunk and the charge for it."""

    __slots__ = ("charge", "view")

    def __init__(self, chunk_bytes: int, charge: Charge) -> None:
        self.view = np.empty(chunk_bytes, dtype=np.uint8).data
        self.charge = charge


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk on its way: the task that reads it into its scratch."""

    scratch: _Scratch
    length: int
    task: asyncio.Task[None]


class PageStream:
    """One stream. `chunks` is used once."""

    def __init__(
        self,
        services: ReadServices,
        pages: PageReader,
        version: ObjectVersion,
        context: RequestContext,
    ) -> None:
        self._services = services
        self._settings = services.settings
        self._chunk_bytes = min(self._settings.stream_chunk_bytes, services.geometry.page_bytes)
        self._pages = pages
        self._version = version
        self._context = context
        self._free: list[_Scratch] = []
        self._ahead: deque[_Chunk] = deque()
        self._held: dict[int, PlainHold] = {}
        self._fetching: dict[int, asyncio.Task[None]] = {}
        self._fetched_to = -1
        self._range = (0, 0)
        self._planned = False  # Whether every chunk was started.
        self.report = ReadReport()

    async def chunks(self, start: int, stop: int) -> AsyncGenerator[memoryview, None]:
        """Yields bytes [start, stop) in order. A chunk is valid until the next is asked for.

        Raises what reading a page raises; what was yielded before is good. Closing or cancelling
        returns when nothing of the stream runs or is charged any more.
        """
        if start == stop:
            return
        self._range = (start, stop)
        parts = plan_pages(self._version.size, start, stop, self._services.geometry)
        chunk_bytes = min(self._chunk_bytes, stop - start)
        if stop - start <= chunk_bytes and part_count(start, stop, self._services.geometry) == 1:
            # What most reads of configurations and headers are: nothing lies ahead of it.
            scratch = self._try_scratch(chunk_bytes) or await self._scratch(chunk_bytes)
            with scratch.charge:
                await self._pages.read(
                    self._version, next(parts), scratch.view, self._context, self.report
                )
                yield scratch.view
            return
        steps = _steps(parts, self._chunk_bytes)
        try:
            while True:
                await self._look_ahead(steps, chunk_bytes)
                if not self._ahead:
                    return
                chunk = self._ahead.popleft()
                try:
                    await chunk.task
                    yield chunk.scratch.view[: chunk.length]
                finally:
                    self._reuse(chunk.scratch)
        finally:
            await self._end()

    async def _look_ahead(self, steps: Iterator[_Step], chunk_bytes: int) -> None:
        """Starts chunks while there is scratch for them; waits for scratch only without any."""
        while len(self._ahead) < self._settings.stream_chunks and not self._planned:
            scratch = self._free.pop() if self._free else self._try_scratch(chunk_bytes)
            if scratch is None:
                if self._ahead:
                    return
                scratch = await self._scratch(chunk_bytes)
            step = next(steps, None)
            if step is None:
                self._planned = True
                self._free.append(scratch)
                return
            self._fetch_ahead(step.part)
            task = asyncio.get_running_loop().create_task(self._read(step, scratch.view))
            self._ahead.append(_Chunk(scratch, step.chunk.length, task))

    def _try_scratch(self, chunk_bytes: int) -> _Scratch | None:
        charge = self._services.admission.streams.try_charge(chunk_bytes, self._context.connection)
        return None if charge is None else _Scratch(chunk_bytes, charge)

    async def _scratch(self, chunk_bytes: int) -> _Scratch:
        admission = self._services.admission
        charge = await admission.take(
            admission.streams,
            chunk_bytes,
            connection=self._context.connection,
            deadline=self._context.deadline,
        )
        return _Scratch(chunk_bytes, charge)

    def _reuse(self, scratch: _Scratch) -> None:
        """Keeps scratch for the next chunk, unless somebody waits and this is not the last."""
        if self._services.admission.streams.waiting and (self._free or self._ahead):
            scratch.charge.release()
        else:
            self._free.append(scratch)

    async def _read(self, step: _Step, view: memoryview) -> None:
        self._drop_passed(step.part.index)
        page = PageId(self._version, step.part.index)
        fetching = self._fetching.get(page.index)
        if fetching is not None and not fetching.done():
            await asyncio.wait([fetching])  # Its hold may be all that there will be of the page.
        hold = self._held.get(page.index)
        if hold is not None and not self._services.memory.contains(page):
            share = hold.share()
            if share is not None:
                await self._deliver(share, page, step.chunk, view)
                return
        await self._pages.read(
            self._version,
            step.chunk,
            view,
            self._context,
            self.report,
            wanted=step.part,
            on_plain=self._hold,
        )

    async def _deliver(
        self, share: PlainShare, page: PageId, chunk: PagePart, view: memoryview
    ) -> None:
        try:
            await self._pages.deliver(share, page, chunk, view, self._context)
        finally:
            share.release()
        self.report.add(share.rung, chunk.length)

    # --- pages ahead, and plaintext that is not kept -----------------------------------------

    def _fetch_ahead(self, part: PagePart) -> None:
        """Starts to acquire the next pages, unless a part of one on a disk is all that is read."""
        (start, stop), geometry = self._range, self._services.geometry
        last = (stop - 1) // geometry.page_bytes
        for index in range(part.index + 1, part.index + 1 + self._settings.stream_pages_ahead):
            if index <= self._fetched_to or index > last:
                continue
            self._fetched_to = index
            page = PageId(self._version, index)
            if self._services.memory.contains(page):
                continue
            wanted = part_of_page(self._version.size, start, stop, index, geometry)
            if wanted.whole or not self._services.store.contains(page):
                self._fetching[index] = asyncio.get_running_loop().create_task(
                    self._fetch(page, wanted)
                )

    async def _fetch(self, page: PageId, wanted: PagePart) -> None:
        try:
            source = await self._pages.acquire_whole(page, wanted, self._context)
        except RacerError:
            return  # Told, with its cause, when the stream comes to the page.
        if isinstance(source, PlainShare):
            self._hold(page, source)
        source.release()

    def _hold(self, page: PageId, share: PlainShare) -> None:
        """Keeps plaintext until memory has the page or the stream has passed it.

        A page that cannot be kept would be fetched again for each of its chunks.
        """
        if page.index in self._held:
            return
        hold = self._services.holds.hold(share)
        if hold is None:
            return
        self._held[page.index] = hold
        flight = self._services.flights.find(FlightKey(page))
        if flight is not None:
            flight.kept.add_done_callback(partial(_release_if_kept, hold))

    def _drop_passed(self, index: int) -> None:
        for passed in [held for held in self._held if held < index - 1]:
            self._held.pop(passed).release()
        for passed in [fetched for fetched in self._fetching if fetched < index - 1]:
            del self._fetching[passed]

    async def _end(self) -> None:
        tasks = [chunk.task for chunk in self._ahead] + list(self._fetching.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            await settled(task)
        for scratch in [chunk.scratch for chunk in self._ahead] + self._free:
            scratch.charge.release()
        for hold in self._held.values():
            hold.release()
        self._ahead.clear()
        self._free.clear()
        self._held.clear()


def _release_if_kept(hold: PlainHold, kept: asyncio.Future[bool]) -> None:
    if kept.result():
        hold.release()
