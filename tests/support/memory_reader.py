"""A small honest reader in memory: for tests of what is above it, with gates and faults.

It passes the same contract as the real one (`tests/contract/test_reader_contract.py`). One rung
(`memory`) over one origin (a dict). Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import groupby
from typing import TypeVar, cast

from racerd.errors import RacerError, RequestError, ResourceError, Retry
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.origin.protocol import ListedObject
from racerd.pages import PageGeometry
from racerd.read.gpu_disk import GpuDestination
from racerd.read.plan import plan_pages
from racerd.read.reader import (
    Listing,
    PageExplanation,
    Pin,
    ReadReport,
    RequestContext,
    Resolution,
    SharedPiece,
)
from racerd.runtime.deadline import Deadline
from racerd.runtime.shared_memory import SharedMemory
from racerd.units import KIB
from tests.support.host_gpu import HostGpuTarget

T = TypeVar("T")


class MemoryReader:
    """`put` gives it objects. `hold` makes page reads wait; `on_page` may raise or change things.

    While `cling` is held, a cancelled read takes until `let_go` to end, as one does whose buffers
    are still in use on a thread.
    """

    name = "cache"
    origin_description = "memory://"
    geometry = PageGeometry(64 * KIB, 4 * KIB)
    streams_awaited = False

    def __init__(self) -> None:
        self.objects: dict[tuple[str, bytes], tuple[bytes, str]] = {}
        self.pages: dict[PageId, bytes] = {}
        self.last: dict[PageId, str] = {}
        self.on_page: Callable[[PageId], None] | None = None
        self.pins = MemoryPins(self)
        self.reading = 0
        self.arrived = asyncio.Event()  # A read waits at the gate.
        self.cancelled = asyncio.Event()  # A read was cancelled, and may still cling.
        self._gate = asyncio.Event()
        self._gate.set()
        self._let_go = asyncio.Event()
        self._let_go.set()

    def put(self, key: bytes, content: bytes, *, etag: str = '"v1"', bucket: str = "b") -> None:
        self.objects[bucket, key] = (content, etag)

    def hold(self, *, cling: bool = False) -> None:
        self._gate.clear()
        if cling:
            self._let_go.clear()

    def release(self) -> None:
        self._gate.set()
        self._let_go.set()

    # --- the protocol -----------------------------------------------------------------------

    async def resolve(
        self, object_id: ObjectId, *, if_match: str | None, deadline: Deadline
    ) -> Resolution:
        content, etag = self._object(object_id)
        if if_match not in (None, etag):
            raise _changed(object_id, etag)
        return Resolution(ObjectVersion(object_id, etag, len(content)), 60.0)

    async def once_more_if_changed(
        self,
        object_id: ObjectId,
        *,
        if_match: str | None,
        deadline: Deadline,
        attempt: Callable[[Resolution], Awaitable[T]],
    ) -> T:
        resolution = await self.resolve(object_id, if_match=if_match, deadline=deadline)
        try:
            return await attempt(resolution)
        except RacerError as error:
            if error.code != "version_changed" or if_match is not None:
                raise
        return await attempt(await self.resolve(object_id, if_match=None, deadline=deadline))

    async def read_into(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: memoryview,
        context: RequestContext,
    ) -> ReadReport:
        if len(destination) != stop - start:
            raise ValueError("the destination does not fit the range")
        report = ReadReport()
        for part in plan_pages(version.size, start, stop, self.geometry):
            page, rung = await self._read(PageId(version, part.index), context)
            piece = page[part.start : part.stop]
            destination[part.offset : part.offset + len(piece)] = piece
            report.add(rung, len(piece))
        return report

    async def read_into_gpu(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: GpuDestination,
        context: RequestContext,
    ) -> ReadReport:
        """Into the memory of a `HostGpu`."""
        mapping = cast(HostGpuTarget, destination.target).mapping
        begin, end = destination.offset, destination.offset + destination.length
        with memoryview(mapping) as whole, whole[begin:end] as view:
            return await self.read_into(version, start, stop, view, context)

    @property
    def share_chunk_bytes(self) -> int:
        return 2 * self.geometry.page_bytes

    async def share(self, version: ObjectVersion, at: int, context: RequestContext) -> SharedPiece:
        start = at - at % self.share_chunk_bytes
        stop = min(start + self.share_chunk_bytes, version.size)
        memory = SharedMemory(stop - start)
        try:
            with memory.view() as view:
                report = await self.read_into(version, start, stop, view, context)
            memory.seal()
            return SharedPiece(memory.reader(), start, stop, report)
        finally:
            memory.close()

    def shared(
        self, version: ObjectVersion, start: int, stop: int, count_max: int
    ) -> list[SharedPiece]:
        """Nothing is kept: each piece lives as long as its readers."""
        return []

    async def stream(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> AsyncGenerator[memoryview, None]:
        for part in plan_pages(version.size, start, stop, self.geometry):
            page, _ = await self._read(PageId(version, part.index), context)
            yield memoryview(page)[part.start : part.stop]

    async def prefetch(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> ReadReport:
        report = ReadReport()
        for part in plan_pages(version.size, start, stop, self.geometry):
            _, rung = await self._page(PageId(version, part.index), context)
            report.add(rung, part.length)
        return report

    async def evict(self, bucket: str, key: bytes, *, prefix: bool) -> tuple[int, int]:
        gone = [self.pages.pop(page) for page in self.selected(bucket, key, prefix=prefix)]
        return len(gone), sum(map(len, gone))

    def selected(self, bucket: str, key: bytes, *, prefix: bool) -> list[PageId]:
        """Kept pages of an object or of all under a prefix."""

        def matches(page: PageId) -> bool:
            found = page.version.object_id
            same = found.key.startswith(key) if prefix else found.key == key
            return found.bucket == bucket and same

        return [page for page in self.pages if matches(page)]

    async def explain(self, version: ObjectVersion, start: int, stop: int) -> list[PageExplanation]:
        def explained(page: PageId) -> PageExplanation:
            last = (self.last[page], 0.5) if page in self.last else None
            if page in self.pages:
                return PageExplanation(page.index, "memory", {}, last)
            return PageExplanation(page.index, "origin", {"memory": "not read yet"}, last)

        parts = plan_pages(version.size, start, stop, self.geometry)
        return [explained(PageId(version, part.index)) for part in parts]

    async def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        limit: int,
        deadline: Deadline,
    ) -> Listing:
        def entry(key: bytes) -> bytes:
            head, found, _ = key[len(prefix) :].partition(delimiter or b"\0")
            return prefix + head + found if delimiter and found else key

        keys = sorted(k for b, k in self.objects if b == bucket and k.startswith(prefix))
        entries = [name for name, _ in groupby(keys, entry) if after is None or name > after]
        shown, more = entries[:limit], len(entries) > limit
        objects = [self.objects[bucket, key] for key in shown if key in keys]
        names = [key for key in shown if key in keys]
        return Listing(
            [
                ListedObject(key, len(content), etag)
                for key, (content, etag) in zip(names, objects, strict=True)
            ],
            [key for key in shown if key not in keys],
            shown[-1] if more else None,
        )

    async def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        return sorted({bucket for bucket, _ in self.objects})

    # --- inside -----------------------------------------------------------------------------

    async def _read(self, page: PageId, context: RequestContext) -> tuple[bytes, str]:
        content, rung = await self._page(page, context)
        self.last[page] = rung
        return content, rung

    async def _page(self, page: PageId, context: RequestContext) -> tuple[bytes, str]:
        context.deadline.check("reading")
        self.reading += 1
        try:
            self.arrived.set()
            await self._gate.wait()
            if self.on_page is not None:
                self.on_page(page)
        except asyncio.CancelledError:
            self.cancelled.set()
            await self._let_go.wait()
            raise
        finally:
            self.reading -= 1
        rung = "memory" if page in self.pages else "origin"
        if rung == "origin":
            content, etag = self._object(page.version.object_id)
            if etag != page.version.etag:
                raise _changed(page.version.object_id, etag)
            start = page.index * self.geometry.page_bytes
            self.pages[page] = content[start : start + self.geometry.page_bytes]
        return self.pages[page], rung

    def _object(self, object_id: ObjectId) -> tuple[bytes, str]:
        found = self.objects.get((object_id.bucket, object_id.key))
        if found is None:
            raise RequestError("not_found", f"{object_id.text} does not exist", hint="look again")
        return found


class MemoryPins:
    """Pins that are honoured, since nothing is evicted; `room_bytes` can be used up."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._made: list[tuple[str, bytes, bool]] = []
        self.limit_bytes = 1 << 30

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes - sum(self._described(pin).bytes for pin in self._made)

    async def pin(self, bucket: str, key: bytes, *, prefix: bool) -> Pin:
        made = (bucket, key, prefix)
        if made not in self._made:
            if self._described(made).bytes > self.room_bytes:
                raise ResourceError("pin_refused", "more than may be pinned", hint="pin less")
            self._made.append(made)
        return self._described(made)

    async def unpin(self, bucket: str, key: bytes, *, prefix: bool) -> bool:
        made = (bucket, key, prefix)
        there = made in self._made
        if there:
            self._made.remove(made)
        return there

    async def all(self) -> list[Pin]:
        return [self._described(made) for made in self._made]

    def _described(self, made: tuple[str, bytes, bool]) -> Pin:
        bucket, key, prefix = made
        pages = self._reader.selected(bucket, key, prefix=prefix)
        return Pin(bucket, key, prefix, len(pages), sum(len(self._reader.pages[p]) for p in pages))


def _changed(object_id: ObjectId, etag: str) -> RequestError:
    error = RequestError("version_changed", f"{object_id.text} changed", retry=Retry.NEVER)
    error.current_etag = etag
    return error
