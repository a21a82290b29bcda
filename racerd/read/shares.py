"""Shared landings: plaintext that is opened once and mapped by everybody who reads it.

Layer: read; loop thread only. Ranks and pods of one node that load the same version would each have
the same pages opened for them, into memory of their own. Instead a **chunk** of an object (pages
that adjoin, SHARE_CHUNK_BYTES of them) is opened once, into memory of this process, which is then
sealed against writing and handed to each reader as a read-only descriptor.

    filling --sealed--> ready --unused for a while, or its room is needed--> gone
       |                  |--evicted by name--> retired --unused--> gone
       |---failed, nobody waits--> abandoned --no fetch writes there any more--> gone

What an origin sends lands in the chunk itself (`sources.Place`). A reader gets the chunk as soon as
all is there; the pages are sealed for the cache from the same memory, before or after.

One budget bounds all of it, from before the memory is made until the kernel says that nobody has it
open or mapped any more: a reader may keep its mapping after its connection has ended, and what it
keeps stays charged. (What `SharedMemory.in_use` cannot see is not: a client that is out to waste
memory of the node can hold some beyond the budget.) Plaintext that nobody uses is not kept for
long: `idle_seconds`.

Filling runs in a task of its own, under the deadline of nobody: each who waits has its own, and
the last who leaves cancels it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from racerd.errors import RacerError, ResourceError, Retry
from racerd.ids import ObjectId, ObjectVersion
from racerd.pages import PageGeometry
from racerd.read.flight import twin
from racerd.read.request import ReadReport, RequestContext
from racerd.read.sources import Place
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.runtime.memory_map import HUGE_PAGE_BYTES
from racerd.runtime.process import descriptors_max
from racerd.runtime.shared_memory import PageKind, SharedMemory, sharing_trouble
from racerd.runtime.threads import WorkerThreads, settled, without_frames
from racerd.telemetry import Metrics
from racerd.units import MIB, format_bytes, round_up

_LOG = logging.getLogger(__name__)

SHARE_CHUNK_BYTES = 32 * MIB
_FILL_SECONDS = 600.0
_DESCRIPTORS_SHARE = 4  # Of the descriptors that this process may have, one of so many.
_FULL_SECONDS = 0.05  # How long a refusal holds: looking for room takes a look at every chunk.
_SWEEP_SECONDS = 0.003  # What one sweep may take of the loop; it goes on soon after.
_SWEEP_PAUSE_SECONDS = 0.02

_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

Fill = Callable[[ObjectVersion, int, Place, RequestContext], Awaitable[ReadReport]]
"""Writes the version's bytes from `start` on to the place, all of it. Once that is done, whoever
still needs the bytes has them from `settled`; after an error, a fetch may write on for a while."""


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Bytes [start, stop) of a version behind a read-only descriptor, from its offset 0.

    The descriptor is the receiver's. `report` tells where the bytes came from: this read's own
    rungs, or the rung `shared`.
    """

    descriptor: int
    start: int
    stop: int
    report: ReadReport


@dataclass(eq=False, slots=True)
class _Chunk:
    """One chunk. `memory` is there once it was made; `report` once it was filled and sealed."""

    version: ObjectVersion
    start: int
    stop: int
    charged_bytes: int
    used_at: float
    memory: SharedMemory | None = None
    report: ReadReport | None = None
    unwanted: bool = False
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    task: asyncio.Task[ReadReport] | None = None

    @property
    def state(self) -> str:
        if self.report is not None:
            return "ready"
        return "abandoned" if self.task is None else "filling"

    @property
    def evictable(self) -> bool:
        return self.report is not None and not self.waiting

    def in_use(self) -> bool:
        return self.memory is not None and self.memory.in_use()


