"""The reader of one cache: what the layer above sees of all this.

Layer: read; loop thread. A facade: versions from `versions`, pages from `page_reader`, streams from
`stream`; shared parts come from `ReadServices`.

Versions: every read names one version, and delivers bytes of that version or fails with
`version_changed`; the current version is then asked for anew. A request that is **not pinned** and
has handed out nothing yet may resolve again and start over, once (`once_more_if_changed`); a
pinned one fails. Pages of the old version stay: whoever pinned it can still read what is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TypeVar

from racerd.errors import RequestError, ResourceError, Retry
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.origin.protocol import ListedObject, ListedPrefix, Origin
from racerd.pages import PageGeometry
from racerd.read.batches import BatchReader
from racerd.read.explain import PageExplanation
from racerd.read.flight import FlightKey
from racerd.read.gpu_disk import GpuDestination
from racerd.read.gpu_pages import GpuPageReader, wait_ready
from racerd.read.ladder import Ladder
from racerd.read.page_reader import PageReader
from racerd.read.pins import CachePins, Pin
from racerd.read.plan import PagePart, part_count, plan_pages
from racerd.read.request import ReadReport, RequestContext
from racerd.read.rungs import OriginRung
from racerd.read.services import ReadServices
from racerd.read.shares import SharedPiece
from racerd.read.sources import Place
from racerd.read.strays import Strays
from racerd.read.stream import PageStream
from racerd.read.versions import Resolution, Versions
from racerd.read.window import for_each_in_window, in_slices
from racerd.runtime.deadline import Deadline, deadline_exceeded

__all__ = [
    "CacheReader", "Listing", "PageExplanation", "Pin", "ReadReport", "RequestContext",
    "Resolution", "SharedPiece",
]  # fmt: skip

T = TypeVar("T")
_LISTED_NAMES_BYTES = 1 << 20  # In one listing: more follow with the next.
_VERSION_IS_GONE = ("version_changed", "not_found")


@dataclass(frozen=True, slots=True)
class Listing:
    """Some entries of a listing. `next`: pass it as `after` for the rest; None at the end."""

    objects: list[ListedObject]
    prefixes: list[bytes]
    next: bytes | None


class CacheReader:
    """Reads of one cache. An async context manager; leaving it cancels what runs for the cache."""

    def __init__(self, name: str, origin: Origin, services: ReadServices) -> None:
        """`origin` is borrowed: close it after the reader."""
        self.name = name
        self._origin = origin
        self._services = services
        self._versions = Versions(
            origin, services.threads.origin, services.store, services.settings
        )
        self.pins = CachePins(name, services.store, services.threads.disk)
        self._strays = Strays()  # Calls of this origin, which is closed after the reader.
        origin_rung = OriginRung(
            origin,
            services.threads.origin,
            services.admission,
            services.rooms,
            self._strays,
            services.geometry,
            services.settings,
            services.metrics,
        )
        self._pages = PageReader(services, Ladder([services.disk, origin_rung], services.metrics))
        self._gpu_pages = GpuPageReader(services, self._pages)
        self._batches = BatchReader(services, self._pages)

    async def __aenter__(self) -> CacheReader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._services.shares.close_cache(self.name)
        await self._services.flights.close_cache(self.name)
        await self._versions.close()
        await self._strays.close()

    @property
    def origin_description(self) -> str:
        """The origin as shown to people, without credentials."""
        return self._origin.description

    @property
    def geometry(self) -> PageGeometry:
        """How objects are cut into pages and frames."""
        return self._services.geometry

    @property
    def streams_awaited(self) -> bool:
        """Whether a stream waits for room that others hold while they are consumed."""
        return self._services.admission.streams.waiting > 0

    # --- versions ---------------------------------------------------------------------------

    async def resolve(
        self, object_id: ObjectId, *, if_match: str | None, deadline: Deadline
    ) -> Resolution:
        """Returns the version that a read of `object_id` means. See `Versions.resolve`."""
        return await self._versions.resolve(object_id, if_match=if_match, deadline=deadline)

    async def once_more_if_changed(
        self,
        object_id: ObjectId,
        *,
        if_match: str | None,
        deadline: Deadline,
        attempt: Callable[[Resolution], Awaitable[T]],
    ) -> T:
        """Runs `attempt` with the resolved version, and once more if that was changed under it.

        For requests that hand out nothing until `attempt` returns: it starts from nothing the
        second time. A pinned request is not tried again. Raises as `resolve` and `attempt` do.
        """
        resolution = await self.resolve(object_id, if_match=if_match, deadline=deadline)
        try:
            return await attempt(resolution)
        except RequestError as error:
            if if_match is not None or error.code != "version_changed":
                raise
        return await attempt(await self.resolve(object_id, if_match=if_match, deadline=deadline))

    @contextlib.contextmanager
    def _noting_changes(self, version: ObjectVersion) -> Iterator[None]:
        """Stops answering for a version that the origin says is gone."""
        try:
            yield
        except RequestError as error:
            if error.code in _VERSION_IS_GONE:
                self._versions.invalidate(version)
                current = self._versions.current_etag(version.object_id)
                error.current_etag = error.current_etag or current
            raise

    # --- reading ----------------------------------------------------------------------------

    async def read_into(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: memoryview,
        context: RequestContext,
        place: Place | None = None,
    ) -> ReadReport:
        """Writes bytes [start, stop) of `version` to `destination`, which has just their length.

        On return, error or cancelling nobody touches `destination` any more; after an error it
        holds verified bytes, zeros, or what lay there before. `place`: the same memory, where it is
        this process's own; whole pages of an origin land there at once, and a fetch that was left
        behind, after an error or cancelling, may still write to it for a while.

        Raises ValueError for a range outside; RequestError `version_changed`, `not_found`,
        `forbidden`; SourceError; IntegrityError `corrupt`; ResourceError `overloaded`,
        `deadline_exceeded`, `draining`.
        """
        if len(destination) != stop - start:
            raise ValueError(f"{len(destination)} bytes of room for {stop - start}")
        report = ReadReport()

        async def read(part: PagePart) -> str:
            own = place.part(part.offset, part.length) if place and part.whole else None
            return await self._pages.read(version, part, destination, context, report, place=own)

        async def read_batch(parts: list[PagePart]) -> Sequence[PagePart]:
            return await self._batches.read(version, parts, destination, context, report)

        await self._read_parts(version, start, stop, context, read, read_batch)
        return report

    async def read_into_gpu(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: GpuDestination,
        context: RequestContext,
    ) -> ReadReport:
        """As `read_into`, to GPU memory: verified and decrypted there before it is reported.

        Raises also ResourceError `gpu_unavailable`, `gpu_lost`, after which the range is
        undefined, and `gpu_out_of_memory`.
        """
        if destination.length != stop - start:
            raise ValueError(f"{destination.length} bytes of room for {stop - start}")
        report = ReadReport()

        async def read(part: PagePart) -> str:
            return await self._gpu_pages.read(version, part, destination, context, report)

        await wait_ready(destination.device, context.deadline)
        await self._read_parts(version, start, stop, context, read)
        return report

    async def _read_parts(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        context: RequestContext,
        read: Callable[[PagePart], Awaitable[str]],
        read_batch: Callable[[list[PagePart]], Awaitable[Sequence[PagePart]]] | None = None,
    ) -> None:
        """Has the parts of [start, stop) read, a window of them at a time.

        `read_batch` reads at once what memory has together, and returns what is left for `read`.
        """
        geometry, settings = self.geometry, self._services.settings
        parts = plan_pages(version.size, start, stop, geometry)
        width = min(settings.request_pages, part_count(start, stop, geometry))

        async def read_one(part: PagePart) -> None:
            context.deadline.check(f"reading {version.object_id.text}")
            rung = await read(part)
            if rung == "origin" and part.offset + part.length < stop - start:
                await self._services.write_back.relief(context.deadline)

        async def read_some(together: list[PagePart]) -> None:
            left: Sequence[PagePart] = together
            if read_batch is not None and len(together) > 1:
                context.deadline.check(f"reading {version.object_id.text}")
                left = await read_batch(together)
            for part in left:
                await read_one(part)

        together: Iterator[list[PagePart]] = ([part] for part in parts)
        if read_batch is not None:
            together = self._batches.cut(version, parts)
        if width:
            with self._noting_changes(version):
                await for_each_in_window(together, width, read_some)

    @property
    def share_chunk_bytes(self) -> int:
        """How objects are cut for `share`; 0 where this node shares no memory."""
        shares = self._services.shares
        return shares.chunk_bytes if shares.on else 0

    async def share(self, version: ObjectVersion, at: int, context: RequestContext) -> SharedPiece:
        """Returns memory that every reader of `version` shares, with byte `at` in it.

        Raises ValueError for a byte outside; as `read_into`; and ResourceError `share_off` and
        `share_full`.
        """
        if not 0 <= at < version.size:
            raise ValueError(f"byte {at} is not in an object of {version.size}")
        with self._noting_changes(version):
            return await self._services.shares.acquire(version, at, context, self._fill)

    async def _fill(
        self, version: ObjectVersion, start: int, place: Place, context: RequestContext
    ) -> ReadReport:
        stop = start + len(place.writable)
        return await self.read_into(version, start, stop, place.writable, context, place)

    def shared(
        self, version: ObjectVersion, start: int, stop: int, count_max: int
    ) -> list[SharedPiece]:
        """What of [start, stop) all readers of `version` share already, in order.

        At most `count_max` pieces; nothing is opened. Raises ResourceError `share_off`.
        """
        return self._services.shares.ready(version, start, stop, count_max)

    async def stream(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> AsyncGenerator[memoryview, None]:
        """Yields bytes [start, stop) of `version` in order, verified, in chunks.

        A chunk is valid until the next is asked for. Raises as `read_into`; what was yielded
        before an error is good. Close it (`aclose`) when stopping early: on return nothing of it
        runs or is held.
        """
        chunks = PageStream(self._services, self._pages, version, context).chunks(start, stop)
        with self._noting_changes(version):
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def prefetch(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> ReadReport:
        """Brings the pages of [start, stop) into the cache; returns where they were or came from.

        What is in memory or on disk is not read. Waits for the disk to have what came from the
        origin. Raises as `read_into`; ResourceError `overloaded` if a page could not be kept.
        """
        geometry = self.geometry
        parts = plan_pages(version.size, start, stop, geometry)
        width = min(self._services.settings.request_pages, part_count(start, stop, geometry))
        report = ReadReport()

        async def bring(part: PagePart) -> None:
            context.deadline.check(f"prefetching {version.object_id.text}")
            rung = await self._bring(PageId(version, part.index), part, context)
            report.add(rung, part.length)

        if width:
            with self._noting_changes(version):
                await for_each_in_window(parts, width, bring)
        return report

    async def _bring(self, page: PageId, part: PagePart, context: RequestContext) -> str:
        if self._services.memory.contains(page):
            return "memory"
        if await self._is_on_disk(page):
            return "disk"
        if not await self._pages.bring(page, context):
            raise ResourceError(
                "overloaded",
                f"{page.text} was fetched but could not be kept",
                hint="memory and disk are full or busy; see racer_fallbacks_total",
                retry=Retry.SAME,
                retry_after_seconds=5.0,
            )
        return "origin"

    # --- the rest ---------------------------------------------------------------------------

    async def evict(self, bucket: str, key: bytes, *, prefix: bool) -> tuple[int, int]:
        """Drops every cached page of every version of an object, or of all under a prefix.

        Returns pages and bytes that the disks gave up, or memory where no disk had the page.
        Reads that run are served to their end, and what they fetched is not kept.
        """
        services = self._services

        def matches(object_id: ObjectId) -> bool:
            if (object_id.cache, object_id.bucket) != (self.name, bucket):
                return False
            return object_id.key.startswith(key) if prefix else object_id.key == key

        names = [*self._versions.objects(), *services.memory.objects()]
        if not prefix:
            names = [ObjectId(self.name, bucket, key)]
        services.flights.evicted(matches)
        services.shares.evicted(matches)
        dropped = await self._forget([name async for name in in_slices(names) if matches(name)])
        await services.write_back.settled(matches)
        only_here = [page async for page in in_slices(dropped) if not services.store.contains(page)]
        pages, size = await services.threads.disk.run(
            partial(self._evict_stored, bucket, key, prefix)
        )
        length_of = self.geometry.page_length
        # What a read began to share while this waited was filled from what is gone now.
        services.shares.evicted(matches)
        size += sum(length_of(page.version.size, page.index) for page in only_here)
        return pages + len(only_here), size

    async def _forget(self, names: list[ObjectId]) -> list[PageId]:
        """Drops what memory has of the objects, and their versions; returns the pages."""
        memory = self._services.memory
        dropped = []
        for name in dict.fromkeys(names):
            self._versions.forget(name)
            async for page in in_slices(memory.pages_of(name)):
                memory.drop(page)
                dropped.append(page.id)
        return dropped

    async def _is_on_disk(self, page: PageId) -> bool:
        store = self._services.store
        if store.unproven(page):
            await self._confirm([page])
        return store.contains(page)

    async def _confirm(self, pages: list[PageId]) -> None:
        """Has the disks look for records that only a checkpoint tells of, for a bounded time."""
        services = self._services

        def confirm() -> None:
            for page in pages:
                services.store.confirm(page)

        job = services.threads.disk.submit(confirm, urgent=True)
        services.strays.watch(job)  # A disk that hangs must not hold whoever asks.
        await asyncio.wait([job.future], timeout=services.settings.disk_seconds)

    def _evict_stored(self, bucket: str, key: bytes, prefix: bool) -> tuple[int, int]:
        """Runs on a `disk` thread."""
        store = self._services.store
        if prefix:
            return store.evict_prefix(self.name, bucket, key)
        return store.evict_object(ObjectId(self.name, bucket, key))

    async def explain(self, version: ObjectVersion, start: int, stop: int) -> list[PageExplanation]:
        """Says for each page of [start, stop) which rung would serve it, and why no earlier one."""
        geometry = self.geometry
        pages = [
            PageId(version, part.index) for part in plan_pages(version.size, start, stop, geometry)
        ]
        store, threads = self._services.store, self._services.threads

        def unproven() -> list[PageId]:
            return [page for page in pages if store.unproven(page)]

        def stored() -> list[tuple[bool, str]]:
            return [(store.contains(page), store.explain(page)) for page in pages]

        # Thousands of look-ups would hold the loop too long.
        if doubtful := await threads.open.run(unproven):
            await self._confirm(doubtful)
        on_disk = await threads.open.run(stored)
        return [self._explained(page, *found) for page, found in zip(pages, on_disk, strict=True)]

    def _explained(self, page: PageId, on_disk: bool, disk_text: str) -> PageExplanation:
        services = self._services
        last = services.record.last(page)
        if services.memory.contains(page):
            return PageExplanation(page.index, "memory", {}, last)
        why = {"memory": "not in memory: not read yet, or its read did not keep it"}
        if services.memory.was_evicted(page):
            why["memory"] = "not in memory: evicted for other pages"
        elif services.flights.find(FlightKey(page)) is not None:
            why["memory"] = "not in memory yet: it is being acquired"
        if on_disk:
            return PageExplanation(page.index, "disk", why, last)
        return PageExplanation(page.index, "origin", {**why, "disk": disk_text}, last)

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
        """Returns up to `limit` entries whose key starts with `prefix`, in byte order.

        `after` is a listing's `next`. Raises what the origin raises, and `deadline_exceeded`.
        """

        def collect() -> Listing:
            entries = self._origin.list_objects(
                bucket, prefix, delimiter=delimiter, after=after, deadline=deadline
            )
            found: list[ListedObject | ListedPrefix] = []
            name_bytes = 0
            for entry in entries:
                if after is not None and entry.key <= after:
                    continue  # A common prefix that the page before ended with.
                if len(found) == limit or name_bytes > _LISTED_NAMES_BYTES:
                    return _listing(found, found[-1].key)
                found.append(entry)
                name_bytes += len(entry.key)
            return _listing(found, None)

        return await self._on_origin_thread(collect, deadline, f"listing {bucket}")

    async def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        """The buckets that can be named, or None where the origin cannot say."""
        call = partial(self._origin.list_buckets, deadline=deadline)
        return await self._on_origin_thread(call, deadline, "listing the buckets")

    async def _on_origin_thread(self, call: Callable[[], T], deadline: Deadline, doing: str) -> T:
        """Runs `call`, which holds nothing; whoever leaves early leaves it to its own deadline."""
        job = self._services.threads.origin.submit(call, urgent=True)
        try:
            await asyncio.wait([job.future], timeout=deadline.remaining_seconds())
            if job.future.done():
                return job.future.result()
            raise deadline_exceeded(doing)
        finally:
            self._strays.leave(job, _nothing_held)


def _listing(found: list[ListedObject | ListedPrefix], following: bytes | None) -> Listing:
    return Listing(
        objects=[entry for entry in found if isinstance(entry, ListedObject)],
        prefixes=[entry.key for entry in found if isinstance(entry, ListedPrefix)],
        next=following,
    )


def _nothing_held() -> None:
    """Listings hold no buffer and no charge."""
