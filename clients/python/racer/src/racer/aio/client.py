"""The client for asyncio: `AsyncClient`.

Layer: top of `racer.aio`. The same calls as `racer.Client`, awaitable, with the same rules.
"""

from __future__ import annotations

import io
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from racer import questions, requests
from racer.aio.connection import AsyncConnection
from racer.aio.endpoint import AsyncEndpoint
from racer.aio.landing import AsyncLanding, AsyncMapping
from racer.aio.reads import AsyncRead, fill, get, in_order, into_fresh_memory
from racer.aio.target import AsyncRing, AsyncTarget
from racer.aio.threads import to_end
from racer.bulk import SMALL_BYTES
from racer.client import CONNECTIONS_MAX, TIMEOUT_SECONDS, Buffer, GpuArray, may_be_gpu
from racer.deadline import Deadline
from racer.errors import (
    Closed,
    Forked,
    RangeNotSatisfiable,
    VersionChanged,
)
from racer.mapping import MappedObject
from racer.memory import SharedMemory
from racer.questions import Question, T, Url
from racer.ranges import stop_of, within
from racer.results import (
    Entry,
    Evicted,
    Explanation,
    Front,
    Info,
    Pinned,
    Pins,
    Prefetched,
    Stat,
    Unpinned,
)
from racer.shared import SharedChunk, SharedPieces
from racer.sharing import all_taken_over, taken_over
from racer.socket_path import SocketPlace
from racer.urls import RacerUrl

if TYPE_CHECKING:
    from racer.aio.gpu import AsyncGpuBuffer, AsyncGpuSide


