"""One page of one read: acquire, deliver, and start over elsewhere if the bytes were bad.

Layer: read; loop thread. Memory is looked at first, then the page's flight is joined or led. What
does not verify is dropped, counted and asked for from the next rung; a reader sees `corrupt` only
when every rung failed (R22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from racerd.errors import IntegrityError, RacerError, Retry, SourceError
from racerd.ids import ObjectVersion, PageId
from racerd.read.flight import Flight, FlightKey
from racerd.read.ladder import Ladder, RungsExhausted
from racerd.read.memory import PageLease
from racerd.read.plan import PagePart, frame_span
from racerd.read.request import ReadReport, RequestContext
from racerd.read.services import ReadServices
from racerd.read.sources import Place, PlainShare, Source
from racerd.runtime.deadline import deadline_exceeded
from racerd.runtime.threads import without_frames

# Memory, disk and origin can fail once each; other readers may meanwhile put back what is bad.
_ATTEMPTS_MAX = 6


class PageReader:
    """Reads parts of pages of one cache into memory that the caller owns."""

    def __init__(self, services: ReadServices, ladder: Ladder) -> None:
        self._services = services
        self._ladder = ladder
        self._disk_only = Ladder([services.disk], services.metrics)
        self._rung_pages = {
            rung: services.metrics.rung_pages.labels(rung)
            for rung in ("memory", "cufile", *(rung.name for rung in ladder.rungs))
        }
        self._rung_bytes = {
            rung: services.metrics.rung_bytes.labels(rung) for rung in self._rung_pages
        }

    async def read(
        self,
        version: ObjectVersion,
        part: PagePart,
        destination: memoryview,
        context: RequestContext,
        report: ReadReport,
        *,
        wanted: PagePart | None = None,
        on_plain: Callable[[PageId, PlainShare], None] | None = None,
        place: Place | None = None,
    ) -> str:
        """Writes `part` to its place in `destination`; returns the rung that served it.

        `wanted`: what will be read of the page in all, where that is more than `part`. `on_plain`
        is shown plaintext that an origin sent, and may take a share of it. `place`: all of `part`
        in `destination`, a whole page, where an origin's bytes may land. On return, error or
        cancelling nobody touches `destination` any more, but for a fetch into `place` that was
        left behind. Raises as `serve`.
        """
        page = PageId(version, part.index)

        async def deliver(source: Source) -> None:
            if isinstance(source, PlainShare):
                if source.lies_in(place):
                    self.count(page, source.rung, part.length)
                    return
                if on_plain is not None:
                    on_plain(page, source)
            await self.deliver(source, page, part, destination, context)

        return await self.serve(page, part, context, report, deliver, wanted=wanted, place=place)

    async def serve(
        self,
        page: PageId,
        part: PagePart,
        context: RequestContext,
        report: ReadReport,
        deliver: Callable[[Source], Awaitable[None]],
        *,
        wanted: PagePart | None = None,
        place: Place | None = None,
    ) -> str:
        """Has sources of `page` delivered until one is good; returns the rung that had it.

        `deliver` raises IntegrityError for a source that does not verify: it is dropped, and the
        next rung is asked. The source stays ours. Raises what `acquire` and `deliver` raise;
        IntegrityError `corrupt` if no rung had good bytes.
        """
        bad: list[IntegrityError] = []
        skip: frozenset[str] = frozenset()
        for _ in range(_ATTEMPTS_MAX):
            try:
                source = await self.acquire(page, wanted or part, context, skip, place)
            except SourceError as error:
                if bad:
                    raise _corrupt(page, bad, error) from error
                raise
            try:
                await deliver(source)
            except IntegrityError as error:
                skip |= await self._condemn(source, error)
                if error.code != "key_retired":
                    without_frames(error)  # They hold this frame, with the list and the place.
                    bad.append(error)
                continue
            finally:
                source.release()
            report.add(source.rung, part.length)
            return source.rung
        raise _corrupt(page, bad, None)

    async def deliver(
        self,
        source: Source,
        page: PageId,
        part: PagePart,
        destination: memoryview,
        context: RequestContext,
    ) -> None:
        """Delivers from `source`, which stays the caller's, and counts it."""
        if isinstance(source, PageLease):
            source.touch(part.start, part.stop)
        await self._services.delivery.deliver(
            source, part, destination, connection=context.connection, deadline=context.deadline
        )
        self.count(page, source.rung, part.length)

    def count(self, page: PageId, rung: str, length: int) -> None:
        """Notes that `rung` served `length` bytes of `page`."""
        self._rung_pages[rung].inc()
        self._rung_bytes[rung].inc(length)
        self._services.record.note(page, rung)

    async def acquire(
        self,
        page: PageId,
        wanted: PagePart,
        context: RequestContext,
        skip: frozenset[str] = frozenset(),
        place: Place | None = None,
    ) -> Source:
        """Returns a source of `page`, from memory or from its flight; the caller releases it.

        `wanted` is what will be read of it: a small part of a page on disk is read alone. `place`
        is where the page may land, if its flight is led here. Raises what the rungs raised,
        ResourceError `deadline_exceeded` or `overloaded`. Cancelling leaves the flight.
        """
        lease = self._services.memory.lease(page)
        if lease is not None:
            return lease
        context.deadline.check(f"reading {page.text}")
        key = self._key(page, wanted, skip)
        try:
            return await self._fly(key, wanted, context, place)
        except RungsExhausted:
            if key.span is None:
                raise
            # The frames could not be had from the disk: the page is asked for elsewhere, whole.
            return await self._fly(self._whole(page, skip | {"disk"}), wanted, context, place)

    async def acquire_whole(
        self, page: PageId, wanted: PagePart, context: RequestContext
    ) -> Source:
        """As `acquire`, but takes the whole page from a disk for a part of it."""
        lease = self._services.memory.lease(page)
        return lease or await self._fly(FlightKey(page), wanted, context)

    async def bring(self, page: PageId, context: RequestContext) -> bool:
        """Acquires `page` for nobody; returns whether memory or a disk has it at the end.

        Raises as `acquire`.
        """
        flight = self.join_or_lead(FlightKey(page), context)
        flight.patient = True
        source = await self._services.flights.wait(flight, deadline=context.deadline)
        source.release()
        await asyncio.wait([flight.kept], timeout=context.deadline.remaining_seconds())
        if not flight.kept.done():
            raise deadline_exceeded(f"keeping {page.text}")
        services = self._services
        return services.memory.contains(page) or services.store.contains(page)

    def _key(self, page: PageId, wanted: PagePart, skip: frozenset[str]) -> FlightKey:
        """What to acquire for reading `wanted`: the page, or its frames alone from a disk."""
        services, whole = self._services, self._whole(page, skip)
        if services.flights.find(whole) is not None or whole.skip:
            return whole
        if not services.store.contains(page) or services.store.reads_whole(page):
            return whole
        span = FlightKey(page, frame_span(wanted, services.geometry.frame_bytes))
        if services.flights.find(span) is None and services.partial.takes_whole(page, wanted):
            return whole
        return span

    def _whole(self, page: PageId, skip: frozenset[str]) -> FlightKey:
        """Readers that skip a disk which has no copy any more want what all others want."""
        return FlightKey(page, None, skip if self._services.store.contains(page) else frozenset())

    async def _fly(
        self,
        key: FlightKey,
        wanted: PagePart,
        context: RequestContext,
        place: Place | None = None,
    ) -> Source:
        flight = self.join_or_lead(key, context, place)
        return await self._services.flights.wait(
            flight, deadline=context.deadline, wide_to=wanted.stop
        )

    def join_or_lead(
        self, key: FlightKey, context: RequestContext, place: Place | None = None
    ) -> Flight:
        """The flight of `key`. The caller waits for it next."""
        flights = self._services.flights
        flight = flights.find(key)
        if flight is None:
            return flights.lead(key, context.connection, self._acquire_and_keep, place)
        self._services.metrics.flight_joins.inc()
        return flight

    async def _acquire_and_keep(self, flight: Flight) -> None:
        """What the task of a flight runs."""
        ladder = self._ladder if flight.key.span is None else self._disk_only
        try:
            source = await ladder.acquire(flight)
        finally:
            flight.place = None  # A disk had no use for it.
        flight.land(source)
        if isinstance(source, PlainShare):
            await self._services.keeper.keep(flight, source)

    async def _condemn(self, source: Source, error: IntegrityError) -> frozenset[str]:
        """Drops the copy that did not verify. Returns the rungs not to ask again for this read."""
        assert isinstance(source, PageLease), "plaintext has nothing to verify"
        services = self._services
        if error.code == "key_retired":
            services.metrics.fallbacks.labels(source.rung, error.code).inc()
        else:
            services.metrics.corrupt_pages.labels(source.rung, error.code).inc()
        services.memory.drop(source.page)
        if source.rung != "disk":
            return frozenset()
        drop = partial(services.store.drop, source.page.id, error.code)
        job = services.threads.disk.submit(drop, urgent=True)
        services.strays.watch(job)  # A disk that hangs must not hold the reader.
        await asyncio.wait([job.future], timeout=services.settings.disk_seconds)
        return frozenset(("disk",))


def _corrupt(
    page: PageId, failures: list[IntegrityError], last: RacerError | None
) -> IntegrityError:
    told = "; ".join(failure.message for failure in failures)
    origin = "" if last is None else f"; then the origin failed: {last.message}"
    return IntegrityError(
        "corrupt",
        f"no source has good bytes of {page.text}: {told}{origin}",
        hint="the bad copies were dropped; read again, and check the disk if it repeats",
        retry=Retry.SAME,
    )
