"""Landing memory: touched once, registered once, read into again and again.

Layer: on `transfer` and `target`. Fresh memory costs several times what touched memory costs, so
whoever reads much keeps its memory. `Landing` is the caller's own; `Ring` is what a client keeps
for `read_into` and `stream`: a bounded number of slots that all threads share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Generic, NamedTuple, TypeVar

from racer import answers, requests
from racer.deadline import Deadline
from racer.endpoint import Endpoint, is_refusal
from racer.errors import Closed, RacerError
from racer.lent import Lent
from racer.memory import PageKind, SharedMemory
from racer.results import HostRead, add_rungs
from racer.streaming import get_into
from racer.target import Registered, Target
from racer.transfer import (
    PART_BYTES,
    RING_PART_BYTES,
    RING_SLOTS,
    HostReads,
    Part,
    Place,
    Spread,
    cut,
)
from racer.turns import Turns
from racer.urls import RacerUrl


class Landing:
    """`nbytes` of memory that daemons write into; made by `Client.landing`, closed by the caller.

    Ownership: between reads the bytes are the caller's. A read overwrites `[at, at + length)` and
    nothing else; it is the caller who keeps reads of several threads, and views still in use, out
    of each other's ranges. Views outlive `close` (the memory goes with the last one), and no read
    writes to them any more then.

    A read that was not answered (the daemon died, the caller was interrupted, another part of the
    same read failed) makes the landing unusable, because the daemon may write late: further reads
    raise `MemoryLost`; close it and make a new one.
    """

    def __init__(
        self,
        nbytes: int,
        endpoint_for: Callable[[str], Endpoint],
        seconds: float,
    ) -> None:
        self._target = Target(SharedMemory.allocate(nbytes, populate=True))
        self._endpoint_for = endpoint_for
        self._seconds = seconds
        self.nbytes = nbytes

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

    def read(
        self,
        url: str | RacerUrl,
        offset: int,
        length: int,
        *,
        at: int = 0,
        etag: str | None = None,
        timeout: float | None = None,
    ) -> HostRead:
        """Reads `[offset, offset + length)` of the object to `[at, …)` of the landing.

        Returns how many bytes came (fewer only at the object's end), of which version, and from
        which rungs. Without `etag`, a read of several pages takes the version that is current.
        Raises what the daemon says; RangeNotSatisfiable where `offset` is at or past the end.
        """
        if offset < 0 or length <= 0 or at < 0 or at + length > self.nbytes:
            raise ValueError(
                f"bytes {offset}+{length} do not fit at {at} of a landing of {self.nbytes} bytes"
            )
        parsed = RacerUrl.parse_object(url)
        endpoint = self._endpoint_for(parsed.cache)
        seconds = self._seconds if timeout is None else timeout
        page_bytes = endpoint.info(Deadline.after(seconds)).page_bytes
        job = _Job(endpoint, parsed, offset, at, seconds)
        if offset // page_bytes == (offset + length - 1) // page_bytes:
            return self._run(job, [Part(offset, offset + length)], etag)
        # Version and end come first, for next to nothing: all parts can then be in flight at once.
        answer = endpoint.call(
            requests.stat_request(parsed, etag), Deadline.after(seconds), about=str(parsed)
        )
        stat = answers.read_stat(parsed, answer.head)
        stop = min(offset + length, max(stat.size, offset + 1))  # The daemon refuses a start there.
        return self._run(job, list(cut(offset, stop, PART_BYTES, page_bytes)), stat.etag)

    def _run(self, job: _Job, parts: list[Part], etag: str | None) -> HostRead:
        endpoint = job.endpoint
        if endpoint.stream_only is None:
            reads = HostReads(endpoint, job.url, etag, seconds=job.seconds)
            try:
                spread = Spread(self._target, job.offset, job.at)
                return reduce(merge, (d for _, _, d in reads.run(iter(parts), spread)))
            except RacerError as error:
                if not is_refusal(error):
                    raise
                endpoint.fall_back(error)
        total: HostRead | None = None
        for part in parts:
            self._target.check()
            start = part.start - job.offset + job.at
            with self.view[start : start + part.length] as view:
                body = get_into(endpoint, job.url, part.start, view, etag, job.seconds)
            length = body.stop - body.start
            done = HostRead(length, body.start, body.size, body.etag, {"stream": length})
            total = done if total is None else merge(total, done)
        assert total is not None
        return total

    def close(self) -> None:
        """Has the daemons let go and gives the memory up; views that are held keep it alive."""
        self._target.close()

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Job(NamedTuple):
    """One call of `Landing.read`."""

    endpoint: Endpoint
    url: RacerUrl
    offset: int
    at: int
    seconds: float


def merge(first: HostRead, second: HostRead) -> HostRead:
    """Two answers about adjoining ranges as one."""
    rungs = dict(first.rungs)
    add_rungs(rungs, second.rungs)
    return HostRead(first.bytes + second.bytes, first.offset, second.size, second.etag, rungs)


S = TypeVar("S", bound=Registered[Any])


class SharedSlots(Generic[S]):
    """Up to `slots` targets of `slot_bytes`, shared by the threads of a client.

    Made when they are needed and kept for the next read. A reader holds at least one and takes
    more while there are any. A target that was given up (see `Target`) is closed when it comes
    back, and another one is made in its place.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = slots
        self._made: Lent[S] = Lent()  # Those in use, and those that wait.
        self._turns = Turns()
        self._targets: list[S] = []
        self._closed = False

    def make(self) -> S | None:
        """Another target; None where there is no room for it beside those that there are."""
        raise NotImplementedError

    def enter(self, deadline: Deadline) -> SlotsHold[S]:
        """Takes one slot, waiting for it up to `deadline`. Raises what `make` raises."""
        return SlotsHold(self, self._turns.until(self._take, deadline))

    def take_nowait(self) -> S | None:
        """Another slot, or None where all are in use."""
        with self._turns.lock:
            return self._take()

    def _take(self) -> S | None:
        """With the lock held. The slot used last comes first: its memory is warm."""
        if self._closed:
            raise Closed("the client was closed")
        if self._targets:
            return self._targets.pop()
        if self._made.reached(self._slots):
            return None
        target = self.make()
        if target is not None:
            self._made.add(target)
        return target

    def give_back(self, target: S) -> None:
        with self._turns.lock:
            keep = not (self._closed or target.lost or target.memory.closed)
            if keep:
                self._targets.append(target)
            else:
                self._made.remove(target)
            self._turns.wake()
        if not keep:
            target.close()

    def close(self) -> None:
        """Frees the slots, those in use as they come back."""
        with self._turns.lock:
            self._closed = True
            targets, self._targets = self._targets, []
            self._turns.wake_all()
        for target in targets:
            target.close()

    def after_fork_in_child(self) -> None:
        """The parent's memory is not ours to read into: the child starts without."""
        self._turns = Turns()
        targets, self._targets, self._made = self._targets, [], Lent()
        for target in targets:
            target.memory.close()


class Ring(SharedSlots[Target]):
    """The slots in shared memory."""

    def __init__(self, slot_bytes: int = RING_PART_BYTES, slots: int = RING_SLOTS) -> None:
        super().__init__(slot_bytes, slots)

    def make(self) -> Target:
        """Raises MemoryUnavailable."""
        return Target(SharedMemory.allocate(self.slot_bytes))


class SlotsHold(Generic[S]):
    """One reader's slots: the `Slots` of its `HostReads`. A context manager."""

    def __init__(self, slots: SharedSlots[S], first: S) -> None:
        self._slots = slots
        self._spare: S | None = first
        self._used: list[S] = []

    def take(self, part: Part) -> Place | None:
        assert part.length <= self._slots.slot_bytes
        target, self._spare = self._spare, None
        if target is None:
            target = self._slots.take_nowait()
        if target is None:
            return None
        self._used.append(target)
        return Place(target, 0)

    def give_back(self, place: Place) -> None:
        target = next(used for used in self._used if used is place.target)
        self._used.remove(target)
        if self._spare is None:
            self._spare = target  # Whoever reads goes on without waiting for others.
        else:
            self._slots.give_back(target)

    def __enter__(self) -> SlotsHold[S]:
        return self

    def __exit__(self, *_: object) -> None:
        targets, self._used = self._used, []
        if self._spare is not None:
            targets.append(self._spare)
            self._spare = None
        for target in targets:
            self._slots.give_back(target)
