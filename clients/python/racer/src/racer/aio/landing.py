"""Memory of the caller's own, for asyncio.

Layer: on `aio.reads`. The counterpart of `racer.landing.Landing` and `racer.mapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

from racer.aio.endpoint import AsyncEndpoint
from racer.aio.reads import AsyncRead, get_into, host_read, into_target
from racer.aio.target import AsyncTarget
from racer.deadline import Deadline
from racer.endpoint import is_refusal
from racer.errors import RacerError
from racer.mapping import MappedObject
from racer.memory import PageKind
from racer.results import HostRead, add_rungs
from racer.transfer import PART_BYTES, cut
from racer.urls import RacerUrl


class AsyncLanding:
    """`nbytes` of touched, reusable memory; made by `AsyncClient.landing`, closed by the caller.

    Ownership is that of `racer.Landing`: between reads the bytes are the caller's, a read
    overwrites `[at, at + length)` and nothing else, views outlive `aclose`. A read that was
    cancelled or not answered makes the landing unusable (`MemoryLost`).
    """

    def __init__(
        self,
        target: AsyncTarget,
        endpoint_for: Callable[[str], AsyncEndpoint],
        seconds: float,
    ) -> None:
        self._target = target
        self._endpoint_for = endpoint_for
        self._seconds = seconds
        self.nbytes = target.memory.size

    @property
    def view(self) -> memoryview:
        """All of it, writable."""
        return self._target.memory.view

    @property
    def page_kind(self) -> PageKind:
        """What backs the memory: `hugetlb`, `transparent` or `base`."""
        return self._target.memory.page_kind

    @property
    def lost(self) -> bool:
        """Whether a read was not answered, so that this landing cannot be used any more."""
        return self._target.lost

    async def read(
        self,
        url: str | RacerUrl,
        offset: int,
        length: int,
        *,
        at: int = 0,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> HostRead:
        """Reads `[offset, offset + length)` of the object to `[at, …)`; see `Landing.read`."""
        if offset < 0 or length <= 0 or at < 0 or at + length > self.nbytes:
            raise ValueError(
                f"bytes {offset}+{length} do not fit at {at} of a landing of {self.nbytes} bytes"
            )
        parsed = RacerUrl.parse_object(url)
        self._target.check()
        seconds = self._seconds if timeout is None else timeout
        endpoint = self._endpoint_for(parsed.cache)
        read = AsyncRead(endpoint, parsed, etag, offset, offset + length, seconds)
        first = await self._first(read, at)
        position, stop = offset + first.bytes, min(offset + length, first.size)
        if position == stop:
            return first
        # Version and end are known now: a part that starts behind the end would be refused.
        rest = read._replace(etag=first.etag, stop=stop)
        rungs = dict(first.rungs)
        add_rungs(rungs, await into_target(rest, self._target, position, at + first.bytes))
        return first._replace(bytes=stop - offset, rungs=rungs)

    async def _first(self, read: AsyncRead, at: int) -> HostRead:
        endpoint = read.endpoint
        info = await endpoint.info(Deadline.after(read.seconds))
        part = next(cut(read.start, read.stop, PART_BYTES, info.page_bytes))
        if endpoint.stream_only is None:
            try:
                return await host_read(read, part, self._target, at)
            except RacerError as error:
                if not is_refusal(error):
                    raise
                endpoint.fall_back(error)
        with self.view[at : at + part.length] as view:
            body = await get_into(read, part.start, view)
        length = body.stop - body.start
        return HostRead(length, body.start, body.size, body.etag, {"stream": length})

    async def aclose(self) -> None:
        """Has the daemons let go and gives the memory up; views that are held keep it alive."""
        try:
            await self._target.release()
        finally:
            self._target.close_now()

    async def __aenter__(self) -> AsyncLanding:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncMapping:
    """A mapping in the making: `async with client.map(url) as view`, or, to keep it,
    `mapped = await client.map(url)`, which is the caller's to close."""

    def __init__(self, making: Coroutine[Any, Any, MappedObject]) -> None:
        self._making = making
        self._mapped: MappedObject | None = None

    def __await__(self) -> Generator[Any, Any, MappedObject]:
        return self._making.__await__()

    async def __aenter__(self) -> memoryview:
        self._mapped = await self._making
        return self._mapped.view

    async def __aexit__(self, *_: object) -> None:
        assert self._mapped is not None
        self._mapped.close()
