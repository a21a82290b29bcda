"""One disk of the store: a slab with threads, a clock and a health.

Layer: store; thread-safe. Reads and writes run on the caller's threads; a thread of its own opens
the slab, recovers it, writes tombstones, notes and checkpoints, scrubs, and probes a disk that is
down. The engine's lock is never held during I/O, so `contains` may be called on the event loop.

A disk in trouble is a miss, never an error: callers see None or a reason, and the metrics say why.
I/O that hangs cannot be interrupted: it keeps its caller's thread and buffers until the kernel
answers. No further call goes near the disk meanwhile, and nothing else waits for it longer than
`wait_seconds_max`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from racerd.errors import IntegrityError
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.store.budget import WriteBudget
from racerd.store.checkpoint import (
    compose,
    encode,
    freeze,
    read_checkpoint,
    write_checkpoint,
)
from racerd.store.claims import Dropped, Found
from racerd.store.device import BlockDevice, DiskError
from racerd.store.fates import UNREADABLE, Fates, damage
from racerd.store.housekeeper import Keeper, Work
from racerd.store.live import LiveSlab, make_live
from racerd.store.loan import NotLent, RecordLoan
from racerd.store.notes import Notes, Selector
from racerd.store.recovery import Progress, Recovery
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.slab import open_slab
from racerd.store.troubles import Condition, troubles
from racerd.store.watch import DiskWatch
from racerd.store.writer import SlabWriter
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)

SCANNED_WORTH_A_CHECKPOINT = 256  # Pages that recovery had to find by reading their headers.


@dataclass(frozen=True, slots=True)
class DiskReport:
    """A disk as shown to people. `reason` says why it is not normal; sizes are bytes.

    `troubles`: what is wrong with it, in sentences.
    """

    path: str
    state: str
    reason: str
    direct: bool
    pages: int
    live_bytes: int
    capacity_bytes: int
    index_bytes: int
    recovering: bool
    recovery: Progress
    troubles: tuple[str, ...]


class Disk:
    """See the module. `label`, the path, names the disk in metrics; `clock` is monotonic."""

    def __init__(
        self, settings: DiskSettings, store: StoreSettings, page: PageGeometry, metrics: Metrics, *,
        open_device: Callable[[DiskSettings], BlockDevice], clock: Callable[[], float],
        make_keeper: Callable[[str, Work], Keeper],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.label = str(settings.path)
        self._store = store
        self._page = page
        self._metrics = metrics
        self._open_device = open_device
        self.watch = DiskWatch(settings.path, metrics, hang_seconds=store.hang_seconds, clock=clock)
        self._budget = WriteBudget(store.write_bytes_per_day)
        self.fates = Fates(clock)
        self._live: LiveSlab | None = None
        self._closing: LiveSlab | None = None  # Given up, but an operation on it is running.
        self._writer: SlabWriter | None = None
        self._recovery: Recovery | None = None
        self._quotas: Mapping[str, int] = {}
        self._pins: tuple[Selector, ...] = ()
        self._pins_version = 0
        self._keeper = make_keeper(f"store {self.label}", self)
        self._opened = threading.Event()  # Tried to: the slab may be closed all the same.
        self._locked: DiskError | None = None
        self._waited = False  # `wait_open` is over: it raises nothing any more.
        self._told = ""
        self._checkpoint_due = 0.0
        self._scrub_row = 0

    # Lifetime

    def start(self) -> None:
        """Starts the disk's thread, which opens the slab and recovers it."""
        self._show()
        self._keeper.start()

    def wait_open(self) -> None:
        """Waits a bounded time for the slab to be open. Raises DiskError `slab_locked`.

        Any other failure leaves the disk down: the store works without it.
        """
        self._opened.wait(self._store.wait_seconds_max)
        self._waited = True
        if self._locked is not None:
            raise self._locked

    def close(self) -> None:
        """Writes a last checkpoint and closes the slab. Waits a bounded time for the disk."""
        if not self._keeper.stop(self._store.wait_seconds_max):
            log.warning("%s does not answer: it is left as it is and recovered later", self.label)

    def begin(self) -> None:
        """On the disk's thread: opens the slab and recovers it."""
        try:
            self._open()
        except Exception:
            # A defect, told by the keeper: until a probe opens the slab after all, nobody uses it.
            self.watch.start_down("opening the slab failed; the log says how")
            raise
        finally:
            self._opened.set()
        self._recover()

    def end(self) -> None:
        """On the disk's thread: a last checkpoint, then the device is closed."""
        live = self._live
        if live is None:
            return
        if self.watch.readable:
            self._write_checkpoint(live)
        self._close(live)

    def _close(self, live: LiveSlab) -> bool:
        """Closes the device unless something is still running on it. Returns whether it did."""
        self._live = None
        self._closing = live
        if not self.watch.shut():
            log.warning("%s stays open: an operation on it does not return", self.label)
            return False
        live.slab.device.close()
        self._closing = None
        return True

    def _open(self) -> None:
        device = None
        try:
            device = self._open_device(self.settings)
            slab = open_slab(device, self.settings, self._store, self._page)
        except (DiskError, IntegrityError) as error:
            if device is not None:
                device.close()
            self._not_opened(error)
            return
        self._locked = None
        self._told = ""
        live = make_live(slab, self.watch, self.fates)
        live.engine.quotas = dict(self._quotas)
        self._writer = SlabWriter(
            live, self.watch, self._budget, self._metrics, label=self.label, settings=self._store
        )
        self._recovery = Recovery(slab, live.engine, live.lock)
        live.progress = self._recovery.progress
        self._live = live
        self._metrics.store_capacity_bytes.labels(self.label).set(live.engine.capacity_bytes)
        self._metrics.store_buffered.labels(self.label).set(not device.direct)
        bounced = self._metrics.store_bounced_bytes.labels(self.label)
        bounced.set_function(partial(getattr, device, "bounced_bytes"))
        if not device.direct:
            log.warning(
                "%s: the file system refuses O_DIRECT, so the page cache is used: slower, and it"
                " takes memory; put the slab on ext4, xfs or a block device", self.label,
            )  # fmt: skip

    def _not_opened(self, error: DiskError | IntegrityError) -> None:
        if isinstance(error, DiskError):
            self.watch.count(error)
            self._locked = error if error.code == "slab_locked" else None
        self.watch.start_down(error.message)
        self.watch.publish()
        if self._locked is not None and not self._waited:
            return  # `wait_open` raises it, and who started the store tells it.
        if error.message != self._told:  # Each probe may meet it again.
            self._told = error.message
            log.error("%s is not used: %s; %s", self.label, error.message, error.hint)

    def _recover(self) -> None:
        live, recovery, writer = self._live, self._recovery, self._writer
        if live is None or recovery is None or writer is None:
            return
        started = self.watch.now()
        try:
            checkpoint, live.next_checkpoint = read_checkpoint(
                live.slab.device, live.slab.before, live.slab.id
            )
            live.checkpoint_sequence = checkpoint.sequence + 1 if checkpoint else 1
            recovery.run(checkpoint, self._breathe)
            if self._keeper.stopping:
                return
            live.tombstones.add(recovery.losers)
            self._after_recovery(live, recovery, writer)
        except DiskError as error:
            self.watch.count(error)
            self.watch.start_down(error.message)
            log.warning("%s: recovery stopped: %s", self.label, error.message)
            self._close(live)
            return
        self._tell_recovery(live, self.watch.now() - started)

    def _breathe(self) -> bool:
        """Between steps of recovery: does what others ask for; True to stop."""
        self._keeper.run_tasks()
        return self._keeper.stopping

    def _after_recovery(self, live: LiveSlab, recovery: Recovery, writer: SlabWriter) -> None:
        slab = live.slab
        if slab.notes.pins_version < self._pins_version:  # Pins changed while the disk was away.
            self._note_pins(live)
        with live.lock:
            live.engine.mark_pinned(slab.notes.pins)
        for segment in recovery.headless:
            writer.renew_header(segment)
        self._settle(live)
        if slab.before != slab.geometry:
            # Where the last checkpoint was is segment room now, or beyond the end.
            live.next_checkpoint = 0
            self._write_checkpoint(live)
            slab.device.truncate(slab.geometry.capacity_bytes)
        self._checkpoint_due = self.watch.now() + self._store.checkpoint_seconds
        if recovery.progress.pages_from_scan >= SCANNED_WORTH_A_CHECKPOINT:
            # Who is killed again before the next one is due would scan all that once more.
            live.changed, self._checkpoint_due = True, self.watch.now()

    def _settle(self, live: LiveSlab) -> None:
        """Ends recovery for good once its tombstones are written: no eviction is noted any more.

        Raises DiskError; the next tick tries again, and no page is kept until then.
        """
        if not live.tombstones.bury():
            return
        notes = live.slab.notes
        if notes.fences:
            with self.watch.operation():
                live.slab.write_notes(replace(notes, sequence=notes.sequence + 1, fences=()))
        live.settled = True

    def _tell_recovery(self, live: LiveSlab, seconds: float) -> None:
        progress = live.progress
        self._metrics.store_recovery_seconds.labels(self.label).set(seconds)
        if self.page_count:
            log.info(
                "%s: recovered in %.1f s: pages from the checkpoint %d, by scanning %d",
                self.label, seconds, progress.pages_from_checkpoint, progress.pages_from_scan,
            )  # fmt: skip
        if progress.segments_unreadable:
            log.warning(
                "%s: %d segments could not be read and are not used until the next start",
                self.label, progress.segments_unreadable,
            )  # fmt: skip

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
        if self._store.write_bytes_per_day is not None:
            left = metrics.store_write_budget_left.labels(label)
            left.set_function(lambda: self._budget.left(self.watch.now()) or 0.0)

    def report(self) -> DiskReport:
        live = self._live
        return DiskReport(
            self.label,
            self.watch.state.value,
            self.watch.reason,
            live is not None and live.slab.device.direct,
            self.page_count,
            self.live_bytes,
            self.capacity_bytes,
            self.index_bytes,
            self.recovering,
            self.progress,
            tuple(troubles(self._condition())),
        )

    def _condition(self) -> Condition:
        live, writer, now = self._live, self._writer, self.watch.now()
        return Condition(
            state=self.watch.state,
            reason=self.watch.reason,
            opened=live is not None,
            recovering=self.recovering,
            progress=self.progress,
            direct=live is not None and live.slab.device.direct,
            full_seconds=writer.full_seconds(now) if writer is not None else 0.0,
            at_floor=writer is not None and writer.at_floor,
            budget_left=self._budget.left(now),
            record_bytes=live.slab.geometry.full_record_bytes if live is not None else 0,
            full_quotas=self._full_quotas(live),
            evictions_unnoted=live.tombstones.given_up if live is not None else 0,
        )

    def _full_quotas(self, live: LiveSlab | None) -> dict[str, int]:
        """Caches that have no room for a further page under their quota."""
        if live is None:
            return {}
        with live.lock:
            size = live.slab.geometry.full_record_bytes
            limits = live.engine.quotas.items()
            return {cache: limit for cache, limit in limits if live.engine.over_quota(cache, size)}

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

    def confirm(self, page: PageId) -> None:
        """Looks at the header of `page`'s record if nobody has since the start, and forgets the
        page if that is not its header (any more). Counts no read."""
        live = self._live
        if live is None or not self.watch.readable:
            return
        with live.lock:
            found = live.engine.start_check(page)
        if found is None:
            return
        try:
            if not found.proven:
                self._prove(live, found)
        finally:
            _end_read(live, found)

    def _prove(self, live: LiveSlab, found: Found) -> None:
        try:
            with self.watch.operation():
                live.io.header(found)
        except IntegrityError as error:
            self._lose(live, found, error)
        except DiskError:
            self._suspect(live, found)
        else:
            with live.lock:
                live.engine.prove(found)

    def reads_whole(self, page: PageId) -> bool:
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
        live = self._live
        if live is None or not self.watch.readable:
            self._count_read("down")
            return None
        with live.lock:
            found = live.engine.start_read(page)
        if found is None:
            self._count_read("absent" if live.progress.done else "recovering")
            return None
        try:
            return self._read_found(live, found, first, frames)
        finally:
            _end_read(live, found)

    def _read_found(
        self, live: LiveSlab, found: Found, first: int, frames: Sequence[memoryview]
    ) -> Seal | None:
        if found.v1 and len(frames) != self._page.frame_count(found.length):
            self._count_read("v1_needs_whole_page")
            return None
        try:
            with self.watch.operation():
                seal = live.io.read(found, first, frames)
        except IntegrityError as error:
            self._count_read("absent" if error.code == "tombstone" else "corrupt")
            self._lose(live, found, error)
            return None
        except DiskError:
            self._count_read("io_error")
            self._suspect(live, found)
            return None
        if not found.proven:
            with live.lock:
                live.engine.prove(found)
        self._count_read("hit")
        return seal

    def lend(self, page: PageId) -> RecordLoan | NotLent:
        """See `Store.lend`."""
        live = self._live
        if live is None or not self.watch.readable:
            return NotLent("down")
        if not live.slab.device.direct:
            return NotLent("not_direct")
        with live.lock:
            found = live.engine.start_read(page)
        if found is None:
            return NotLent("absent")
        try:
            lent = self._lend_found(live, found)
        except BaseException:
            _end_read(live, found)
            raise
        if isinstance(lent, NotLent):
            _end_read(live, found)
        return lent

    def _lend_found(self, live: LiveSlab, found: Found) -> RecordLoan | NotLent:
        if found.v1:
            return NotLent("v1_record")
        try:
            with self.watch.operation():
                header = live.io.header(found)
        except IntegrityError as error:
            self._count_read("absent" if error.code == "tombstone" else "corrupt")
            self._lose(live, found, error)
            return NotLent("absent" if error.code == "tombstone" else "corrupt")
        except DiskError:
            self._count_read("io_error")
            self._suspect(live, found)
            return NotLent("io_error")
        self._count_read("lent")
        return RecordLoan(
            live.number,
            header.data_offset,
            header.seal,
            reopen=partial(self._reopen, live),
            release=partial(_end_read, live, found),
        )

    def _reopen(self, live: LiveSlab) -> int:
        with self.watch.operation():  # The device is not closed meanwhile.
            return live.slab.device.reopen()

    @property
    def slab_number(self) -> int | None:
        """The number of the slab as it is open now; see `RecordLoan`."""
        live = self._live
        return None if live is None else live.number

    def _count_read(self, result: str) -> None:
        self._metrics.store_reads.labels(self.label, result).inc()

    def _lose(self, live: LiveSlab, found: Found, error: IntegrityError) -> None:
        """A record is not what the index promised: count it and drop it."""
        if error.code == "tombstone":
            self._forget_buried(live, found)
            return
        self._metrics.corrupt_pages.labels("disk", error.code).inc()
        self.fates.note(found.page, damage(error.code))
        log.warning("%s: %s: dropped, to be fetched again", self.label, error.message)
        self._drop_found(live, found)

    def _forget_buried(self, live: LiveSlab, found: Found) -> None:
        """What was dropped before a crash, after the last checkpoint, has its tombstone."""
        with live.lock:
            dropped = live.engine.drop_found(found)
            if dropped is not None:
                live.engine.tombstone_done(dropped)
        live.changed = True

    def _suspect(self, live: LiveSlab, found: Found) -> None:
        """A record that cannot be read twice, on a disk that is well otherwise, is given up."""
        with live.lock:
            again = live.engine.suspect(found)
        if again and self.watch.writable:
            self.fates.note(found.page, UNREADABLE)
            self._metrics.store_evicted_pages.labels(self.label, "unreadable").inc()
            self._drop_found(live, found)

    def _drop_found(self, live: LiveSlab, found: Found) -> None:
        with live.lock:
            dropped = live.engine.drop_found(found)
        self._bury_soon(live, [] if dropped is None else [dropped])

    # Writing and dropping

    def write(self, sealed: SealedPage) -> str:
        """Writes a page. Returns "kept", or the reason why not."""
        writer = self._writer
        live = self._live
        if live is None or writer is None or not self.watch.writable:
            return "down"
        if not live.settled:
            # It may be here already: of two records a crash could leave the one that is torn.
            return "recovering"
        return writer.write(sealed)

    def drop(self, page: PageId) -> bool:
        """Forgets `page`; its tombstone is written soon. Returns whether it was here."""
        live = self._live
        if live is None:
            return False
        with live.lock:
            dropped = live.engine.drop(page)
        self._bury_soon(live, [] if dropped is None else [dropped])
        return dropped is not None

    def evict(self, selector: Selector) -> tuple[int, int]:
        """Drops what `selector` names, also what is being written or not yet recovered.

        Returns pages and slab bytes once that is durable, or after a bounded time.
        """
        live, recovery = self._live, self._recovery
        if live is None or recovery is None:
            return 0, 0
        with live.lock:
            fence = not live.progress.done
            if fence:
                recovery.fences.append(selector)
            live.engine.cancel(selector)
        dropped = self._drop_selected(live, selector)
        live.changed = True
        self._metrics.store_evicted_pages.labels(self.label, "asked").inc(len(dropped))
        self._ask(live, lambda: self._make_durable(live, selector if fence else None))
        return len(dropped), sum(each.record_bytes for each in dropped)

    def _drop_selected(self, live: LiveSlab, selector: Selector) -> list[Dropped]:
        """In steps, so that the lock is never held for long."""
        everything: list[Dropped] = []
        cursor: int | None = 0
        while cursor is not None:
            with live.lock:
                dropped, cursor = live.engine.drop_some(selector, cursor)
            live.tombstones.add(dropped)
            everything += dropped
        return everything

    def _make_durable(self, live: LiveSlab, fence: Selector | None) -> None:
        """Tombstones, and a note for what recovery may still find; then a flush."""
        live.tombstones.bury()
        notes = live.slab.notes
        if fence is not None and not live.progress.done:
            fenced = replace(notes, sequence=notes.sequence + 1, fences=(*notes.fences, fence))
            if fenced.fits:
                with self.watch.operation():
                    live.slab.write_notes(fenced)
                return
            log.warning("%s: too many evictions during recovery to note this one", self.label)
        with self.watch.operation():
            live.slab.device.flush()

    def _bury_soon(self, live: LiveSlab, dropped: list[Dropped]) -> None:
        if dropped:
            live.tombstones.add(dropped)
            live.changed = True
            self._keeper.nudge()

    # Scrubbing

    def scrub_next(self) -> int | None:
        """See `scrub.Scrubbed`. A disk that is not normal is left alone."""
        live = self._live
        if live is None or not live.progress.done or not self.watch.writable:
            return None
        with live.lock:
            chosen = live.engine.next_to_check(self._scrub_row)
        if chosen is None:
            self._scrub_row = 0
            return None
        row, found = chosen
        self._scrub_row = row + 1
        try:
            return self._scrub(live, found)
        finally:
            with live.lock:
                live.engine.end_read(found)

    def _scrub(self, live: LiveSlab, found: Found) -> int:
        size = found.record_bytes
        try:
            with self.watch.operation():
                live.io.check(found)
        except IntegrityError as error:
            self._lose(live, found, error)
        except DiskError:
            self._suspect(live, found)
        self._metrics.store_scrubbed_bytes.labels(self.label).inc(size)
        return size

    # Pins and quotas

    @property
    def notes(self) -> Notes:
        live = self._live
        return live.slab.notes if live is not None else Notes()

    def set_pins(self, pins: tuple[Selector, ...], version: int) -> bool:
        """Pins exactly `pins`, now and after a restart. Waits a bounded time for the disk.

        Returns whether they are noted on the slab; where not, they are noted when it is back.
        """
        self._pins, self._pins_version = pins, version
        live = self._live
        if live is None:
            return False
        with live.lock:
            live.engine.mark_pinned(pins)
        self._ask(live, lambda: self._note_pins(live))
        return live.slab.notes.pins_version >= version

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

    def _note_pins(self, live: LiveSlab) -> None:
        notes = live.slab.notes
        changed = replace(
            notes, sequence=notes.sequence + 1, pins=self._pins, pins_version=self._pins_version
        )
        with self.watch.operation():
            live.slab.write_notes(changed)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Slab bytes that each cache may take on this disk from now on."""
        self._quotas = dict(quotas)
        live = self._live
        if live is not None:
            with live.lock:
                live.engine.quotas = dict(quotas)

    # The disk's own thread

    def _ask(self, live: LiveSlab, call: Callable[[], None]) -> bool:
        """Runs `call` on the disk's thread while `live` is in use; False if it did not end."""

        def run() -> None:
            if self._live is not live:
                return
            try:
                call()
            except DiskError as error:
                log.warning("%s: %s; %s", self.label, error.message, error.hint)

        return self._keeper.ask(run, self._store.wait_seconds_max)

    def tick(self) -> None:
        """On the disk's thread, once a second and when something was dropped."""
        if self.watch.probe_due():
            self._probe()
        self.watch.publish()
        live, writer = self._live, self._writer
        if live is None or writer is None or not self.watch.writable:
            return
        try:
            writer.keep_floor()
            if live.progress.done and not live.settled:
                self._settle(live)
        except DiskError as error:
            log.warning("%s: %s", self.label, error.message)
        if live.tombstones:
            live.tombstones.bury()
        if live.changed and self.watch.now() >= self._checkpoint_due:
            self._write_checkpoint(live)

    def _probe(self) -> None:
        """Tries a disk that is down: its device as it is, or opened anew if it was lost."""
        live = self._live
        if live is not None:
            try:
                with self.watch.operation():
                    live.slab.device.prove_writes()
            except DiskError as error:
                self.watch.probed(error.message)
                if error.gone:
                    self._close(live)
            else:
                self.watch.probed(None)
            return
        if self._closing is not None and not self._close(self._closing):
            return
        self.watch.unshut()
        self._open()
        if self._live is not None:
            self.watch.probed(None)
            self._recover()

    def checkpoint(self) -> bool:
        """Writes a checkpoint and waits for it a bounded time. False if it was not written."""
        live = self._live
        return live is not None and self._ask(live, lambda: self._write_checkpoint(live))

    def _write_checkpoint(self, live: LiveSlab) -> None:
        if not live.progress.done:
            return
        live.changed = False
        live.tombstones.bury()
        with live.lock:
            frozen = freeze(live.engine)
        slab = live.slab
        data = encode(compose(frozen, live.checkpoint_sequence), slab.id)
        try:
            with self.watch.operation():
                write_checkpoint(slab.device, slab.geometry, data, live.next_checkpoint)
        except DiskError as error:
            live.changed = True
            log.warning("%s: no checkpoint was written: %s", self.label, error.message)
        else:
            live.checkpoint_sequence += 1
            live.next_checkpoint = 1 - live.next_checkpoint
        self._checkpoint_due = self.watch.now() + self._store.checkpoint_seconds


def _end_read(live: LiveSlab, found: Found) -> None:
    with live.lock:
        live.engine.end_read(found)
