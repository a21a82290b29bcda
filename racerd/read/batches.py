"""Batches: adjoining pages that memory has, opened as one job.

Layer: read; loop thread. What a warm read costs beside decryption is mostly the loop's part of each
page: a task, a turn, a job, a wake-up. While the loop runs it has the interpreter lock, and each
thread that is through with its frame waits for it. A batch takes that once for several pages.

A batch is a first try and no more: what it leaves (a page that was evicted meanwhile, all of them
where one does not verify) is read page by page, by the rules of `page_reader`.

Invariant: leases are taken when the batch has its turn, so that what waits keeps no page in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from racerd.errors import IntegrityError
from racerd.ids import ObjectVersion, PageId
from racerd.read.delivery import ON_LOOP_BYTES
from racerd.read.memory import PageLease
from racerd.read.page_reader import PageReader
from racerd.read.plan import PagePart, plan_batches
from racerd.read.request import ReadReport, RequestContext
from racerd.read.services import ReadServices
from racerd.runtime.threads import without_frames
from racerd.units import MIB

# Enough to make the loop's part small; few enough that the opening budget has room for two of them,
# so that the threads have work while one is handed over.
_BATCH_BYTES = 64 * MIB


class BatchReader:
    """Reads batches of parts of one cache into memory that the caller owns."""

    def __init__(self, services: ReadServices, pages: PageReader) -> None:
        self._services = services
        self._pages = pages
        opening = services.admission.opening
        # What is larger than a connection's share would never have its turn.
        self._batch_bytes = min(_BATCH_BYTES, opening.limit // 2, opening.key_limit)

    def cut(self, version: ObjectVersion, parts: Iterable[PagePart]) -> Iterator[list[PagePart]]:
        """Yields adjoining parts that memory has together, and every other part alone, in order.

        What is small enough for the loop to open itself is left alone, too.
        """
        memory = self._services.memory

        def fits(part: PagePart) -> bool:
            return part.length > ON_LOOP_BYTES and memory.contains(PageId(version, part.index))

        return plan_batches(parts, fits, self._batch_bytes)

    async def read(
        self,
        version: ObjectVersion,
        parts: Sequence[PagePart],
        destination: memoryview,
        context: RequestContext,
        report: ReadReport,
    ) -> Sequence[PagePart]:
        """Writes `parts` to their places in `destination`; returns those that are left to read.

        On return, error or cancelling nobody touches `destination` any more. Raises ResourceError
        `overloaded` or `deadline_exceeded` while it waits for its turn.
        """
        admission = self._services.admission
        with await admission.take(
            admission.opening,
            sum(part.length for part in parts),
            connection=context.connection,
            deadline=context.deadline,
        ):
            return await self._read_now(version, parts, destination, report)

    async def _read_now(
        self,
        version: ObjectVersion,
        parts: Sequence[PagePart],
        destination: memoryview,
        report: ReadReport,
    ) -> Sequence[PagePart]:
        memory = self._services.memory
        held: list[tuple[PageLease, PagePart]] = []
        left: list[PagePart] = []
        try:
            for part in parts:
                lease = memory.lease(PageId(version, part.index))
                if lease is None:
                    left.append(part)
                else:
                    held.append((lease, part))
            try:
                await self._services.delivery.deliver_batch(held, destination)
            except IntegrityError as error:
                without_frames(error)  # They hold the destination, and a job that holds the error.
                return parts  # Which page it was, and what becomes of it, is found one by one.
            for lease, part in held:
                lease.touch(part.start, part.stop)
                self._pages.count(lease.page.id, lease.rung, part.length)
                report.add(lease.rung, part.length)
            return left
        finally:
            for lease, _ in held:
                lease.release()
