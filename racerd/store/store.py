"""The store: sealed pages on several disks, behind one door.

Layer: store. Blocking and thread-safe: `read`, `lend`, `write`, `evict_*` and `checkpoint` belong
on disk threads; `contains`, `reads_whole`, `find_version`, `explain` and the properties do no I/O
and may be called on the loop. A page is placed by weighted rendezvous hashing over the disks'
paths, and looked for on every disk, so that adding or removing one loses only what was on it.

Nothing here raises because of a disk: a page that cannot be had is None, a page that cannot be
kept is False, both counted with their reason.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.store.admission import Admission, EverythingAtFirstSight
from racerd.store.catalog import halves
from racerd.store.columns import U64, mixed
from racerd.store.device import BlockDevice
from racerd.store.disk import Disk
from racerd.store.fates import damage, refusal
from racerd.store.file_device import open_file_device
from racerd.store.housekeeper import Housekeeper, Keeper, Work
from racerd.store.loan import NotLent, RecordLoan
from racerd.store.notes import Selector
from racerd.store.pins import Pins
from racerd.store.report import DiskReport
from racerd.store.scrub import Scrubber
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.telemetry import Metrics


def _open_file(disk: DiskSettings) -> BlockDevice:
    return open_file_device(disk.path)


class Store:
    """See the module. A context manager: entering opens the slabs and starts recovery.

    `admission` chooses what is worth a write; everything is by default. `open_device`,
    `clock` (monotonic seconds) and `make_keeper` are for tests.
    """

    def __init__(
        self, settings: StoreSettings, geometry: PageGeometry, metrics: Metrics, *,
        admission: Admission | None = None,
        open_device: Callable[[DiskSettings], BlockDevice] = _open_file,
        clock: Callable[[], float] = time.monotonic,
        make_keeper: Callable[[str, Work], Keeper] = Housekeeper,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.geometry = geometry
        self._metrics = metrics
        self._admission = admission if admission is not None else EverythingAtFirstSight()
        self._quotas: Mapping[str, int] = dict(settings.quotas)
        self._quotas_lock = threading.Lock()
        self.disks = [
            Disk(
                disk,
                settings,
                geometry,
                metrics,
                open_device=open_device,
                clock=clock,
                make_keeper=make_keeper,
                on_open=self._share_quotas,
            )
            for disk in settings.disks
        ]
        self._pins = Pins(self.disks)
        self._seeds = [
            int.from_bytes(hashlib.blake2b(disk.label.encode(), digest_size=8).digest(), "little")
            for disk in self.disks
        ]

    def __enter__(self) -> Store:
        """Raises DiskError `slab_locked` if another process has a slab; nothing stays open then."""
        for disk in self.disks:
            disk.start()
        try:
            for disk in self.disks:
                disk.wait_open()
        except BaseException:
            self.close()
            raise
        self._pins.agree()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes checkpoints and closes the slabs. No read or write may be running."""
        for disk in self.disks:
            disk.close()

    @property
    def recovering(self) -> bool:
        """Whether a disk is still finding out what it holds; pages appear meanwhile."""
        return any(disk.recovering for disk in self.disks)

    def contains(self, page: PageId) -> bool:
        """Whether a read of `page` would be tried. No I/O; a few microseconds."""
        return any(disk.contains(page) for disk in self.disks)

    def unproven(self, page: PageId) -> bool:
        """Whether `contains` has only the word of a checkpoint for it. No I/O.

        What was dropped between that checkpoint and a kill is known to be gone when its record is
        looked at: by a read, or by `confirm`.
        """
        return any(disk.unproven(page) for disk in self.disks)

    def confirm(self, page: PageId) -> None:
        """Makes `contains` certain of `page`, by a look at its record's header if need be."""
        for disk in self.disks:
            disk.confirm(page)

    def reads_whole(self, page: PageId) -> bool:
        """Whether `page` is kept in format v1, where `read` needs buffers for all its frames.

        Its seal has one tag and one CRC for the whole page.
        """
        return any(disk.reads_whole(page) for disk in self.disks)

    def read(self, page: PageId, first_frame: int, frames: Sequence[memoryview]) -> Seal | None:
        """Fills `frames` with sealed frames `first_frame`… of `page`: ciphertext, then the tag.

        Each buffer is exactly the frame's length plus 16, writable, and best on a 4 KiB boundary.
        Identity and CRC of what is returned were checked; the tag was not. None is a miss, and
        leaves `frames` undefined. The caller owns the buffers and gets them back at the return.
        """
        for disk in self._ranked(page):
            if disk.contains(page):
                return disk.read(page, first_frame, frames)
        return self._ranked(page)[0].read(page, first_frame, frames) if self.disks else None

    def lend(self, page: PageId) -> RecordLoan | NotLent:
        """Lends the record of `page` to a reader of its own, or says why not.

        Only what can be read as it lies is lent: records of format v2 on a slab that takes direct
        reads. Identity and header were checked, the ciphertext was not. Reads a few KiB.
        """
        for disk in self._ranked(page):
            if disk.contains(page):
                return disk.lend(page)
        return NotLent("absent")

    @property
    def slab_numbers(self) -> frozenset[int]:
        """The slabs that are open now, by the numbers that loans give them."""
        numbers = (disk.slab_number for disk in self.disks)
        return frozenset(number for number in numbers if number is not None)

    def write(self, sealed: SealedPage) -> bool:
        """Keeps `sealed`, whose buffers are the caller's again at the return.

        False if it was not kept; the metrics say why. True if it is there already.
        """
        if self.contains(sealed.page):
            return True
        if not self.disks:
            return False
        if not self._admission.admit(sealed.page):
            self._count_write(self._ranked(sealed.page)[0], sealed.page, "not_admitted")
            return False
        for disk in self._ranked(sealed.page):
            if disk.watch.writable:
                result = disk.write(sealed)
                self._count_write(disk, sealed.page, result)
                return result in ("kept", "present")
        self._count_write(self._ranked(sealed.page)[0], sealed.page, "down")
        return False

    def _count_write(self, disk: Disk, page: PageId, result: str) -> None:
        self._metrics.store_writes.labels(disk.label, result).inc()
        refused = refusal(result)
        if refused is not None:
            disk.fates.note(page, refused)

    def drop(self, page: PageId, reason: str) -> None:
        """Forgets `page`, whose copy is known to be bad; `reason` goes into the metrics."""
        for disk in self.disks:
            if disk.drop(page):
                disk.fates.note(page, damage(reason))
                self._metrics.store_evicted_pages.labels(disk.label, reason).inc()

    def evict_object(self, object_id: ObjectId) -> tuple[int, int]:
        """Drops every version of an object for good. Returns pages and slab bytes."""
        return self._evict(Selector(object_id.cache, object_id.bucket, object_id.key, exact=True))

    def evict_prefix(self, cache: str, bucket: str, prefix: bytes) -> tuple[int, int]:
        """Drops every object whose key starts with `prefix`. Returns pages and slab bytes."""
        return self._evict(Selector(cache, bucket, prefix, exact=False))

    def _evict(self, selector: Selector) -> tuple[int, int]:
        counts = [disk.evict(selector) for disk in self.disks]
        return sum(pages for pages, _ in counts), sum(size for _, size in counts)

    @property
    def pins(self) -> tuple[Selector, ...]:
        """What eviction spares."""
        return self._pins.selectors

    def pin(self, selector: Selector) -> None:
        """Spares what `selector` names from eviction, also after a restart.

        Fetches nothing, and holds for what comes later. Pins are honoured up to half of the disks:
        one that asks for more of what is there already is refused; pages that come later and do not
        fit into that half go, oldest first, as if they were not pinned. Raises ResourceError
        `pin_refused`, and `overloaded` where no disk could note the pin, which is not kept then.
        """
        self._pins.add(selector)

    def unpin(self, selector: Selector) -> bool:
        """Takes back a `pin` of just this selector; returns whether there was one.

        Raises ResourceError `overloaded` where no disk could note it; the pin stays then.
        """
        return self._pins.remove(selector)

    def held(self, selector: Selector) -> tuple[int, int]:
        """Pages that `selector` names, and the slab bytes that they take."""
        return self._pins.held((selector,))

    @property
    def pin_room_bytes(self) -> int:
        """Slab bytes that may still be pinned, over all caches."""
        return self._pins.room_bytes

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Bytes that each cache may take, over all disks; caches that are not named have no limit.

        A disk gets its share by capacity. What is over a quota is dropped as new pages come.
        """
        self._quotas = dict(quotas)
        self._share_quotas()

    def _share_quotas(self) -> None:
        """Also when a disk was opened: until then its capacity may not be known."""
        with self._quotas_lock:
            total = sum(disk.capacity_bytes for disk in self.disks) or 1
            for disk in self.disks:
                share = disk.capacity_bytes / total
                limits = {cache: int(limit * share) for cache, limit in self._quotas.items()}
                disk.set_quotas(limits)

    def find_version(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        """The version of `object_id` called `etag`, if any page of it is here."""
        for disk in self.disks:
            version = disk.find_version(object_id, etag)
            if version is not None:
                return version
        return None

    def explain(self, page: PageId) -> str:
        """A sentence on why `page` is, or is not, served from a disk."""
        if not self.disks:
            return "no disk is configured"
        for disk in self.disks:
            if disk.holds(page):
                watch = disk.watch
                if watch.readable:
                    return f"on disk {disk.label}"
                return f"on disk {disk.label}, which is {watch.state.value}: {watch.reason}"
        home = self._ranked(page)[0]
        if not home.watch.readable:
            return f"disk {home.label} is {home.watch.state.value}: {home.watch.reason}"
        fates = [fate for disk in self.disks if (fate := disk.fates.find(page)) is not None]
        if fates:
            text, age_seconds = min(fates, key=lambda fate: fate[1])
            return f"not on disk: {text}, {age_seconds:.0f} s ago"
        if self.recovering:
            return "not found yet: the store is still being recovered"
        return "not on disk: never kept, or gone for longer than is remembered"

    def scrub(self, stop: threading.Event) -> None:
        """Looks for rot until `stop` is set, at the rate of the settings; on its own thread."""
        Scrubber(self.disks, self.settings.scrub_bytes_per_second).run(stop)

    @property
    def index_bytes(self) -> int:
        """Memory that the indexes take."""
        return sum(disk.index_bytes for disk in self.disks)

    def reports(self) -> list[DiskReport]:
        """The state of every disk, for /readyz and for people."""
        return [disk.report() for disk in self.disks]

    def checkpoint(self) -> None:
        """Writes a checkpoint of every disk; one that fails is told in the log."""
        for disk in self.disks:
            disk.checkpoint()

    def _ranked(self, page: PageId) -> list[Disk]:
        """The disks in the order of this page's preference."""
        if len(self.disks) < 2:
            return self.disks
        key = halves(page.version.digest)[0] + page.index & U64

        def score(number: int) -> float:
            chance = (mixed(mixed(key ^ self._seeds[number]) >> 32 ^ key) + 1) / (U64 + 2)
            return -max(self.disks[number].capacity_bytes, 1) / math.log(chance)

        order = sorted(range(len(self.disks)), key=score, reverse=True)
        return [self.disks[number] for number in order]
