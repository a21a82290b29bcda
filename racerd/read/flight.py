"""Flights: the one acquisition of a page, however many readers wait for it.

Layer: read; loop thread only. The first reader of a page that is not in memory **leads** its
flight; those who come while it is in the air **join**. Each waits under a deadline of its own and
gets a share of the source of its own. The last reader who leaves before the page landed cancels the
flight: the origin call is asked to stop, and its buffers are given back when it has stopped.

A flight runs in a task of the table, not of a reader. It always resolves: landed, failed with a
cause that every waiter gets, or cancelled. After landing it stays in the table while the page is
sealed, so that latecomers share the plaintext; then memory has the page.

    acquiring --land--> landed --sealed or given up--> over
        |------fail, cancel---------------------------> over
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from racerd.errors import RacerError, ResourceError, Retry
from racerd.ids import ObjectId, PageId
from racerd.origin.protocol import CancelToken
from racerd.read.sources import Place, Source
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.runtime.threads import settled
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlightKey:
    """What is acquired: a page, or only frames [span) of it from a disk, without some rungs.

    `skip` names the rungs whose copy was found bad: a reader that knows better than the flight
    under way leads one of its own.
    """

    page: PageId
    span: tuple[int, int] | None = None
    skip: frozenset[str] = frozenset()


class Flight:
    """One acquisition. Made by `FlightTable`; rungs write `rung` and `why`."""

    __slots__ = (
        "_landed", "_task", "_waiting", "cancel", "connection", "kept", "key", "landed", "patient",
        "place", "rung", "sealed", "started_at", "unwanted", "why", "wide_to",
    )  # fmt: skip

    def __init__(self, key: FlightKey, connection: Hashable, place: Place | None) -> None:
        """`connection` is the leader's: what the flight holds is charged to it. So is `place`,
        where a page of plaintext may land; whoever acquires the page takes it."""
        self.key = key
        self.connection = connection
        self.place = place
        self.rung = "start"
        self.why: dict[str, str] = {}  # Rung to the reason why it did not serve.
        self.cancel = CancelToken()
        self.kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Done once memory has the page, or it is known that it will not.
        self.sealed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_at = time.monotonic()
        self.unwanted = False  # The page was evicted meanwhile: serve it, do not keep it.
        self.patient = False  # Whether a waiter wants the page kept, however long a disk takes.
        self.wide_to = 0  # The end of the last byte of the page that a waiter wants.
        self.landed = False
        self._landed: Source | None = None
        self._waiting: list[asyncio.Future[Source]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def page(self) -> PageId:
        return self.key.page

    @property
    def waiters(self) -> int:
        return len(self._waiting)

    def land(self, source: Source) -> None:
        """Gives every waiter a share of `source`; latecomers too, until `let_go`. Takes it over."""
        self.landed = True
        self._landed = source
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(source.share())

    def let_go(self) -> None:
        """Ends the flight's own share of the source."""
        landed, self._landed = self._landed, None
        if landed is not None:
            landed.release()
        if not self.sealed.done():
            self.sealed.set_result(None)

    def _end(self, error: BaseException | None) -> None:
        """Resolves what is still open and lets go of the source."""
        self.let_go()
        if not self.kept.done():
            self.kept.set_result(False)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error if error is not None else _lost(self.page))


