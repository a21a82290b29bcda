"""Write-back: sealed pages on their way to a disk, behind the reads that brought them (F15).

Layer: read; loop thread only, the writes themselves on `disk` threads. A page waiting for its disk
is pinned in the memory tier by a lease and counted as **dirty**. Dirty bytes are bounded. A page
that finds no room waits a bounded time, and only while the disks make progress; then its write is
dropped and counted: the page was served, it is only not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from racerd.ids import ObjectId, PageId
from racerd.read.memory import MemoryPage, PageLease
from racerd.read.settings import ReadSettings
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import WorkerThreads, settled
from racerd.store import Store
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)


class WriteBack:
    """The write queue of the node."""

    def __init__(
        self,
        store: Store,
        threads: WorkerThreads,
        limit: int,
        settings: ReadSettings,
        metrics: Metrics,
    ) -> None:
        """`limit`: dirty bytes; a single page may always wait, whatever the limit is."""
        self._store = store
        self._threads = threads
        self._settings = settings
        self._metrics = metrics
        self._writing: dict[PageId, asyncio.Future[bool]] = {}
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._progress_at = time.monotonic()
        self.limit = limit
        self.used = 0
        metrics.budget_limit.labels("dirty").set(self.limit)
        metrics.budget_used.labels("dirty").set_function(lambda: self.used)

    async def accept(self, lease: PageLease, *, patient: bool) -> asyncio.Future[bool] | None:
        """Queues the page of `lease` for its disk, under a lease of its own.

        Returns a future that tells whether the page was kept, or None where the write was
        dropped. Waits for room up to `write_seconds`, `patient` callers as long as the disks
        make progress. Cancelling drops the write.
        """
        page = lease.page
        if not self._store.disks or not page.kept:
            return None
        amount = page.seal.length
        seconds = self._settings.fetch_seconds if patient else self._settings.write_seconds
        if not await self._room(amount, Deadline.after(seconds)):
            self._metrics.fallbacks.labels("write", "queue_full").inc()
            return None
        if not page.kept:  # Evicted while it waited.
            self._free(amount)
            return None
        return self._start(lease.share(), page, amount)

    async def relief(self, deadline: Deadline) -> None:
        """Waits while pages wait for room, as long as one of them would (see `accept`).

        What a reader does between two pages of a cold read, so that it does not outrun the disks.
        """
        if self._waiting:
            await self._room(0, deadline.within(self._settings.write_seconds))

    async def settled(self, matches: Callable[[ObjectId], bool]) -> None:
        """Waits until no page of the objects that match is queued or being written."""
        for page, future in list(self._writing.items()):
            if matches(page.version.object_id):
                await asyncio.wait([future])

    async def close(self) -> None:
        """Waits for the writes that are queued."""
        for future in list(self._writing.values()):
            await settled(future)

    # --- room -------------------------------------------------------------------------------

    async def _room(self, amount: int, deadline: Deadline) -> bool:
        """Takes `amount` of the budget in turn; False if it did not come free in time."""
        if not self._waiting and self._fits(amount):
            self.used += amount
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.append(entry)
        try:
            while not turn.done():
                patience = self._progress_at + self._settings.progress_seconds
                until = min(deadline.at, patience)
                await asyncio.wait([turn], timeout=max(0.0, until - time.monotonic()))
                now = time.monotonic()
                hangs = now >= self._progress_at + self._settings.progress_seconds
                if not turn.done() and (hangs or now >= deadline.at):
                    self._withdraw(entry)
                    return False
            return True
        except asyncio.CancelledError:
            if turn.done():
                self._free(amount)
            else:
                self._withdraw(entry)
            raise

    def _fits(self, amount: int) -> bool:
        return self.used == 0 or self.used + amount <= self.limit

    def _withdraw(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting.remove(entry)
        self._grant()

    def _free(self, amount: int) -> None:
        self.used -= amount
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            amount, turn = self._waiting.popleft()
            self.used += amount
            turn.set_result(None)

    # --- writing ----------------------------------------------------------------------------

    def _start(self, lease: PageLease, page: MemoryPage, amount: int) -> asyncio.Future[bool]:
        if not self._writing:
            self._progress_at = time.monotonic()
        job = self._threads.submit(partial(_write, self._store, page))
        self._writing[page.id] = job.future
        job.future.add_done_callback(partial(self._ended, lease, amount))
        return job.future

    def _ended(self, lease: PageLease, amount: int, future: asyncio.Future[bool]) -> None:
        page = lease.page
        if self._writing.get(page.id) is future:
            del self._writing[page.id]
        error = None if future.cancelled() else future.exception()
        if error is not None:
            _LOG.error("writing %s to disk failed", page.id.text, exc_info=error)
            self._metrics.fallbacks.labels("write", "failed").inc()
        self._progress_at = time.monotonic()
        lease.release()
        self._free(amount)


def _write(store: Store, page: MemoryPage) -> bool:
    """Runs on a `disk` thread. A page that was evicted meanwhile is not written."""
    return page.kept and store.write(page.sealed)
