"""Large reads: an object cut into parts, several of them in flight.

Layer: the plan (`cut`) is pure; `HostReads` drives it over connections of one endpoint, from the
calling thread alone. Every part is pinned to one ETag; parts are handed out in order. What a read
needs besides its own memory is bounded by the parts in flight, whatever the size of the object.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Protocol

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.errors import ConnectionLost, RacerError, TargetRefused
from racer.refusals import error_of
from racer.results import HostRead
from racer.retry import Retries
from racer.target import Registered
from racer.urls import RacerUrl

IN_FLIGHT = 8
PART_BYTES = 64 << 20
# Parts that are copied out of the ring are smaller: copying one overlaps with reading the next.
RING_PART_BYTES = 8 << 20
RING_SLOTS = 4


class Part(NamedTuple):
    """`[start, stop)` of the object."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def cut(start: int, stop: int, part_bytes: int, page_bytes: int) -> Iterator[Part]:
    """Cuts `[start, stop)` into parts of at most `part_bytes`.

    Ends lie between pages, so that no page is opened twice; or, where a page is larger than a
    part, on multiples of `part_bytes`, which are ends of frames. Only the first and the last part
    may be shorter.
    """
    step = part_bytes // page_bytes * page_bytes or part_bytes
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield Part(start, end)
        start = end


class Place(NamedTuple):
    """Where a part lands: at `offset` of the target."""

    target: Registered[Any]
    offset: int


class Slots(Protocol):
    """Where the parts of a read land."""

    def take(self, part: Part) -> Place | None:
        """The place for `part`, or None where there is no room now."""

    def give_back(self, place: Place) -> None:
        """The part there was dealt with."""


class Spread:
    """Each part at its own place in one target: the object's byte `start` lies at `base`."""

    def __init__(self, target: Registered[Any], start: int, base: int = 0) -> None:
        self._target = target
        self._shift = base - start

    def take(self, part: Part) -> Place | None:
        return Place(self._target, part.start + self._shift)

    def give_back(self, place: Place) -> None:
        """Places are used once."""


class _Flight:
    """A part on its way. `connection` is None while it waits to be sent (again)."""

    __slots__ = (
        "connection",
        "deadline",
        "done",
        "not_before",
        "part",
        "place",
        "retries",
        "target_id",
    )

    def __init__(self, part: Part, place: Place, retries: Retries, deadline: Deadline) -> None:
        self.part = part
        self.place = place
        self.retries = retries
        self.deadline = deadline
        self.connection: Connection | None = None
        self.target_id: str | None = None
        self.not_before = 0.0
        self.done: HostRead | None = None


