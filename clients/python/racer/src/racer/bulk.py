"""Large reads of one version: in order through the ring, or all at once into fresh memory.

Layer: on `transfer`, `landing` and `streaming`. The ladder of the client (R4 in the requirements):
the daemon writes into shared memory; where it refuses, or there is none, the bytes come over the
socket. A connection that ends in the middle costs the memory that was being written to (see
`Target`) and what of it was not handed out yet; the read goes on from there, a bounded number of
times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

from racer.deadline import Deadline
from racer.endpoint import Endpoint, is_refusal
from racer.errors import (
    ConnectionLost,
    MemoryLost,
    ProtocolError,
    RacerError,
)
from racer.landing import Ring, SlotsHold
from racer.memory import SharedMemory
from racer.results import add_rungs
from racer.streaming import get_into
from racer.target import Target
from racer.transfer import PART_BYTES, RING_PART_BYTES, HostReads, Part, Spread, cut
from racer.urls import RacerUrl

# Up to here a read over the socket is as fast as one into shared memory, and simpler.
SMALL_BYTES = 256 << 10


class BulkRead(NamedTuple):
    """`[start, stop)` of the version `etag` of an object; `seconds` bounds each part."""

    endpoint: Endpoint
    url: RacerUrl
    etag: str
    start: int
    stop: int
    seconds: float

    def parts(self, start: int, part_bytes: int) -> Iterator[Part]:
        page_bytes = self.endpoint.info(Deadline.after(self.seconds)).page_bytes
        return cut(start, self.stop, part_bytes, page_bytes)


class Chunk(NamedTuple):
    """A part of a read, in memory that is reused when the next one is asked for."""

    start: int
    view: memoryview
    memory: SharedMemory | None = None  # That `view` is the front of.

    def copy_to(self, destination: memoryview) -> None:
        """Copies all of it to `destination`, which is as long.

        Through the kernel where it can be: that copy does not hold the interpreter lock.
        """
        if self.memory is None:
            destination[:] = self.view
            return
        done = 0
        while done < len(destination):
            with destination[done:] as rest:
                done += os.preadv(self.memory.fd, [rest], done)


def in_order(read: BulkRead, ring: Ring) -> Generator[Chunk]:
    """Yields the range in order. Closing the iterator early cancels what is in flight."""
    position = read.start
    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
    while position < read.stop and read.endpoint.stream_only is None:
        try:
            for chunk in _through_ring(read, position, ring, deadline):
                yield chunk
                position += len(chunk.view)
                retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
        except (ConnectionLost, MemoryLost) as error:
            pause = retries.pause_after(error, deadline)
            time.sleep(pause)
        except RacerError as error:
            if not is_refusal(error):
                raise
            read.endpoint.fall_back(error)
            break
    yield from _streamed(read, position)


def _through_ring(read: BulkRead, position: int, ring: Ring, deadline: Deadline) -> Iterator[Chunk]:
    parts = read.parts(position, ring.slot_bytes)
    with ring.enter(deadline) as hold:
        yield from _held(read, parts, hold)


def _held(read: BulkRead, parts: Iterator[Part], hold: SlotsHold[Target]) -> Iterator[Chunk]:
    reads = HostReads(read.endpoint, read.url, read.etag, seconds=read.seconds)
    running = reads.run(parts, hold)
    try:
        for part, place, _ in running:
            memory = place.target.memory
            with memory.view[: part.length] as view:
                yield Chunk(part.start, view, memory)
    finally:
        # A generator that an exception left behind would end whenever it is collected.
        running.close()


def _streamed(read: BulkRead, position: int) -> Iterator[Chunk]:
    while position < read.stop:
        length = min(RING_PART_BYTES, read.stop - position)
        with memoryview(bytearray(length)) as view:
            _get_all(read, position, view)
            yield Chunk(position, view)
        position += length


def _get_all(read: BulkRead, start: int, view: memoryview) -> None:
    body = get_into(read.endpoint, read.url, start, view, read.etag, read.seconds)
    if body.stop != start + len(view):
        raise ProtocolError(f"{read.url} is {body.size:,} bytes long and was longer before")


def fill(read: BulkRead, ring: Ring, destination: memoryview) -> None:
    """Fills `destination`, which is as long as the range."""
    if len(destination) <= SMALL_BYTES or read.endpoint.stream_only is not None:
        stream_into(read, destination)
        return
    chunks = in_order(read, ring)
    try:
        for chunk in chunks:
            start = chunk.start - read.start
            with destination[start : start + len(chunk.view)] as into:
                chunk.copy_to(into)
    finally:
        chunks.close()


def stream_into(read: BulkRead, destination: memoryview) -> dict[str, int]:
    """The same over the socket; returns the bytes by rung, which the socket does not tell."""
    position = read.start
    while position < read.stop:
        start = position - read.start
        with destination[start : start + PART_BYTES] as view:
            _get_all(read, position, view)
            position += len(view)
    return {"stream": read.stop - read.start}


def into_fresh_memory(read: BulkRead) -> tuple[SharedMemory, dict[str, int]]:
    """Returns memory that holds the range, which is not empty, and the bytes by rung.

    Raises MemoryUnavailable where the system has no room for all of it.
    """
    retries, deadline = read.endpoint.retries(), Deadline.after(read.seconds)
    while True:
        target = Target(SharedMemory.allocate(read.stop - read.start))
        try:
            rungs = _into_target(read, target)
            target.release()
            return target.memory, rungs
        except BaseException as error:
            target.close()
            if not isinstance(error, ConnectionLost | MemoryLost):
                raise
            pause = retries.pause_after(error, deadline)
        time.sleep(pause)


def _into_target(read: BulkRead, target: Target) -> dict[str, int]:
    if read.endpoint.stream_only is None:
        parts = list(read.parts(read.start, PART_BYTES))
        reads = HostReads(
            read.endpoint,
            read.url,
            read.etag,
            seconds=read.seconds,
            one_shot=len(parts) == 1,
        )
        rungs: dict[str, int] = {}
        try:
            for _, _, done in reads.run(iter(parts), Spread(target, read.start)):
                add_rungs(rungs, done.rungs)
            return rungs
        except RacerError as error:
            if not is_refusal(error):
                raise
            read.endpoint.fall_back(error)
    return stream_into(read, target.memory.view)
