"""One disk of the store: a slab with threads, a clock and a health.

Layer: store; thread-safe. Reads and writes run on the caller's threads; `upkeep`, on a thread of
its own, opens the slab, recovers it, and writes what can wait. The engine's lock is never held
during I/O, so `contains` and the properties may be called on the event loop.

A disk in trouble is a miss, never an error: callers see None or a reason, and the metrics say why.
I/O that hangs cannot be interrupted: it keeps its caller's thread and buffers until the kernel
answers. No further call goes near the disk meanwhile, and nothing else waits for it longer than
`wait_seconds_max`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.store.budget import WriteBudget
from racerd.store.claims import Dropped
from racerd.store.device import BlockDevice
from racerd.store.fates import Fates
from racerd.store.housekeeper import Keeper, Work
from racerd.store.live import LiveSlab
from racerd.store.loan import NotLent, RecordLoan
from racerd.store.mount import Mount, Mounter
from racerd.store.notes import Notes, Selector
from racerd.store.recovery import Progress
from racerd.store.report import DiskReport, condition_of
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.troubles import troubles
from racerd.store.upkeep import Upkeep
from racerd.store.watch import DiskWatch
from racerd.telemetry import Metrics


class Disk:
    """See the module. `label`, the path, names the disk in metrics; `clock` is monotonic.

    `on_open` is called on the disk's thread whenever the slab was opened.
    """

    def __init__(
        self, settings: DiskSettings, store: StoreSettings, page: PageGeometry, metrics: Metrics, *,
        open_device: Callable[[DiskSettings], BlockDevice], clock: Callable[[], float],
        make_keeper: Callable[[str, Work], Keeper], on_open: Callable[[], None],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.label = str(settings.path)
        self.watch = DiskWatch(settings.path, metrics, hang_seconds=store.hang_seconds, clock=clock)
        self.fates = Fates(clock)
        self._budget = WriteBudget(store.write_bytes_per_day)
        self._metrics = metrics
        mounter = Mounter(
            settings, store, page, metrics, open_device=open_device, watch=self.watch,
            budget=self._budget, fates=self.fates,
        )  # fmt: skip
        self.upkeep = Upkeep(
            self.label, mounter, self.watch, metrics, settings=store, make_keeper=make_keeper,
            on_open=on_open,
        )  # fmt: skip

    @property
    def _mount(self) -> Mount | None:
        return self.upkeep.mount

    @property
    def _live(self) -> LiveSlab | None:
        mount = self.upkeep.mount
        return mount.live if mount is not None else None

    # Lifetime

    def start(self) -> None:
        """Starts the disk's thread, which opens the slab and recovers it."""
        self._show()
        self.upkeep.start()

    def wait_open(self) -> None:
        """See `Upkeep.wait_open`."""
        self.upkeep.wait_open()

    def close(self) -> None:
        """Writes a last checkpoint and closes the slab. Waits a bounded time for the disk."""
        self.upkeep.close()

    # What others see

    def _show(self) -> None:
        """Sets gauges up that tell what is so at the time when they are read."""
        metrics, label = self._metrics, self.label
        pages, segments = metrics.store_recovery_pages, metrics.store_recovery_segments
        shown = [
            (metrics.store_pages.labels(label), lambda: self.page_count),
            (metrics.store_bytes.labels(label), lambda: self.live_bytes),
            (metrics.store_pinned_bytes.labels(label), lambda: self.pinned_bytes),
            (metrics.store_recovering.labels(label), lambda: self.recovering),
            (pages.labels(label, "checkpoint"), lambda: self.progress.pages_from_checkpoint),
            (pages.labels(label, "scan"), lambda: self.progress.pages_from_scan),
            (segments.labels(label, "total"), lambda: self.progress.segments_total),
            (segments.labels(label, "done"), lambda: self.progress.segments_done),
            (segments.labels(label, "unreadable"), lambda: self.progress.segments_unreadable),
        ]
        for gauge, value in shown:
            gauge.set_function(value)
        if self._budget.limited:
            left = metrics.store_write_budget_left.labels(label)
            left.set_function(lambda: self._budget.left(self.watch.now()) or 0.0)

    def report(self) -> DiskReport:
        condition = condition_of(self._mount, self.watch, self._budget)
        return DiskReport(
            self.label,
            condition.state.value,
            condition.reason,
            condition.direct,
            self.page_count,
            self.live_bytes,
            self.capacity_bytes,
            self.index_bytes,
            condition.recovering,
            condition.progress,
            tuple(troubles(condition)),
        )

    @property
    def opened(self) -> bool:
        return self._live is not None

    @property
    def recovering(self) -> bool:
        live = self._live
        return live is not None and not live.progress.done

    @property
    def progress(self) -> Progress:
        live = self._live
        return live.progress if live is not None else Progress()

    @property
    def page_count(self) -> int:
        live = self._live
        return len(live.engine.index) if live is not None else 0

    @property
    def live_bytes(self) -> int:
        live = self._live
        return live.engine.live_bytes if live is not None else 0

    @property
    def capacity_bytes(self) -> int:
        """What the slab may take; before it is open, what was asked for."""
        live = self._live
        if live is not None:
            return live.slab.geometry.capacity_bytes
        return self.settings.capacity_bytes or 0

    @property
    def index_bytes(self) -> int:
        live = self._live
        return live.engine.index.nbytes if live is not None else 0

    @property
    def slab_number(self) -> int | None:
        """The number of the slab as it is open now; see `RecordLoan`."""
        live = self._live
        return None if live is None else live.number

    # Looking up

    def contains(self, page: PageId) -> bool:
        """Whether a read would be tried."""
        return self.watch.readable and self.holds(page)

    def holds(self, page: PageId) -> bool:
        """Whether the index has `page`, readable or not."""
        live = self._live
        if live is None:
            return False
        with live.lock:
            return live.engine.contains(page)

    def unproven(self, page: PageId) -> bool:
        """Whether only a checkpoint of before the start says that `page` is here."""
        live = self._live
        if live is None:
            return False
        with live.lock:
            return live.engine.unproven(page)

    def reads_whole(self, page: PageId) -> bool:
        """See `Store.reads_whole`."""
        live = self._live
        if live is None:
            return False
        with live.lock:
            return live.engine.is_v1(page)

    def find_version(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        live = self._live
        if live is None:
            return None
        with live.lock:
            catalog = live.engine.index.catalog
            for row in catalog.rows_of_object(object_id):
                version = catalog.version(row)
                if version.etag == etag:
                    return version
        return None

    # Reading

    def read(self, page: PageId, first: int, frames: Sequence[memoryview]) -> Seal | None:
        """See `Store.read`."""
        mount = self._mount
        if mount is None or not self.watch.readable:
            self._metrics.store_reads.labels(self.label, "down").inc()
            return None
        return mount.reader.read(page, first, frames)

    def confirm(self, page: PageId) -> None:
        """See `Store.confirm`."""
        mount = self._mount
        if mount is not None and self.watch.readable:
            mount.reader.confirm(page)

    def lend(self, page: PageId) -> RecordLoan | NotLent:
        """See `Store.lend`."""
        mount = self._mount
        if mount is None or not self.watch.readable:
            return NotLent("down")
        return mount.reader.lend(page)

    def scrub_next(self) -> int | None:
        """See `scrub.Scrubbed`. A disk that is not normal is left alone."""
        mount = self._mount
        if mount is None or not mount.live.progress.done or not self.watch.writable:
            return None
        return mount.reader.scrub_next()

    # Writing and dropping

    def write(self, sealed: SealedPage) -> str:
        """Writes a page. Returns "kept", or the reason why not."""
        mount = self._mount
        if mount is None or not self.watch.writable:
            return "down"
        if not mount.live.settled:
            # It may be here already: of two records a crash could leave the one that is torn.
            return "recovering"
        return mount.writer.write(sealed)

    def drop(self, page: PageId) -> bool:
        """Forgets `page`; its tombstone is written soon. Returns whether it was here."""
        live = self._live
        if live is None:
            return False
        with live.lock:
            dropped = live.engine.drop(page)
        live.bury_soon([] if dropped is None else [dropped])
        return dropped is not None

    def evict(self, selector: Selector) -> tuple[int, int]:
        """Drops what `selector` names, also what is being written or not yet recovered.

        Returns pages and slab bytes once that is durable, or after a bounded time.
        """
        mount = self._mount
        if mount is None:
            return 0, 0
        live = mount.live
        with live.lock:
            fence = not live.progress.done
            if fence:
                mount.recovery.fences.append(selector)
            live.engine.cancel(selector)
        dropped = self._drop_selected(mount, selector)
        live.changed = True
        self._metrics.store_evicted_pages.labels(self.label, "asked").inc(len(dropped))
        fenced = selector if fence else None
        self.upkeep.ask(mount, lambda: self.upkeep.make_durable(live, fenced))
        return len(dropped), sum(each.record_bytes for each in dropped)

    def _drop_selected(self, mount: Mount, selector: Selector) -> list[Dropped]:
        """In steps, so that the lock is never held for long."""
        live, keeps_up = mount.live, True
        everything: list[Dropped] = []
        cursor: int | None = 0
        while cursor is not None:
            with live.lock:
                dropped, cursor = live.engine.drop_some(selector, cursor)
            live.tombstones.add(dropped)
            everything += dropped
            if keeps_up and live.tombstones.crowded:
                asked = self.upkeep.ask(mount, live.tombstones.bury)
                keeps_up = asked and not live.tombstones.crowded
        return everything

    def checkpoint(self) -> None:
        """Has a checkpoint written, and waits for it a bounded time."""
        mount = self._mount
        if mount is not None:
            self.upkeep.ask(mount, mount.checkpoints.write)

    # Pins and quotas

    @property
    def notes(self) -> Notes:
        live = self._live
        return live.slab.notes if live is not None else Notes()

    def set_pins(self, pins: tuple[Selector, ...], version: int) -> bool:
        """Pins exactly `pins`, now and after a restart. Waits a bounded time for the disk.

        Returns whether they are noted on the slab; where not, they are noted when it is back.
        """
        return self.upkeep.set_pins(pins, version)

    def held(self, selectors: Sequence[Selector]) -> tuple[int, int]:
        """Pages that any of `selectors` names, and the slab bytes that they take."""
        live = self._live
        if live is None:
            return 0, 0
        with live.lock:
            return live.engine.held(selectors)

    @property
    def pinned_bytes(self) -> int:
        live = self._live
        return live.engine.pinned_bytes if live is not None else 0

    @property
    def pinned_bytes_max(self) -> int:
        """Slab bytes up to which pins are honoured."""
        live = self._live
        return live.engine.pinned_bytes_max if live is not None else 0

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Slab bytes that each cache may take on this disk from now on."""
        self.upkeep.set_quotas(quotas)
