"""What the client socket needs of a cache's reader.

Layer: serve. `racerd.read.reader.CacheReader` is the one there is in the product; both it and the
small honest reader of the tests pass `tests/contract/test_reader_contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from racerd.ids import ObjectId, ObjectVersion
from racerd.pages import PageGeometry
from racerd.read.gpu_disk import GpuDestination
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

T = TypeVar("T")


class Pins(Protocol):
    """What eviction of one cache spares."""

    @property
    def room_bytes(self) -> int:
        """Disk bytes that may still be pinned."""

    async def pin(self, bucket: str, key: bytes, *, prefix: bool) -> Pin:
        """Pins an object or a prefix; raises `pin_refused` where there is no room for it."""

    async def unpin(self, bucket: str, key: bytes, *, prefix: bool) -> bool:
        """Takes back just this pin; returns whether it was there."""

    async def all(self) -> Sequence[Pin]:
        """All pins of the cache."""


class Reader(Protocol):
    """One cache. Loop thread only. Raises the declared errors of `racerd.errors`."""

    @property
    def name(self) -> str: ...
    @property
    def origin_description(self) -> str: ...
    @property
    def geometry(self) -> PageGeometry: ...
    @property
    def pins(self) -> Pins: ...
    @property
    def streams_awaited(self) -> bool:
        """Whether a stream waits for room that others hold while they are consumed."""

    async def resolve(
        self, object_id: ObjectId, *, if_match: str | None, deadline: Deadline
    ) -> Resolution:
        """Returns the current version; `version_changed` where it is not `if_match`."""

    async def once_more_if_changed(
        self,
        object_id: ObjectId,
        *,
        if_match: str | None,
        deadline: Deadline,
        attempt: Callable[[Resolution], Awaitable[T]],
    ) -> T:
        """Resolves and runs `attempt`; once more where an unpinned version changed under it."""

    async def read_into(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: memoryview,
        context: RequestContext,
    ) -> ReadReport:
        """Fills `destination` with [start, stop). Once it returns, raises or was cancelled,
        nobody touches `destination` any more; what it holds is verified bytes or zeros."""

    @property
    def share_chunk_bytes(self) -> int:
        """How objects are cut for `share`; 0 where no memory is shared."""

    async def share(self, version: ObjectVersion, at: int, context: RequestContext) -> SharedPiece:
        """The shared memory that holds byte `at`; its descriptor is the caller's."""

    def shared(
        self, version: ObjectVersion, start: int, stop: int, count_max: int
    ) -> list[SharedPiece]:
        """What of [start, stop) is shared already; the descriptors are the caller's."""

    async def read_into_gpu(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        destination: GpuDestination,
        context: RequestContext,
    ) -> ReadReport:
        """As `read_into`, to GPU memory. Raises also `gpu_lost`, after which what the range holds
        is undefined, `gpu_unavailable` and `gpu_out_of_memory`."""

    def stream(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> AsyncGenerator[memoryview, None]:
        """Yields [start, stop) in order. A chunk is valid until the next one is asked for."""

    async def prefetch(
        self, version: ObjectVersion, start: int, stop: int, context: RequestContext
    ) -> ReadReport:
        """Returns once every page of [start, stop) is in the cache."""

    async def evict(self, bucket: str, key: bytes, *, prefix: bool) -> tuple[int, int]:
        """Drops every version's pages; returns pages and bytes."""

    async def explain(
        self, version: ObjectVersion, start: int, stop: int
    ) -> Sequence[PageExplanation]:
        """One entry for each page of [start, stop)."""

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
        """Lists at most `limit` objects and prefixes."""

    async def list_buckets(self, *, deadline: Deadline) -> Sequence[str] | None:
        """The buckets, or None where the origin cannot say."""
