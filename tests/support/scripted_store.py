"""A store in memory that does what a test tells it: rot, miss, fail, refuse, hold.

It keeps real sealed pages by value and checks CRCs as the slab store does, so that what comes out
is what a disk would give.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from racerd.crc64 import crc64
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, Seal, SealedPage
from racerd.store import NotLent


class ScriptedStore:
    """Stands for `racerd.store.Store`. `on_read` and `on_write` run in the calling thread."""

    def __init__(self) -> None:
        self.disks = [object()]
        self.pages: dict[PageId, tuple[Seal, list[bytearray]]] = {}
        self.reads: Counter[tuple[int, int, int]] = Counter()  # Page, first frame, frames.
        self.writes: Counter[int] = Counter()
        self.drops: Counter[tuple[int, str]] = Counter()
        self.on_read: Callable[[PageId], None] | None = None
        self.on_write: Callable[[PageId], None] | None = None
        self.on_drop: Callable[[PageId], None] | None = None
        self.whole_only = False
        self.crc_per_frame = True
        self._lock = threading.Lock()

    def contains(self, page: PageId) -> bool:
        return page in self.pages

    def unproven(self, page: PageId) -> bool:
        return False

    def reads_whole(self, page: PageId) -> bool:
        return self.whole_only

    slab_numbers: frozenset[int] = frozenset()

    def lend(self, page: PageId) -> NotLent:
        if page not in self.pages:
            return NotLent("absent")
        return NotLent("v1_record" if self.whole_only else "not_direct")

    def read(self, page: PageId, first_frame: int, frames: Sequence[memoryview]) -> Seal | None:
        with self._lock:
            self.reads[page.index, first_frame, len(frames)] += 1
        if self.on_read is not None:
            self.on_read(page)
        found = self.pages.get(page)
        if found is None:
            return None
        seal, kept = found
        for number, (frame, stored) in enumerate(zip(frames, kept[first_frame:], strict=False)):
            frame[:] = stored
            if (
                self.crc_per_frame
                and crc64(bytes(stored[:-TAG_BYTES])) != seal.crcs[first_frame + number]
            ):
                self.pages.pop(page, None)
                return None
        return seal

    def write(self, sealed: SealedPage) -> bool:
        with self._lock:
            self.writes[sealed.page.index] += 1
        if self.on_write is not None:
            self.on_write(sealed.page)
        self.pages[sealed.page] = (sealed.seal, [bytearray(frame) for frame in sealed.frames])
        return True

    def drop(self, page: PageId, reason: str) -> None:
        if self.on_drop is not None:
            self.on_drop(page)
        with self._lock:
            self.drops[page.index, reason] += 1
        self.pages.pop(page, None)

    def evict_object(self, object_id: ObjectId) -> tuple[int, int]:
        return self._evict(lambda other: other == object_id)

    def evict_prefix(self, cache: str, bucket: str, prefix: bytes) -> tuple[int, int]:
        return self._evict(
            lambda other: (
                (other.cache, other.bucket) == (cache, bucket) and other.key.startswith(prefix)
            )
        )

    def _evict(self, matches: Callable[[ObjectId], bool]) -> tuple[int, int]:
        gone = [page for page in self.pages if matches(page.version.object_id)]
        return len(gone), sum(self.pages.pop(page)[0].length for page in gone)

    def find_version(self, object_id: ObjectId, etag: str) -> ObjectVersion | None:
        for page in self.pages:
            if page.version.object_id == object_id and page.version.etag == etag:
                return page.version
        return None

    def explain(self, page: PageId) -> str:
        return "on disk" if page in self.pages else "not on disk: never kept, evicted, or dropped"

    # --- what tests do ----------------------------------------------------------------------

    def rot(self, page: PageId, frame: int = 0) -> None:
        """Flips a bit that the CRC does not cover for: as if it had rotted before it was sealed.

        The CRC is made to fit, so that only the tag tells.
        """
        seal, frames = self.pages[page]
        frames[frame][0] ^= 1
        crcs = list(seal.crcs)
        crcs[frame] = crc64(bytes(frames[frame][:-TAG_BYTES]))
        twisted = Seal(seal.epoch, seal.salt, seal.length, seal.tags, tuple(crcs), seal.plain_crc)
        self.pages[page] = (twisted, frames)

    def tear(self, page: PageId, frame: int = 0) -> None:
        """Flips a bit that the CRC finds."""
        self.pages[page][1][frame][1] ^= 0x80