class SharedLandings:
    """The shared chunks of the node. `close` cancels what is being filled and gives all up."""

    def __init__(
        self,
        threads: WorkerThreads,
        geometry: PageGeometry,
        metrics: Metrics,
        *,
        limit_bytes: int,
        idle_seconds: float,
    ) -> None:
        """`limit_bytes` 0 turns sharing off; so does a kernel that cannot tell who uses what."""
        self.chunk_bytes = max(SHARE_CHUNK_BYTES, geometry.page_bytes)
        self._threads = threads
        self._metrics = metrics
        self._limit_bytes = limit_bytes
        self._idle_seconds = idle_seconds
        self._off = self._why_off(limit_bytes)
        self._chunks: dict[tuple[bytes, int], _Chunk] = {}  # The one used longest ago first.
        self._retired: list[_Chunk] = []
        self._filling: set[_Chunk] = set()
        self._charged_bytes = 0
        self._chunks_max = max(1, descriptors_max() // _DESCRIPTORS_SHARE)
        self._full_until = 0.0
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        metrics.budget_limit.labels("share").set(limit_bytes)
        metrics.budget_used.labels("share").set_function(lambda: self._charged_bytes)

    def _why_off(self, limit_bytes: int) -> str | None:
        if limit_bytes == 0:
            return "`share` is 0"
        trouble = sharing_trouble()
        if trouble is not None:
            _LOG.warning("no memory is shared between readers here: %s", trouble)
            return trouble
        if limit_bytes < self.chunk_bytes:
            return f"`share` is less than a chunk of {format_bytes(self.chunk_bytes)}"
        return None

    @property
    def on(self) -> bool:
        return self._off is None

    @property
    def charged_bytes(self) -> int:
        """What readers have mapped, what is ready for the next one, and what is being filled."""
        return self._charged_bytes

    async def acquire(
        self, version: ObjectVersion, at: int, context: RequestContext, fill: Fill
    ) -> SharedPiece:
        """Returns the chunk that holds byte `at` of `version`; the caller owns its descriptor.

        Raises ResourceError `share_off`, `share_full` (all of the budget is in use),
        `deadline_exceeded`, `draining`; and what `fill` raises. Cancelling leaves the chunk.
        """
        self._check_on()
        start = at - at % self.chunk_bytes
        chunk = self._chunks.get((version.digest, start))
        if chunk is not None and chunk.version != version:
            chunk = None  # Two versions with one digest: never seen, and never mixed.
        joined = chunk is not None
        if chunk is None:
            chunk = self._lead(version, start, context.connection, fill)
        if chunk.report is None:
            await self._filled(chunk, context.deadline)
        assert chunk.report is not None
        piece = SharedPiece(
            self._reader_of(chunk), chunk.start, chunk.stop, _report(chunk, joined=joined)
        )
        self._note_use(chunk, joined=joined)
        return piece

    def ready(
        self, version: ObjectVersion, start: int, stop: int, count_max: int
    ) -> list[SharedPiece]:
        """What of [start, stop) is there already, in order, at most `count_max` chunks of it.

        The descriptors are the caller's. Raises ResourceError `share_off`; what cannot be handed
        out for want of descriptors is left out.
        """
        self._check_on()
        pieces: list[SharedPiece] = []
        for at in range(start - start % self.chunk_bytes, stop, self.chunk_bytes):
            if len(pieces) == count_max:
                break
            chunk = self._chunks.get((version.digest, at))
            if chunk is None or chunk.version != version or chunk.report is None:
                continue
            try:
                descriptor = self._reader_of(chunk)
            except ResourceError:
                break
            report = _report(chunk, joined=True)
            pieces.append(SharedPiece(descriptor, chunk.start, chunk.stop, report))
            self._note_use(chunk, joined=True)
        return pieces

    def _check_on(self) -> None:
        if self._off is not None:
            self._metrics.shares_refused.labels("off").inc()
            raise ResourceError(
                "share_off",
                f"this node shares no memory between readers: {self._off}",
                hint="read into memory of your own (host-read)",
            )

    def _note_use(self, chunk: _Chunk, *, joined: bool) -> None:
        chunk.used_at = time.monotonic()
        key = (chunk.version.digest, chunk.start)
        if self._chunks.get(key) is chunk:
            self._chunks[key] = self._chunks.pop(key)
        length = chunk.stop - chunk.start
        self._metrics.shared_reads.labels("joined" if joined else "filled").inc()
        if joined:
            self._metrics.rung_bytes.labels("shared").inc(length)

    def _reader_of(self, chunk: _Chunk) -> int:
        assert chunk.memory is not None
        try:
            return chunk.memory.reader()
        except OSError as error:
            if error.errno not in _PASSING:
                self._retire(chunk)  # Nobody could be given it any more.
            raise self._no_memory(error) from error

    # --- filling ----------------------------------------------------------------------------

    def _lead(self, version: ObjectVersion, start: int, connection: Hashable, fill: Fill) -> _Chunk:
        """Starts filling a chunk. The caller waits for it next: nobody else would cancel it."""
        if self._closed:
            raise ResourceError("draining", "the daemon is shutting down", retry=Retry.ELSEWHERE)
        stop = min(start + self.chunk_bytes, version.size)
        charged_bytes = round_up(stop - start, HUGE_PAGE_BYTES)
        self._make_room(charged_bytes)
        self._charged_bytes += charged_bytes
        chunk = _Chunk(version, start, stop, charged_bytes, time.monotonic())
        self._chunks[version.digest, start] = chunk
        self._filling.add(chunk)
        task = asyncio.get_running_loop().create_task(self._fill(chunk, connection, fill))
        # A callback and not the task itself: a task that is cancelled early never begins.
        task.add_done_callback(partial(self._ended, chunk))
        chunk.task = task
        return chunk

    async def _filled(self, chunk: _Chunk, deadline: Deadline) -> None:
        """Waits until `chunk` is ready; raises what filling it raised."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        chunk.waiting.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=deadline.remaining_seconds())
            if not waiter.done():
                raise deadline_exceeded("waiting for shared memory to be filled")
            error = waiter.exception()
            if error is not None:
                raise twin(error) from error
        finally:
            chunk.waiting.remove(waiter)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # Seen, also by one who was cancelled in the same moment.
            if not chunk.waiting and chunk.report is None:
                self._abandon(chunk)

    def _abandon(self, chunk: _Chunk) -> None:
        """Cancels it; where it ended in this very moment, `_ended` finds that nobody wants it."""
        chunk.unwanted = True
        self._forget(chunk)
        if chunk.task is not None:
            chunk.task.cancel()

    def _ended(self, chunk: _Chunk, task: asyncio.Task[ReadReport]) -> None:
        """The task that filled `chunk` is over, or was cancelled before it began."""
        self._filling.discard(chunk)
        chunk.task = None
        failure = None if task.cancelled() else task.exception()
        if task.cancelled():
            failure = ResourceError("draining", "filling shared memory was cancelled")
        if failure is not None:
            failure = self._told(failure, chunk)
        if failure is None:
            chunk.report = task.result()
            if chunk.unwanted and not chunk.waiting:
                self._free(chunk)  # Given to nobody yet.
            elif chunk.unwanted:
                self._retire(chunk)
        else:
            self._forget(chunk)
            self._free(chunk)
        for waiter in chunk.waiting:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)
        self._keep_sweeping()

    def _told(self, failure: BaseException, chunk: _Chunk) -> RacerError:
        """What those who wait are told of `failure`. Its frames, which hold the memory, go."""
        if not isinstance(failure, RacerError | OSError):
            name = chunk.version.object_id.text
            _LOG.error("filling shared memory of %s failed", name, exc_info=failure)
        without_frames(failure)
        if isinstance(failure, RacerError):
            return failure
        if isinstance(failure, OSError):
            return self._no_memory(failure)
        return RacerError("internal", f"filling shared memory failed: {type(failure).__name__}")

    async def _fill(self, chunk: _Chunk, connection: Hashable, fill: Fill) -> ReadReport:
        """Makes the memory, has it filled, and seals it."""
        length = chunk.stop - chunk.start

        def make() -> None:
            # Not returned: who is cancelled meanwhile finds it at the chunk, and frees it.
            chunk.memory = SharedMemory(length)

        await self._threads.run(make)
        memory = chunk.memory
        assert memory is not None
        if memory.page_kind is PageKind.BASE:
            self._metrics.fallbacks.labels("share_huge_pages", "refused").inc()
        context = RequestContext(connection, Deadline.after(_FILL_SECONDS))
        with memory.view() as writable, memory.settled() as settled:
            place = Place(writable, settled)
            report = await fill(chunk.version, chunk.start, place, context)
        await self._threads.run(partial(self._seal, memory))
        return report

    def _seal(self, memory: SharedMemory) -> None:
        """Runs on an `open` thread."""
        try:
            memory.seal()
        except BufferError:
            # Filling has ended, but an error that somebody got over may hold a view, and itself. It
            # is collected now; a thread that writes after all keeps its view, and the refusal.
            self._metrics.fallbacks.labels("share_seal", "views_left").inc()
            gc.collect()
            memory.seal()

    def _no_memory(self, error: OSError) -> ResourceError:
        self._metrics.shares_refused.labels("system").inc()
        return ResourceError(
            "share_full",
            f"the system gives no shared memory: {os.strerror(error.errno or 0)}",
            hint="read into memory of your own, or raise the daemon's limit of memory or of"
            " open files",
            retry=Retry.SAME,
            retry_after_seconds=1.0,
        )

    # --- room -------------------------------------------------------------------------------

    def _make_room(self, wanted_bytes: int) -> None:
        """Gives up chunks that nobody uses until `wanted_bytes` fit. Raises `share_full`."""
        if self._fits(wanted_bytes):
            return
        if time.monotonic() >= self._full_until:
            self._reap()
            for chunk in list(self._chunks.values()):
                if self._fits(wanted_bytes):
                    return
                if chunk.evictable and not chunk.in_use():
                    self._drop(chunk, "room")
        if not self._fits(wanted_bytes):
            if time.monotonic() >= self._full_until:
                self._full_until = time.monotonic() + _FULL_SECONDS
            self._metrics.shares_refused.labels("full").inc()
            raise ResourceError(
                "share_full",
                f"all {format_bytes(self._limit_bytes)} of shared memory are in use",
                hint="read into memory of your own, or give the daemon more (--share)",
                retry=Retry.SAME,
                retry_after_seconds=1.0,
            )

    def _fits(self, wanted_bytes: int) -> bool:
        chunks = len(self._chunks) + len(self._retired)
        return self._charged_bytes + wanted_bytes <= self._limit_bytes and chunks < self._chunks_max

    def _keep_sweeping(self, pause: float | None = None) -> None:
        """While there is anything, what nobody uses any more is looked for now and then."""
        if self._sweep is None and not self._closed and (self._chunks or self._retired):
            pause = max(0.05, self._idle_seconds / 4) if pause is None else pause
            self._sweep = asyncio.get_running_loop().call_later(pause, self._swept)

    def _swept(self) -> None:
        self._sweep = None
        self._reap()
        now = time.monotonic()
        for chunk in list(self._chunks.values()):
            if not chunk.evictable:
                continue
            if chunk.in_use():
                chunk.used_at = now
            elif chunk.used_at <= now - self._idle_seconds:
                self._drop(chunk, "idle")
                if time.monotonic() > now + _SWEEP_SECONDS:
                    self._keep_sweeping(_SWEEP_PAUSE_SECONDS)
                    return
        self._keep_sweeping()

    def _reap(self) -> None:
        """Frees what was retired and is not used any more."""
        for chunk in list(self._retired):
            if not chunk.waiting and not chunk.in_use():
                self._retired.remove(chunk)
                self._free(chunk)

    def _drop(self, chunk: _Chunk, reason: str) -> None:
        self._forget(chunk)
        self._free(chunk)
        self._metrics.shares_evicted.labels(reason).inc()

    def _retire(self, chunk: _Chunk) -> None:
        """Nobody finds it any more; it is charged until nobody uses it."""
        self._forget(chunk)
        self._retired.append(chunk)
        self._metrics.shares_evicted.labels("named").inc()
        self._keep_sweeping()

    def _forget(self, chunk: _Chunk) -> None:
        key = (chunk.version.digest, chunk.start)
        if self._chunks.get(key) is chunk:
            del self._chunks[key]

    def _free(self, chunk: _Chunk) -> None:
        """Closes the memory. It stays charged while a fetch that nobody waits for writes there."""
        if chunk.memory is not None:
            chunk.memory.close()
            if chunk.memory.in_use() and not self._closed:
                self._retired.append(chunk)
                self._keep_sweeping()
                return
        chunk.memory = None
        self._charged_bytes -= chunk.charged_bytes
        chunk.charged_bytes = 0

    # --- from outside -----------------------------------------------------------------------

    def evicted(self, matches: Callable[[ObjectId], bool]) -> None:
        """Chunks of the objects that match are given to nobody any more."""
        for chunk in list(self._chunks.values()):
            if not matches(chunk.version.object_id):
                continue
            if chunk.report is None:
                chunk.unwanted = True
                self._forget(chunk)
            else:
                self._retire(chunk)
        self._reap()

    def describe(self) -> list[dict[str, object]]:
        """For `/debug/shares`: the chunks there are. No payload."""
        now = time.monotonic()
        found = [*self._chunks.values(), *self._retired]
        return [
            {
                "object": chunk.version.object_id.text,
                "start": chunk.start,
                "stop": chunk.stop,
                "state": chunk.state,
                "in_use": chunk.in_use(),
                "retired": chunk in self._retired,
                "pages": chunk.memory.page_kind.value if chunk.memory is not None else None,
                "unused_seconds": round(now - chunk.used_at, 3),
            }
            for chunk in found
        ]

    async def close_cache(self, cache: str) -> None:
        """Cancels what is being filled for one cache, waits for it, and retires the rest."""
        filling = [c for c in self._filling if c.version.object_id.cache == cache]
        await self._cancel(filling)
        self.evicted(lambda object_id: object_id.cache == cache)

    async def close(self) -> None:
        """Gives everything up; readers keep what they have mapped."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        await self._cancel(list(self._filling))
        for chunk in [*self._chunks.values(), *self._retired]:
            self._free(chunk)
        self._chunks.clear()
        self._retired.clear()

    async def _cancel(self, chunks: list[_Chunk]) -> None:
        tasks = [chunk.task for chunk in chunks if chunk.task is not None]
        for chunk in chunks:
            self._abandon(chunk)
        for task in tasks:
            await settled(task)


def _report(chunk: _Chunk, *, joined: bool) -> ReadReport:
    assert chunk.report is not None
    if not joined:
        return chunk.report
    length = chunk.stop - chunk.start
    return ReadReport(length, {"shared": length})