class FlightTable:
    """The flights of the node. `close` cancels them and waits for their tasks."""

    def __init__(self, metrics: Metrics, *, flights_max: int) -> None:
        self._metrics = metrics
        self._flights_max = flights_max
        self._flights: dict[FlightKey, Flight] = {}
        self._running: set[Flight] = set()  # Those that nobody finds any more included.
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def find(self, key: FlightKey) -> Flight | None:
        return self._flights.get(key)

    def lead(
        self,
        key: FlightKey,
        connection: Hashable,
        acquire: Callable[[Flight], Awaitable[None]],
        place: Place | None = None,
    ) -> Flight:
        """Starts a flight that runs `acquire`, which calls `Flight.land` or raises.

        Raises ResourceError `overloaded` above `flights_max`, `closed` after `close`. The caller
        waits for it next: nobody else would cancel it.
        """
        if self._closed:
            raise ResourceError("draining", "the daemon is shutting down", retry=Retry.ELSEWHERE)
        if len(self._running) >= self._flights_max:
            self._metrics.overloaded.labels("flights").inc()
            raise ResourceError(
                "overloaded",
                f"{self._flights_max} pages are being acquired already",
                hint="ask again later; /debug/flights shows what is slow",
                retry=Retry.SAME,
                retry_after_seconds=1.0,
            )
        flight = self._flights[key] = Flight(key, connection, place)
        self._running.add(flight)
        self._metrics.flights.set(len(self._running))
        flight._task = asyncio.get_running_loop().create_task(self._run(flight, acquire))
        return flight

    async def wait(self, flight: Flight, *, deadline: Deadline, wide_to: int = 0) -> Source:
        """Joins `flight` and returns a share of its source; the caller releases it.

        `wide_to`: where in the page the caller's bytes end. Raises what the flight failed with,
        or ResourceError `deadline_exceeded`. Leaving early, by deadline or cancelling, cancels
        the flight if nobody else waits and it has not landed.
        """
        flight.wide_to = max(flight.wide_to, wide_to)
        if flight._landed is not None:
            return flight._landed.share()
        waiter: asyncio.Future[Source] = asyncio.get_running_loop().create_future()
        flight._waiting.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=deadline.remaining_seconds())
            if not waiter.done():
                raise deadline_exceeded(f"waiting for {flight.page.text} from {flight.rung}")
            error = waiter.exception()
            if error is not None:
                raise twin(error) from error
            return waiter.result()
        except asyncio.CancelledError:
            if waiter.done() and waiter.exception() is None:
                waiter.result().release()
            raise
        finally:
            self._leave(flight, waiter)

    def _leave(self, flight: Flight, waiter: asyncio.Future[Source]) -> None:
        flight._waiting.remove(waiter)
        if not flight._waiting and not flight.landed:
            self.abandon(flight)

    def abandon(self, flight: Flight) -> None:
        """Cancels `flight`. Nobody finds it any more; its buffers live until they are free."""
        self._forget(flight)
        flight.cancel.cancel()
        if flight._task is not None:
            flight._task.cancel()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _run(self, flight: Flight, acquire: Callable[[Flight], Awaitable[None]]) -> None:
        error: BaseException | None = None
        try:
            await acquire(flight)
        except asyncio.CancelledError:
            error = ResourceError(
                "draining", f"the acquisition of {flight.page.text} was cancelled", retry=Retry.SAME
            )
        except RacerError as declared:
            error = declared
        except Exception as defect:  # noqa: BLE001  a defect must not strand the waiters
            _LOG.exception("the flight of %s failed at %s", flight.page.text, flight.rung)
            error = _internal(flight, defect)
        finally:
            self._forget(flight)
            flight._end(error)
            self._running.discard(flight)
            self._metrics.flights.set(len(self._running))

    def over(self, flight: Flight) -> None:
        """Takes a landed flight out: from here on memory has the page, or it is not kept."""
        self._forget(flight)
        flight.let_go()

    def evicted(self, matches: Callable[[ObjectId], bool]) -> None:
        """Flights of the objects that match still serve who waits, and keep nothing."""
        for key, flight in list(self._flights.items()):
            if matches(key.page.version.object_id):
                flight.unwanted = True
                self._forget(flight)

    async def close_cache(self, cache: str) -> None:
        """Cancels the flights of one cache and waits for their tasks."""
        for flight in [f for f in self._running if f.page.version.object_id.cache == cache]:
            assert flight._task is not None
            self.abandon(flight)
            await settled(flight._task)

    def describe(self) -> list[dict[str, object]]:
        """For `/debug/flights`: what is in the air, oldest first. No payload, no key."""
        now = time.monotonic()
        flights = sorted(self._running, key=lambda flight: flight.started_at)
        return [
            {
                "page": flight.page.text,
                "cache": flight.page.version.object_id.cache,
                "frames": list(flight.key.span) if flight.key.span else "all",
                "rung": flight.rung,
                "age_seconds": round(now - flight.started_at, 3),
                "waiters": flight.waiters,
                "landed": flight.landed,
                "why": dict(flight.why),
            }
            for flight in flights
        ]

    def stuck(self, seconds: float) -> list[Flight]:
        """Flights that have not landed for so long, oldest first: for a watchdog (F66)."""
        before = time.monotonic() - seconds
        found = [f for f in self._running if not f.landed and f.started_at <= before]
        return sorted(found, key=lambda flight: flight.started_at)

    async def close(self) -> None:
        """Cancels every flight and waits for the tasks. New ones are refused."""
        self._closed = True
        running = list(self._running)
        for flight in running:
            self.abandon(flight)
        for flight in running:
            assert flight._task is not None
            await settled(flight._task)


def twin(error: BaseException) -> BaseException:
    """A copy of a failure for one waiter: raising one exception in many tasks would tangle them."""
    twin = error.__class__.__new__(error.__class__)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    return twin


def _lost(page: PageId) -> RacerError:
    return RacerError("internal", f"the acquisition of {page.text} ended without a result")


def _internal(flight: Flight, defect: Exception) -> RacerError:
    error = RacerError(
        "internal",
        f"acquiring {flight.page.text} failed at {flight.rung}: {type(defect).__name__}",
        hint="this is a defect; the daemon's log has the trace",
    )
    error.__cause__ = defect
    return error
