"""The store: sealed pages on several disks, behind one door.

Layer: store. Blocking and thread-safe: `read`, `write`, `evict_*` and `checkpoint` belong on disk
threads; `contains`, `reads_whole`, `find_version`, `explain` and the properties do no I/O and may
be called on the loop. A page is placed by weighted rendezvous hashing over the disks' paths, and
looked for on every disk, so that adding or removing one loses only what was on it.

Nothing here raises because of a disk: a page that cannot be had is None, a page that cannot be
kept is False, both counted with their reason.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.store.columns import U64, mixed
from racerd.store.device import BlockDevice, open_file_device
from racerd.store.disk import Disk
from racerd.store.engine import Engine
from racerd.store.index import halves
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.telemetry import Metrics


def _open_file(disk: DiskSettings) -> BlockDevice:
    return open_file_device(disk.path)


class Store:
    """See the module. A context manager: entering opens the slabs and starts recovery.

    `open_device` and `clock` (monotonic seconds) are for tests.
    """

    def __init__(
        self, settings: StoreSettings, geometry: PageGeometry, metrics: Metrics, *,
        open_device: Callable[[DiskSettings], BlockDevice] = _open_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.geometry = geometry
        self._metrics = metrics
        self.disks = [
            Disk(disk, settings, geometry, metrics, open_device=open_device, clock=clock)
            for disk in settings.disks
        ]
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
        for disk in self.disks:
            self._metrics.store_pages.labels(disk.label).set_function(_page_count(disk))
            self._metrics.store_bytes.labels(disk.label).set_function(_live_bytes(disk))
            self._metrics.store_capacity_bytes.labels(disk.label).set(disk.capacity_bytes)
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
        return any(disk.opened and not disk.progress.done for disk in self.disks)

    def contains(self, page: PageId) -> bool:
        """Whether a read of `page` would be tried. No I/O; a few microseconds."""
        return any(disk.contains(page) for disk in self.disks)

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

    def write(self, sealed: SealedPage) -> bool:
        """Keeps `sealed`, whose buffers are the caller's again at the return.

        False if it was not kept; the metrics say why. True if it is there already.
        """
        if any(disk.holds(sealed.page) for disk in self.disks):
            return True
        for disk in self._ranked(sealed.page):
            if disk.writable:
                result = disk.write(sealed)
                self._metrics.store_writes.labels(disk.label, result).inc()
                return result in ("kept", "present")
        if self.disks:
            self._metrics.store_writes.labels(self._ranked(sealed.page)[0].label, "down").inc()
        return False

    def drop(self, page: PageId, reason: str) -> None:
        """Forgets `page`, whose copy is known to be bad; `reason` goes into the metrics."""
        for disk in self.disks:
            if disk.drop(page):
                self._metrics.store_evicted_pages.labels(disk.label, reason).inc()

    def evict_object(self, object_id: ObjectId) -> tuple[int, int]:
        """Drops every version of an object for good. Returns pages and slab bytes."""

        def rows(engine: Engine) -> list[int]:
            versions = engine.index.catalog.rows_of_object(object_id)
            return engine.index.rows_of_versions(versions)

        return self._evict(rows, lambda other: other == object_id)

    def evict_prefix(self, cache: str, bucket: str, prefix: bytes) -> tuple[int, int]:
        """Drops every object whose key starts with `prefix`. Returns pages and slab bytes."""

        def rows(engine: Engine) -> list[int]:
            versions = engine.index.catalog.rows_of_prefix(cache, bucket, prefix)
            return engine.index.rows_of_versions(versions)

        def matches(other: ObjectId) -> bool:
            same = (other.cache, other.bucket) == (cache, bucket)
            return same and other.key.startswith(prefix)

        return self._evict(rows, matches)

    def _evict(
        self, rows: Callable[[Engine], list[int]], matches: Callable[[ObjectId], bool]
    ) -> tuple[int, int]:
        counts = [disk.evict(rows, matches) for disk in self.disks]
        return sum(pages for pages, _ in counts), sum(size for _, size in counts)

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
                if disk.readable:
                    return f"on disk {disk.label}"
                return f"on disk {disk.label}, which is {disk.state.value}: {disk.trouble}"
        home = self._ranked(page)[0]
        if not home.readable:
            return f"disk {home.label} is {home.state.value}: {home.trouble}"
        if self.recovering:
            return "not found yet: the store is still being recovered"
        return "not on disk: never kept, evicted, or dropped"

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


def _page_count(disk: Disk) -> Callable[[], float]:
    return lambda: disk.page_count


def _live_bytes(disk: Disk) -> Callable[[], float]:
    return lambda: disk.live_bytes