class HostReads:
    """Reads of one version into places that `Slots` hand out.

    `etag` pins all of them; None is allowed where there is a single part. `seconds` bounds each
    part. `one_shot` sends the descriptor along instead of registering the memory.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        url: RacerUrl,
        etag: str | None,
        *,
        seconds: float,
        one_shot: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._url = url
        self._etag = etag
        self._seconds = seconds
        self._one_shot = one_shot
        self._flights: deque[_Flight] = deque()

    def run(self, parts: Iterator[Part], slots: Slots) -> Generator[tuple[Part, Place, HostRead]]:
        """Yields (part, place, answer) in order; the place is given back on the next step.

        Raises the error of the part that failed; then, and when the iterator is closed early, reads
        that are still in flight are cancelled, and their targets are given up.
        """
        following = next(parts, None)
        try:
            while following is not None or self._flights:
                following = self._start_some(following, parts, slots)
                first = self._flights[0]
                if first.done is None:
                    self._advance()
                    continue
                yield first.part, first.place, first.done
                self._flights.popleft()
                slots.give_back(first.place)
        finally:
            self._abandon()

    def _start_some(
        self, following: Part | None, parts: Iterator[Part], slots: Slots
    ) -> Part | None:
        """Adds flights up to the limit; returns the first part that found no place."""
        running = sum(flight.done is None for flight in self._flights)
        while following is not None and running < IN_FLIGHT:
            place = slots.take(following)
            if place is None:
                break
            deadline = Deadline.after(self._seconds)
            self._flights.append(_Flight(following, place, self._endpoint.retries(), deadline))
            running += 1
            following = next(parts, None)
        return following

    def _advance(self) -> None:
        """Sends what is due, then waits until one answer comes or something becomes due."""
        now = time.monotonic()
        waiting = [f for f in self._flights if f.done is None and f.connection is None]
        for flight in waiting:
            if flight.not_before <= now and not self._send(flight):
                break  # All connections are out; those of ours come back.
        sent = {f.connection.fileno(): f for f in self._flights if f.connection is not None}
        if not sent:
            pauses = [f.not_before for f in self._flights if f.done is None]
            if pauses:  # None is left where all that were to be sent were passed over.
                time.sleep(max(0.0, min(pauses) - time.monotonic()))
            return
        self._receive_some(sent)

    def _send(self, flight: _Flight) -> bool:
        """Puts the part on its way; False where no connection is free and others are ours."""
        endpoint, deadline = self._endpoint, flight.deadline
        try:
            if not self._one_shot:
                flight.target_id = flight.place.target.id_for(endpoint, deadline)
            else:
                flight.place.target.check()
                endpoint.check_name(deadline)
            if any(other.connection is not None for other in self._flights):
                connection = endpoint.pool.take_nowait()
                if connection is None:
                    return False
            else:
                connection = endpoint.pool.take(deadline)
            flight.connection = connection
            connection.send(
                requests.host_read_request(
                    self._url,
                    (flight.part.start, flight.part.stop),
                    self._etag,
                    target=flight.target_id,
                    target_offset=flight.place.offset,
                    operation=flight.place.target.operation,
                ),
                deadline,
                [flight.place.target.memory.fd] if self._one_shot else (),
            )
        except RacerError as error:
            self._failed(flight, error)
        return True

    def _receive_some(self, sent: dict[int, _Flight]) -> None:
        poller = select.poll()
        for fd in sent:
            poller.register(fd, select.POLLIN)
        now = time.monotonic()
        ends = [flight.deadline.with_grace().end for flight in sent.values()]
        ends += [f.not_before for f in self._flights if f.done is None and f.not_before > now]
        ready = poller.poll(max(0.0, min(ends) - now) * 1000 + 1)
        for fd, _ in ready:
            self._receive(sent[fd])
        for flight in sent.values():
            if flight.connection is not None and flight.deadline.with_grace().remaining <= 0:
                raise flight.deadline.exceeded()

    def _receive(self, flight: _Flight) -> None:
        assert flight.connection is not None
        part = (flight.part.start, flight.part.stop)
        try:
            head, body = flight.connection.receive(flight.deadline)
            self._endpoint.pool.give_back(flight.connection)
            flight.connection = None
            if head.status >= 400:
                raise error_of(head, body, about=str(self._url))
            flight.done = answers.read_host_read(head, body, part, self._etag)
        except RacerError as error:
            self._failed(flight, error)

    def passes_over(self, error: RacerError) -> bool:
        """Whether a part that was answered by `error` is handed out as it is (of its bytes none
        were written) instead of ending the read."""
        return False

    def _failed(self, flight: _Flight, error: RacerError) -> None:
        """Schedules the part's next try. Raises `error` where there is none."""
        connection, flight.connection = flight.connection, None
        if connection is not None:
            unsent = connection.idle or (isinstance(error, ConnectionLost) and error.unsent)
            self._endpoint.pool.give_back(connection)
            if not unsent:
                flight.place.target.give_up()
                raise error
        if isinstance(error, TargetRefused) and error.code == "target_unknown":
            # The daemon restarted, or its end of the registration went first.
            assert flight.target_id is not None
            flight.place.target.forget(self._endpoint, flight.target_id)
            lost = ConnectionLost(error.message, hint=error.hint)
            lost.unsent = True
            error = lost
        if connection is None and self.passes_over(error):
            flight.done = HostRead(0, flight.part.start, 0, self._etag or "", {})
            return
        if self._one_shot and flight.place.target.can_be_touched(error):
            flight.place.target.memory.touch()
            return
        flight.not_before = time.monotonic() + flight.retries.pause_after(error, flight.deadline)

    def _abandon(self) -> None:
        """Cancels what is in flight by closing its connections."""
        for flight in self._flights:
            if flight.connection is not None:
                flight.place.target.give_up()
                self._endpoint.pool.give_back(flight.connection)
                flight.connection = None
        self._flights.clear()
