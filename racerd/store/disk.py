"""One disk of the store: the driver that gives the engine a device, threads and a clock.

Layer: store; thread-safe. Reads and writes run on the caller's threads; a thread of its own opens
the slab, recovers it, writes tombstones and checkpoints, and probes a disk that is down. The lock
guards the engine and is never held during I/O, so `contains` may be called on the event loop.

A disk in trouble is a miss, never an error: callers see None or False, and the metrics say why.
I/O that hangs cannot be interrupted; it keeps its caller's thread and buffers until the kernel
answers. No further call goes near the disk meanwhile, and nothing else waits for it longer than
`wait_seconds_max`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from racerd.errors import IntegrityError
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.store.buffers import aligned_buffer
from racerd.store.checkpoint import encode, read_checkpoint, snapshot, write_checkpoint
from racerd.store.device import BlockDevice, DiskError, Extent
from racerd.store.engine import Dropped, Engine, Evict, Found, Prepare, Refused, Reservation
from racerd.store.geometry import BLOCK_BYTES
from racerd.store.health import DiskHealth, DiskState
from racerd.store.record_io import RecordIO
from racerd.store.recovery import Progress, Recovery
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.slab import Slab, open_slab
from racerd.store.superblock import encode_segment_header
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_TOMBSTONES_MAX = 4096


@dataclass(slots=True)
class _Task:
    """Something for the disk's own thread. `done` is set when it ran, whatever came of it."""

    call: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class Disk:
    """See the module. `label` names the disk in metrics; `clock` is monotonic, in seconds."""

    def __init__(
        self, settings: DiskSettings, store: StoreSettings, page: PageGeometry, metrics: Metrics, *,
        open_device: Callable[[DiskSettings], BlockDevice], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.settings = settings
        self.label = str(settings.path)
        self._store = store
        self._page = page
        self._metrics = metrics
        self._open_device = open_device
        self._clock = clock
        self._lock = threading.Lock()  # The engine and the health.
        self._space = threading.Lock()  # Held by the one thread that reserves or evicts.
        self._health = DiskHealth(store.hang_seconds)
        self._slab: Slab | None = None
        self._engine: Engine | None = None
        self._io: RecordIO | None = None
        self.progress = Progress()
        self._tombstones: list[Dropped] = []
        self._fences: list[Callable[[ObjectId], bool]] = []
        self._tasks: list[_Task] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._opened = threading.Event()
        self._refusal: DiskError | None = None
        self._thread: threading.Thread | None = None
        self._checkpoint_due = 0.0
        self._changed = False

    # Lifetime

    def start(self) -> None:
        """Starts the disk's thread, which opens the slab and recovers it."""
        self._thread = threading.Thread(target=self._run, name=f"store {self.label}", daemon=True)
        self._thread.start()

    def wait_open(self) -> None:
        """Waits a bounded time for the slab to be open. Raises DiskError `slab_locked`.

        Any other failure leaves the disk down: the store works without it.
        """
        self._opened.wait(self._store.wait_seconds_max)
        if self._refusal is not None and self._refusal.code == "slab_locked":
            raise self._refusal

    def close(self) -> None:
        """Writes a last checkpoint and closes the slab. Waits a bounded time for the disk."""
        thread = self._thread
        if thread is None:
            return
        self._stopping.set()
        self._wake.set()
        thread.join(self._store.wait_seconds_max)
        if thread.is_alive():
            log.warning(
                "%s does not answer; it is left as it is, and recovered next time", self.label
            )
        self._thread = None

    def _run(self) -> None:
        try:
            self._open()
        finally:
            self._opened.set()
        if self._engine is not None:
            self._recover()
        while not self._stopping.is_set():
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
            self._run_tasks()
            self._tick()
        self._run_tasks()
        self._finish()

    def _open(self) -> None:
        try:
            device = self._open_device(self.settings)
        except DiskError as error:
            self._refuse(error)
            return
        try:
            slab = open_slab(device, self.settings, self._store, self._page)
        except DiskError as error:
            device.close()
            self._refuse(error)
            return
        except IntegrityError as error:
            device.close()
            self._refuse_slab(error)
            return
        with self._lock:
            self._slab = slab
            self._io = RecordIO(device, slab.id, slab.geometry)
            self._engine = Engine(slab.geometry)
        self._refusal = None
        self._metrics.store_buffered.labels(self.label).set(not device.direct)
        if not device.direct:
            log.warning(
                "%s: the file system refuses O_DIRECT, the page cache is used: slower, and it"
                " takes memory; put the slab on ext4, xfs or a block device", self.label,
            )  # fmt: skip

    def _refuse(self, error: DiskError) -> None:
        self._refusal = error
        self._count_error(error)
        self._go_down(error.message, error.hint)

    def _refuse_slab(self, error: IntegrityError) -> None:
        self._go_down(error.message, error.hint)

    def _go_down(self, message: str, hint: str) -> None:
        with self._lock:
            self._health.start_down(self._clock(), message)
        log.error("%s is not used: %s; %s", self.label, message, hint)

    def _recover(self) -> None:
        slab, engine = self._require()
        started = self._clock()
        recovery = Recovery(slab.device, slab.id, engine, self._lock)
        self.progress = recovery.progress
        try:
            checkpoint, slab.next_checkpoint = read_checkpoint(
                slab.device, slab.checkpoint_geometry, slab.id
            )
            slab.checkpoint_sequence = checkpoint.sequence + 1 if checkpoint else 1
            recovery.run(checkpoint, self._stopping.is_set)
        except DiskError as error:
            self._refuse(error)
            return
        self._bury_later(recovery.losers)
        progress = recovery.progress
        labels = self._metrics.store_recovery_pages
        labels.labels(self.label, "checkpoint").set(progress.pages_from_checkpoint)
        labels.labels(self.label, "scan").set(progress.pages_from_scan)
        seconds = self._clock() - started
        self._metrics.store_recovery_seconds.labels(self.label).set(seconds)
        self._checkpoint_due = self._clock() + self._store.checkpoint_seconds
        log.info(
            "%s: %d pages after %.1f s (%d from the checkpoint, %d by scanning)", self.label,
            self.page_count, seconds, progress.pages_from_checkpoint, progress.pages_from_scan,
        )  # fmt: skip

    def _finish(self) -> None:
        if self._slab is None:
            return
        if self.progress.done and self._state() in (DiskState.NORMAL, DiskState.UNSTABLE):
            self._write_checkpoint()
        self._slab.device.close()

    # What others see

    @property
    def opened(self) -> bool:
        return self._engine is not None

    @property
    def page_count(self) -> int:
        return len(self._engine.index) if self._engine is not None else 0

    @property
    def live_bytes(self) -> int:
        return self._engine.live_bytes if self._engine is not None else 0

    @property
    def capacity_bytes(self) -> int:
        return self._engine.capacity_bytes if self._engine is not None else 0

    @property
    def index_bytes(self) -> int:
        return self._engine.index.nbytes if self._engine is not None else 0

    def _state(self) -> DiskState:
        with self._lock:
            return self._health.state(self._clock())

    @property
    def state(self) -> DiskState:
        return self._state()

    @property
    def readable(self) -> bool:
        with self._lock:
            return self._engine is not None and self._health.readable(self._clock())

    @property
    def writable(self) -> bool:
        with self._lock:
            return self._engine is not None and self._health.writable(self._clock())

    @property
    def trouble(self) -> str:
        """Why the disk is not normal, or nothing."""
        with self._lock:
            return self._health.reason

    def contains(self, page: PageId) -> bool:
        with self._lock:
            if self._engine is None or not self._health.readable(self._clock()):
                return False
            return self._engine.contains(page)

    def holds(self, page: PageId) -> bool:
        """Whether the index has `page`, readable or not."""
        with self._lock:
            return self._engine is not None and self._engine.contains(page)

    def reads_whole(self, page: PageId) -> bool:
        with self._lock:
            return self._engine is not None and self._engine.is_v1(page)

    def find_version(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        with self._lock:
            if self._engine is None:
                return None
            catalog = self._engine.index.catalog
            for row in catalog.rows_of_object(object_id):
                version = catalog.version(row)
                if version.etag == etag:
                    return version
        return None

    # Reading

    def read(self, page: PageId, first: int, frames: Sequence[memoryview]) -> Seal | None:
        """See `Store.read`."""
        with self._lock:
            if self._engine is None or not self._health.readable(self._clock()):
                self._count_read("down")
                return None
            found = self._engine.start_read(page)
        if found is None:
            self._count_read("absent" if self.progress.done else "recovering")
            return None
        try:
            return self._read_found(found, first, frames)
        finally:
            with self._lock:
                self._require()[1].end_read(found)

    def _read_found(self, found: Found, first: int, frames: Sequence[memoryview]) -> Seal | None:
        assert self._io is not None
        if found.v1 and len(frames) != self._page.frame_count(found.length):
            self._count_read("v1_needs_whole_page")
            return None
        try:
            with self._operation():
                seal = self._io.read(found, first, frames)
        except IntegrityError as error:
            self._lose(found, error)
            self._count_read("corrupt")
            return None
        except DiskError:
            with self._lock:
                again = self._require()[1].suspect(found)
                writable = self._health.writable(self._clock())
            if again and writable:
                self._drop_found(found)
            self._count_read("io_error")
            return None
        self._count_read("hit")
        return seal

    def _count_read(self, result: str) -> None:
        self._metrics.store_reads.labels(self.label, result).inc()

    def _lose(self, found: Found, error: IntegrityError) -> None:
        """A record turned out not to be what the index promised: count it, drop it."""
        if error.code != "tombstone":
            self._metrics.corrupt_pages.labels("disk", error.code).inc()
            log.warning("%s: %s: dropped, it will be fetched again", self.label, error.message)
        self._drop_found(found)

    def _drop_found(self, found: Found) -> None:
        with self._lock:
            dropped = self._require()[1].drop_found(found)
        if dropped is not None:
            self._bury_later([dropped])

    # Writing

    def write(self, sealed: SealedPage) -> str:
        """Writes a page. Returns "kept", or the reason why not."""
        with self._lock:
            if self._engine is None or not self._health.writable(self._clock()):
                return "down"
        reason = self._write_once(sealed)
        if reason == "disk_full" and self._evict_for_space():
            reason = self._write_once(sealed)
        return reason

    def _write_once(self, sealed: SealedPage) -> str:
        if not self._space.acquire(timeout=self._store.wait_seconds_max):
            return "busy"
        try:
            space = self._reserve(sealed.page, sealed.seal.length)
        finally:
            self._space.release()
        if isinstance(space, str):
            return space
        return self._write_record(space, sealed)

    def _reserve(self, page: PageId, length: int) -> Reservation | str:
        """Does what the engine asks for until it has a place. Returns the reason if it has none."""
        engine = self._require()[1]
        evict = True
        while True:
            with self._lock:
                answer = engine.reserve(page, length, evict=evict)
            if isinstance(answer, Reservation):
                return answer
            if isinstance(answer, Refused):
                recovering = answer.reason == "no_space" and not self.progress.done
                return "recovering" if recovering else answer.reason
            if isinstance(answer, Prepare):
                self._prepare(answer)
            elif isinstance(answer, Evict):
                evict = self._evict()

    def _write_record(self, space: Reservation, sealed: SealedPage) -> str:
        assert self._io is not None
        engine = self._require()[1]
        try:
            with self._operation():
                self._io.write(space, sealed)
        except IntegrityError as error:
            with self._lock:
                engine.abort(space, written=False)
            return error.code
        except DiskError as error:
            self._abort(space)
            return "disk_full" if error.full else "io_error"
        with self._lock:
            dropped = engine.commit(space)
        self._changed = True
        self._metrics.store_written_bytes.labels(self.label).inc(space.record_bytes)
        if dropped is not None:
            self._bury_later([dropped])
            return "dropped_meanwhile"
        return "kept"

    def _abort(self, space: Reservation) -> None:
        with self._lock:
            dropped = self._require()[1].abort(space, written=True)
        if dropped is not None:
            self._bury_later([dropped])

    def _prepare(self, todo: Prepare) -> None:
        """Gets a segment ready to be filled, or tells the engine that it cannot be."""
        slab, engine = self._require()
        offset = slab.geometry.segment_offset(todo.segment)
        extent = Extent(offset, slab.geometry.segment_size(todo.segment))
        if todo.allocate and not slab.may_grow(extent.length):
            self._metrics.store_writes.labels(self.label, "free_space_floor").inc()
            with self._lock:
                engine.not_prepared(todo, no_space=True)
            return
        block = aligned_buffer(BLOCK_BYTES)
        encode_segment_header(
            block, slab=slab.id, segment=todo.segment, generation=todo.generation, offset=offset
        )
        try:
            with self._operation():
                if todo.allocate:
                    slab.device.allocate(extent)
                slab.device.write(offset, [block])
        except DiskError as error:
            with self._lock:
                engine.not_prepared(todo, no_space=error.full)
            return
        with self._lock:
            engine.prepared(todo)

    def _evict_for_space(self) -> bool:
        """The medium is full though the slab is not: give up a segment and try once more."""
        if not self._space.acquire(timeout=self._store.wait_seconds_max):
            return False
        try:
            return self._evict()
        finally:
            self._space.release()

    def _evict(self) -> bool:
        """Evicts one segment. The caller holds the space lock. False if there is no victim."""
        engine = self._require()[1]
        with self._lock:
            if not engine.segments.queue:
                engine.segments.seal_open()
            victim = engine.next_victim()
        if victim is None:
            return False
        for found in victim.moves:
            self._move(found)
        with self._lock:
            todo, pages = engine.evicted(victim)
        self._metrics.store_evicted_pages.labels(self.label, "capacity").inc(pages)
        self._changed = True
        self._prepare(todo)
        return True

    def _move(self, found: Found) -> None:
        """Copies a hot record out of a victim. If that fails it goes with the rest."""
        assert self._io is not None
        engine = self._require()[1]
        with self._lock:
            space = engine.start_move(found)
        if space is None:
            return
        try:
            with self._operation():
                self._io.move(found, space)
        except IntegrityError as error:
            self._abort(space)
            self._lose(found, error)
            return
        except DiskError:
            self._abort(space)
            return
        with self._lock:
            dropped = engine.commit_move(space)
        self._metrics.store_written_bytes.labels(self.label).inc(space.record_bytes)
        if dropped is not None:
            self._bury_later([dropped])

    # Dropping

    def drop(self, page: PageId) -> bool:
        """Forgets `page`; its tombstone is written soon. Returns whether it was here."""
        with self._lock:
            dropped = self._engine.drop(page) if self._engine is not None else None
        if dropped is not None:
            self._bury_later([dropped])
        return dropped is not None

    def evict(
        self, rows: Callable[[Engine], list[int]], matches: Callable[[ObjectId], bool]
    ) -> tuple[int, int]:
        """Drops the pages of `rows`, and those being written or recovered that `matches`.

        Returns pages and bytes once the tombstones are durable, or after a bounded time.
        """
        with self._lock:
            engine = self._engine
            if engine is None:
                return 0, 0
            if not self.progress.done:
                self._fences.append(matches)
            engine.drop_pending(matches)
            dropped = engine.drop_rows(rows(engine))
        self._bury_later(dropped)
        self._metrics.store_evicted_pages.labels(self.label, "asked").inc(len(dropped))
        self._ask(self._make_durable)
        return len(dropped), sum(each.record_bytes for each in dropped)

    def _make_durable(self) -> None:
        self._bury()
        with self._operation():
            self._require()[0].device.flush()

    def _bury_later(self, dropped: list[Dropped]) -> None:
        with self._lock:
            self._tombstones += dropped
            self._changed = True
        self._wake.set()

    def _bury(self) -> None:
        """Writes the tombstones that wait. What fails waits for the disk to come back."""
        assert self._io is not None
        engine = self._require()[1]
        with self._lock:
            waiting, self._tombstones = self._tombstones, []
        failed = []
        for dropped in waiting:
            try:
                with self._operation():
                    self._io.bury(dropped.offset, dropped.generation, dropped.record_bytes)
            except DiskError:
                failed.append(dropped)
                continue
            with self._lock:
                engine.tombstone_done(dropped)
        with self._lock:
            self._tombstones = failed + self._tombstones
            while len(self._tombstones) > _TOMBSTONES_MAX:
                engine.tombstone_done(self._tombstones.pop())

    # The disk's own thread

    def _ask(self, call: Callable[[], None]) -> bool:
        """Runs `call` on the disk's thread and waits a bounded time. False if it did not end."""
        task = _Task(call)
        with self._lock:
            self._tasks.append(task)
        self._wake.set()
        return task.done.wait(self._store.wait_seconds_max)

    def _run_tasks(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    return
                task = self._tasks.pop(0)
            try:
                task.call()
            except DiskError as error:
                log.warning("%s: %s", self.label, error.message)
            finally:
                task.done.set()

    def _tick(self) -> None:
        with self._lock:
            now = self._clock()
            probe = self._health.probe_due(now)
            state = self._health.state(now)
            tombstones = bool(self._tombstones)
        for each in DiskState:
            self._metrics.store_state.labels(self.label, each.value).set(each is state)
        if probe:
            self._probe()
        if self._engine is None or state in (DiskState.DOWN, DiskState.PROBING):
            return
        self._engine.growing = True
        if tombstones:
            self._bury()
        if self._changed and now >= self._checkpoint_due and self.progress.done:
            self._write_checkpoint()

    def _probe(self) -> None:
        if self._slab is None:
            return
        failure = None
        try:
            with self._operation():
                self._slab.device.prove_writes()
        except DiskError as error:
            failure = error.message
        with self._lock:
            self._health.probed(self._clock(), failure)

    def checkpoint(self) -> bool:
        """Writes a checkpoint and waits for it a bounded time. False if it was not written."""
        return self.opened and self._ask(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        slab, engine = self._require()
        if not self.progress.done:
            return
        self._changed = False
        self._bury()
        with self._lock:
            data = snapshot(engine, slab.checkpoint_sequence)
        try:
            with self._operation():
                write_checkpoint(
                    slab.device, slab.geometry, encode(data, slab.id), slab.next_checkpoint
                )
        except DiskError as error:
            self._changed = True
            log.warning("%s: no checkpoint was written: %s", self.label, error.message)
        else:
            slab.checkpoint_sequence += 1
            slab.next_checkpoint = 1 - slab.next_checkpoint
        self._checkpoint_due = self._clock() + self._store.checkpoint_seconds

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Tells the health about an I/O, and the metrics about its failure."""
        with self._lock:
            token = self._health.started(self._clock())
        failure, gone = None, False
        try:
            yield
        except DiskError as error:
            self._count_error(error)
            if not error.full:
                failure, gone = error.message, error.gone
            raise
        finally:
            with self._lock:
                self._health.finished(token, self._clock(), failure, gone=gone)

    def _count_error(self, error: DiskError) -> None:
        labels = self._metrics.store_errors
        labels.labels(self.label, error.operation, error.errno_name).inc()

    def _require(self) -> tuple[Slab, Engine]:
        assert self._slab is not None and self._engine is not None
        return self._slab, self._engine