class AsyncClient:
    """Reads objects through the racerd of this node, for one event loop.

    Arguments are those of `racer.Client`. Use it as an async context manager, or `await aclose()`.
    A process that was forked has no event loop to go on with: there the client raises `Forked`.
    """

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        Deadline.after(timeout)  # Raises for what is no time.
        self.place = SocketPlace.find(
            None if socket is None else os.fspath(socket),
            None if run_dir is None else os.fspath(run_dir),
        )
        self.timeout = timeout
        self._connections_max = connections_max
        self._pid = os.getpid()
        self._endpoints: dict[str, AsyncEndpoint] = {}
        self._ring = AsyncRing()
        self._gpu: AsyncGpuSide | None = None
        self._closed = False

    # --- lifetime ---------------------------------------------------------------------------

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections and frees the client's own memory.

        Landings and mappings are their owners' and stay.
        """
        self._closed = True
        try:
            if self._gpu is not None:
                await self._gpu.aclose()
        finally:
            self._ring.close()
            for endpoint in self._endpoints.values():
                endpoint.pool.close()

    def _endpoint(self, cache: str) -> AsyncEndpoint:
        if os.getpid() != self._pid:
            raise Forked(
                "this AsyncClient belongs to the parent process",
                hint="make one in the child, in its own event loop",
            )
        if self._closed:
            raise Closed("the client was closed")
        endpoint = self._endpoints.get(cache)
        if endpoint is None:
            endpoint = AsyncEndpoint(cache, self.place, self._connections_max)
            self._endpoints[cache] = endpoint
        return endpoint

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    # --- small questions --------------------------------------------------------------------

    async def _ask(self, question: Question[T], timeout: float | None) -> T:
        answer = await self._endpoint(question.cache).call(
            question.request,
            self._deadline(timeout),
            about=question.about,
            idempotent=question.idempotent,
        )
        return question.read(answer)

    async def info(self, cache: str, *, timeout: float | None = None) -> Info:
        """What the daemon says about itself and about `cache`."""
        RacerUrl(cache)
        return await self._endpoint(cache).refresh_info(self._deadline(timeout))

    def caches(self) -> list[str]:
        """Names of the caches that have a socket in the run directory."""
        return self.place.caches()

    async def share(
        self, url: Url, offset: int = 0, *, etag: str | None = None, timeout: float | None = None
    ) -> SharedChunk:
        """Returns memory that all readers of an object share; see `Client.share`."""
        parsed = RacerUrl.parse_object(url)
        deadline = self._deadline(timeout)

        async def exchange(connection: AsyncConnection) -> SharedChunk:
            await connection.send(requests.share_request(parsed, offset, etag), deadline)
            answer, descriptors = await connection.receive_with_descriptors(deadline)
            return taken_over(answer, descriptors, parsed, offset, etag)

        return await self._endpoint(parsed.cache).attempt(exchange, deadline)

    async def shared(
        self, url: Url, offset: int = 0, *, etag: str | None = None, timeout: float | None = None
    ) -> SharedPieces:
        """Returns what of an object its readers share already; see `Client.shared`."""
        parsed = RacerUrl.parse_object(url)
        deadline = self._deadline(timeout)

        async def exchange(connection: AsyncConnection) -> SharedPieces:
            await connection.send(requests.shared_request(parsed, offset, etag), deadline)
            answer, descriptors = await connection.receive_with_descriptors(deadline)
            return all_taken_over(answer, descriptors, parsed, etag)

        return await self._endpoint(parsed.cache).attempt(exchange, deadline)

    async def stat(
        self, url: Url, *, etag: str | None = None, timeout: float | None = None
    ) -> Stat:
        """Size and version of an object. With `etag`, raises VersionChanged unless it is that."""
        return await self._ask(questions.stat(url, etag), timeout)

    async def list(
        self, url: Url, *, recursive: bool = True, timeout: float | None = None
    ) -> AsyncGenerator[Entry]:
        """Yields what lies under a prefix; see `Client.list`."""
        after: str | None = None
        while True:
            question = questions.listing(url, recursive=recursive, after=after)
            listing = await self._ask(question, timeout)
            for entry in listing.entries:
                yield entry
            if listing.after is None:
                return
            after = listing.after

    async def prefetch(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> Prefetched:
        """Has the daemon fetch a range into its cache; returns when it is there."""
        return await self._ask(questions.prefetch(url, offset, length, etag), timeout)

    async def evict(
        self, url: Url, *, prefix: bool = False, timeout: float | None = None
    ) -> Evicted:
        """Drops every cached page of an object, or (`prefix`) of all objects under the URL."""
        return await self._ask(questions.evict(url, prefix=prefix), timeout)

    async def pin(self, url: Url, *, prefix: bool = False, timeout: float | None = None) -> Pinned:
        """Spares an object, or (`prefix`) all under the URL, from eviction; also after a restart.

        Fetches nothing: see `prefetch`. Raises PinRefused where there is no room for the pin.
        """
        return await self._ask(questions.pin(url, prefix=prefix), timeout)

    async def unpin(
        self, url: Url, *, prefix: bool = False, timeout: float | None = None
    ) -> Unpinned:
        """Takes back just the `pin` that was made with these arguments."""
        return await self._ask(questions.unpin(url, prefix=prefix), timeout)

    async def pins(self, cache: str, *, timeout: float | None = None) -> Pins:
        """All pins of `cache`, and how much more may be pinned."""
        return await self._ask(questions.pins(cache), timeout)

    async def explain(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Explanation:
        """Which rung would serve each page now, and why not an earlier one."""
        return await self._ask(questions.explain(url, offset, length), timeout)

    # --- reads ------------------------------------------------------------------------------

    async def read(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """Returns `length` bytes from `offset` (all that follow, without it); see `Client.read`."""
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        if stop is not None and (stop == offset or stop - offset > SMALL_BYTES):
            stat = await self.stat(parsed, etag=etag, timeout=seconds)
            start, end = within(parsed, offset, stop, stat.size)
            if start == end:
                return b""
            return await self._read_large(self._read(parsed, start, end, stat.etag, seconds))
        return await self._read_small(parsed, offset, stop, etag, seconds)

    async def read_front(
        self, url: Url, length: int, *, etag: str | None = None, timeout: float | None = None
    ) -> Front:
        """As `Client.read_front`."""
        parsed = RacerUrl.parse_object(url)
        seconds = self.timeout if timeout is None else timeout
        try:
            body, data = await get(self._read(parsed, 0, length, etag, seconds))
        except RangeNotSatisfiable as error:
            if error.size != 0:
                raise
            stat = await self.stat(parsed, etag=etag, timeout=seconds)
            if stat.size:
                raise
            return Front(0, stat.etag, b"")
        return Front(body.size, body.etag, data)

    async def _read_small(
        self, url: RacerUrl, offset: int, stop: int | None, etag: str | None, seconds: float
    ) -> bytes:
        """A short range; or, with no end, a short one first and then what it says is left."""
        read = self._read(
            url, offset, offset + SMALL_BYTES if stop is None else stop, etag, seconds
        )
        try:
            body, data = await get(read)
        except RangeNotSatisfiable as error:
            if error.size == 0 and offset == 0:
                return b""  # An empty object has no first byte, and can be read all the same.
            raise
        if stop is not None or body.stop == body.size:
            return data
        rest = read._replace(start=body.stop, stop=body.size, etag=body.etag)
        return data + await self._read_large(rest)

    async def _read_large(self, read: AsyncRead) -> bytes:
        # BytesIO owns a bytes object that can be written to until it is taken out, uncopied.
        buffer = io.BytesIO()
        buffer.seek(read.stop - read.start - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as view:
            await fill(read, self._ring, view)
        return buffer.getvalue()

    async def read_into(
        self,
        url: Url,
        buffer: Buffer | GpuArray,
        offset: int = 0,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Fills a writable buffer from `offset` on; returns how many bytes came.

        The buffer belongs to the call until it ends, also where it is cancelled: nothing touches
        it afterwards. On an error it holds nothing to rely on. It may be in GPU memory, as in
        `Client.read_into`.
        """
        parsed = RacerUrl.parse_object(url)
        seconds = self.timeout if timeout is None else timeout
        if offset < 0:
            raise ValueError(f"the offset {offset} is negative")
        if may_be_gpu(buffer):
            from racer.gpu.place import is_gpu_destination

            if is_gpu_destination(buffer):
                return await self._read_into_gpu(parsed, buffer, offset, etag, seconds)
        with memoryview(buffer) as given, given.cast("B") as view:
            if view.readonly:
                raise TypeError("the buffer is read-only")
            if len(view) <= SMALL_BYTES:
                data = await self.read(parsed, offset, len(view), etag=etag, timeout=seconds)
                view[: len(data)] = data
                return len(data)
            stat = await self.stat(parsed, etag=etag, timeout=seconds)
            start, end = within(parsed, offset, offset + len(view), stat.size)
            if start < end:
                read = self._read(parsed, start, end, stat.etag, seconds)
                with view[: end - start] as wanted:
                    await fill(read, self._ring, wanted)
            return end - start

    async def _read_into_gpu(
        self, url: RacerUrl, array: GpuArray, offset: int, etag: str | None, seconds: float
    ) -> int:
        from racer.gpu.place import GpuPlace

        with GpuPlace(array) as place:
            stat = await self.stat(url, etag=etag, timeout=seconds)
            start, end = within(url, offset, offset + place.nbytes, stat.size)
            if start < end:
                await to_end(place.wait)
                read = self._read(url, start, end, stat.etag, seconds)
                await self._gpu_side().fill(read, place)
            return end - start

    def _gpu_side(self) -> AsyncGpuSide:
        from racer.aio.gpu import AsyncGpuSide

        if self._gpu is None:
            self._gpu = AsyncGpuSide(self._ring)
        return self._gpu

    async def gpu_alloc(self, nbytes: int, device: object = 0) -> AsyncGpuBuffer:
        """Makes `nbytes` of GPU memory that the daemon writes into; see `Client.gpu_alloc`.

        An async context manager, or the caller's to `aclose`.
        """
        if self._closed:
            raise Closed("the client was closed")
        from racer.aio.gpu import async_alloc

        return await async_alloc(nbytes, device)

    async def stream(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[memoryview]:
        """Yields the bytes in order, in chunks that are valid until the next one is asked for.

        Leave it early only through `contextlib.aclosing`, so that its reads end there and then.
        """
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        stat = await self.stat(parsed, etag=etag, timeout=seconds)
        start, end = within(parsed, offset, stop, stat.size)
        read = self._read(parsed, start, end, stat.etag, seconds)
        async with aclosing(in_order(read, self._ring)) as chunks:
            async for chunk in chunks:
                yield chunk.view

    def map(
        self,
        url: Url,
        offset: int = 0,
        length: int | None = None,
        *,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> AsyncMapping:
        """Reads into fresh shared memory that the daemon fills directly: nothing is copied.

            async with client.map(url) as view: ...

        Raises MemoryUnavailable where the system has no room for it.
        """
        parsed = RacerUrl.parse_object(url)
        stop = stop_of(offset, length)
        seconds = self.timeout if timeout is None else timeout
        return AsyncMapping(self._map(parsed, offset, stop, etag, seconds))

    async def _map(
        self, url: RacerUrl, offset: int, stop: int | None, etag: str | None, seconds: float
    ) -> MappedObject:
        try:
            return await self._map_version(url, offset, stop, etag, seconds)
        except VersionChanged:
            if etag is not None:
                raise
            # The object was replaced between the question for its size and the read of it.
            return await self._map_version(url, offset, stop, None, seconds)

    async def _map_version(
        self, url: RacerUrl, offset: int, stop: int | None, etag: str | None, seconds: float
    ) -> MappedObject:
        stat = await self.stat(url, etag=etag, timeout=seconds)
        start, end = within(url, offset, stop, stat.size)
        memory: SharedMemory | None = None
        rungs: dict[str, int] = {}
        if start < end:
            read = self._read(url, start, end, stat.etag, seconds)
            memory, rungs = await into_fresh_memory(read)
        return MappedObject(
            memory,
            url=stat.url,
            etag=stat.etag,
            offset=offset,
            object_size=stat.size,
            rungs=rungs,
        )

    async def landing(self, nbytes: int, *, timeout: float | None = None) -> AsyncLanding:
        """Makes `nbytes` of touched, reusable memory to read into; the caller closes it."""
        target = await AsyncTarget.allocate(nbytes, populate=True)
        return AsyncLanding(target, self._endpoint, self.timeout if timeout is None else timeout)

    def _read(
        self, url: RacerUrl, start: int, stop: int, etag: str | None, seconds: float
    ) -> AsyncRead:
        return AsyncRead(self._endpoint(url.cache), url, etag, start, stop, seconds)
