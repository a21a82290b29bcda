"""The memory tier: sealed pages in the frame arena, shared by lease.

Layer: read; loop thread only, except that `FrameSlots.frames` may be built on any worker. It
holds ciphertext; opening is `delivery`'s business.

A page is **leased** while anybody reads or writes its slots: a reader until its frames are opened,
write-back until the disk has them. Only pages without a lease are evicted, and slots return to
the arena when the last lease ends, never earlier. The arena's size is the hard limit.

Eviction is S3-FIFO (Yang et al., SOSP 2023): new pages enter a small queue, which takes a tenth of
the slots; those read again from there move to the main queue, which gives second chances; the rest
leave, and are remembered for a while so that a page that comes back enters the main queue at once.
A scan of one huge model passes through the small queue and leaves the main one alone (R24). Reading
a page in chunks, front to back, is one read: only bytes that were read before count as a hit.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

from racerd.crypto.sealing import PageOpener
from racerd.ids import ObjectId, PageId
from racerd.pages import PageGeometry, Seal, SealedPage
from racerd.runtime.arena import FrameArena

PageKey = tuple[bytes, int]

_HITS_MAX = 3
_SMALL_SHARE = 10  # The small queue is due to give once it holds one slot of so many.
_GHOSTS_MIN = 64


class FrameSlots:
    """Arena slots for frames [first, stop) of a page, in order, owned until `give_back`."""

    __slots__ = ("_arena", "_frames", "_slots", "first", "geometry", "page_length", "stop")

    def __init__(
        self,
        arena: FrameArena,
        slots: list[int],
        place: tuple[int, int, int],
        geometry: PageGeometry,
    ) -> None:
        """`place`: first frame, frame after the last, plaintext length of the page."""
        self._arena = arena
        self._slots = slots
        self._frames: list[memoryview] | None = None
        self.first, self.stop, self.page_length = place
        self.geometry = geometry

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def frames(self) -> list[memoryview]:
        """Writable views, one a frame, each of the frame's length and its tag's."""
        if self._frames is None:
            length_of = self.geometry.frame_length
            self._frames = [
                self._arena.frame(slot, length_of(self.page_length, frame))
                for frame, slot in enumerate(self._slots, self.first)
            ]
        return self._frames

    def numbers(self, first: int, stop: int) -> tuple[int, ...]:
        """The arena slots of frames [first, stop) of the page, for somebody who maps the arena."""
        return tuple(self._slots[first - self.first : stop - self.first])

    def give_back(self) -> None:
        """Frees the slots. Nobody may touch the frames any more."""
        slots, self._slots, self._frames = self._slots, [], []
        self._arena.give_back(slots)


class MemoryPage:
    """A sealed page, or some frames of one, in arena slots. `opener` is made on first use."""

    __slots__ = ("hits", "id", "kept", "leases", "opener", "read_to", "seal", "slots")

    def __init__(self, page: PageId, seal: Seal, slots: FrameSlots) -> None:
        self.id = page
        self.seal = seal
        self.slots = slots
        self.opener: PageOpener | None = None
        self.leases = 0
        self.kept = False  # Whether the tier's index holds it.
        self.hits = 0
        self.read_to = 0  # The bytes before this were read at least once.

    @property
    def sealed(self) -> SealedPage:
        return SealedPage(self.id, self.seal, self.slots.frames)


class PageLease:
    """Keeps a page's slots until `release`. Releasing twice is harmless."""

    __slots__ = ("_tier", "page", "rung")

    def __init__(self, tier: MemoryTier, page: MemoryPage, rung: str) -> None:
        self._tier: MemoryTier | None = tier
        self.page = page
        self.rung = rung
        page.leases += 1
        tier.leases += 1

    def touch(self, start: int, stop: int) -> None:
        """Notes that bytes [start, stop) of the page are read: a hit, if they were before."""
        page = self.page
        if start < page.read_to:
            page.hits = min(page.hits + 1, _HITS_MAX)
        page.read_to = max(page.read_to, stop)

    def share(self) -> PageLease:
        """A lease of its own on the same page."""
        assert self._tier is not None, "a lease that ended is not shared"
        return PageLease(self._tier, self.page, self.rung)

    def release(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier._released(self.page)


class _Waiter:
    """Somebody in the queue for slots; `place` as in `FrameSlots`."""

    __slots__ = ("place", "since", "slots")

    def __init__(self, place: tuple[int, int, int], slots: asyncio.Future[FrameSlots]) -> None:
        self.place = place
        self.since = time.monotonic()
        self.slots = slots


class MemoryTier:
    """Sealed pages by identity. `close` gives every slot back; no lease may be left by then."""

    def __init__(self, arena: FrameArena, geometry: PageGeometry, *, waiters_max: int) -> None:
        self._arena = arena
        self.geometry = geometry
        self._waiters_max = waiters_max
        # Keyed by digest, which is cheap; identity is compared in full on the way out (F30).
        self._index: dict[PageKey, MemoryPage] = {}
        self._small: OrderedDict[PageKey, MemoryPage] = OrderedDict()
        self._main: OrderedDict[PageKey, MemoryPage] = OrderedDict()
        self._ghosts: OrderedDict[PageKey, None] = OrderedDict()
        self._objects: dict[ObjectId, dict[PageId, MemoryPage]] = {}
        self._small_slots = 0
        self._main_slots = 0
        self._waiters: deque[_Waiter] = deque()
        self._progress_at = time.monotonic()
        self.leases = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        return (self._arena.slot_count - self._arena.free_slots) * self._arena.slot_bytes

    @property
    def limit_bytes(self) -> int:
        return self._arena.slot_count * self._arena.slot_bytes

    def close(self) -> None:
        for page in list(self._index.values()):
            self._remove(page)

    # --- looking up -------------------------------------------------------------------------

    def contains(self, page: PageId) -> bool:
        return self._find(page) is not None

    def lease(self, page: PageId) -> PageLease | None:
        """A lease on `page`, or None: a miss."""
        found = self._find(page)
        return None if found is None else PageLease(self, found, "memory")

    def _find(self, page: PageId) -> MemoryPage | None:
        found = self._index.get(page.key)
        return found if found is not None and found.id == page else None

    def was_evicted(self, page: PageId) -> bool:
        """Whether the page was here a while ago, as far as is remembered."""
        return page.key in self._ghosts

    # --- putting in -------------------------------------------------------------------------

    def try_reserve(self, first: int, stop: int, page_length: int) -> FrameSlots | None:
        """Slots for frames [first, stop) of a page, evicting what nobody holds; or None."""
        while (slots := self._arena.take(stop - first)) is None:
            if not self._evict_one():
                return None
        return FrameSlots(self._arena, slots, (first, stop, page_length), self.geometry)

    async def reserve(
        self, first: int, stop: int, page_length: int, *, patience_seconds: float
    ) -> FrameSlots | None:
        """As `try_reserve`, but waits in turn.

        None where nobody in the queue got slots for `patience_seconds`; at once for more than the
        arena has, or where too many wait already.

        Cancelling leaves the queue.
        """
        if not self._waiters:
            slots = self.try_reserve(first, stop, page_length)
            if slots is not None:
                return slots
        if stop - first > self._arena.slot_count or len(self._waiters) >= self._waiters_max:
            return None
        waiter = _Waiter((first, stop, page_length), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            while not waiter.slots.done():
                patience_ends = max(self._progress_at, waiter.since) + patience_seconds
                left = patience_ends - time.monotonic()
                if left <= 0:
                    self._withdraw(waiter)
                    return None
                await asyncio.wait([waiter.slots], timeout=left)
            return waiter.slots.result()
        except asyncio.CancelledError:
            if waiter.slots.done():
                self.return_slots(waiter.slots.result())
            else:
                self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self.wake()  # It may have stood in front of somebody who wants less.

    def wake(self) -> None:
        """Gives slots that can be had to those who wait for them, in turn."""
        while self._waiters:
            slots = self.try_reserve(*self._waiters[0].place)
            if slots is None:
                return
            self._progress_at = time.monotonic()
            self._waiters.popleft().slots.set_result(slots)

    def return_slots(self, slots: FrameSlots) -> None:
        """Gives back slots that no page was made of."""
        slots.give_back()
        self.wake()

    def insert(self, page: PageId, seal: Seal, slots: FrameSlots, *, rung: str) -> PageLease:
        """Keeps a whole page; takes over `slots`. An older copy of it leaves the index."""
        older = self._index.get(page.key)
        if older is not None:
            self._remove(older)
        kept = MemoryPage(page, seal, slots)
        kept.kept = True
        self._index[page.key] = kept
        if page.key in self._ghosts:
            del self._ghosts[page.key]
            self._main[page.key] = kept
            self._main_slots += slots.count
        else:
            self._small[page.key] = kept
            self._small_slots += slots.count
        self._objects.setdefault(page.version.object_id, {})[page] = kept
        return PageLease(self, kept, rung)

    def hold(self, page: PageId, seal: Seal, slots: FrameSlots, *, rung: str) -> PageLease:
        """A lease on frames that the index does not get; they go when the last lease ends."""
        return PageLease(self, MemoryPage(page, seal, slots), rung)

    # --- taking out -------------------------------------------------------------------------

    def drop(self, page: MemoryPage) -> None:
        """Takes exactly this copy out of the index. Its slots go when its last lease ends."""
        if page.kept:
            self._remove(page)
            self.wake()

    def _remove(self, page: MemoryPage) -> None:
        page.kept = False
        del self._index[page.id.key]
        if self._small.get(page.id.key) is page:
            del self._small[page.id.key]
            self._small_slots -= page.slots.count
        else:
            del self._main[page.id.key]
            self._main_slots -= page.slots.count
        siblings = self._objects[page.id.version.object_id]
        del siblings[page.id]
        if not siblings:
            del self._objects[page.id.version.object_id]
        if page.leases == 0:
            page.slots.give_back()

    def objects(self) -> list[ObjectId]:
        """The objects that have pages here."""
        return list(self._objects)

    def pages_of(self, object_id: ObjectId) -> list[MemoryPage]:
        """Every page of every version of an object that is here."""
        return list(self._objects.get(object_id, {}).values())

    def _released(self, page: MemoryPage) -> None:
        page.leases -= 1
        self.leases -= 1
        if page.leases == 0:
            if not page.kept:
                page.slots.give_back()
            self.wake()

    def _evict_one(self) -> bool:
        """Evicts one page that nobody holds; False if there is none."""
        small_is_due = self._small_slots * _SMALL_SHARE >= self._small_slots + self._main_slots
        if small_is_due:
            return self._evict_from_small() or self._evict_from_main()
        return self._evict_from_main() or self._evict_from_small()

    def _evict_from_small(self) -> bool:
        for _ in range(len(self._small)):
            key, page = next(iter(self._small.items()))
            if page.leases:
                self._small.move_to_end(key)
            elif page.hits:
                page.hits = 0
                self._main[key] = self._small.pop(key)
                self._small_slots -= page.slots.count
                self._main_slots += page.slots.count
            else:
                self._remove(page)
                self._remember(key)
                return True
        return False

    def _evict_from_main(self) -> bool:
        for _ in range(len(self._main) * (_HITS_MAX + 1)):
            key, page = next(iter(self._main.items()))
            if page.leases or page.hits:
                page.hits = page.hits if page.leases else page.hits - 1
                self._main.move_to_end(key)
            else:
                self._remove(page)
                return True
        return False

    def _remember(self, key: PageKey) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > max(_GHOSTS_MIN, len(self)):
            self._ghosts.popitem(last=False)
