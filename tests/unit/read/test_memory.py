"""The memory tier: leases, eviction, the hard limit, and who gets slots when they are scarce."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry, Seal
from racerd.read.memory import MemoryTier, PageLease
from racerd.runtime.arena import FrameArena
from racerd.units import KIB

GEOMETRY = PageGeometry(64 * KIB, 16 * KIB)
FRAMES = GEOMETRY.frames_per_page
VERSION = ObjectVersion(ObjectId("cache", "b", b"k"), '"v1"', 1 << 40)
SEAL = Seal(1, bytes(24), GEOMETRY.page_bytes, bytes(16 * FRAMES), (0,) * FRAMES, 0)


def page(index: int, version: ObjectVersion = VERSION) -> PageId:
    return PageId(version, index)


@pytest.fixture
def arena() -> Iterator[FrameArena]:
    with FrameArena(GEOMETRY.frame_bytes, 10 * FRAMES * 20 * KIB) as arena:
        assert arena.slot_count == 10 * FRAMES
        yield arena
        assert arena.free_slots == arena.slot_count


@pytest.fixture
def tier(arena: FrameArena) -> Iterator[MemoryTier]:
    tier = MemoryTier(arena, GEOMETRY, waiters_max=4)
    yield tier
    assert tier.leases == 0
    tier.close()
    assert len(tier) == 0


def put(tier: MemoryTier, index: int) -> PageLease:
    slots = tier.try_reserve(0, FRAMES, GEOMETRY.page_bytes)
    assert slots is not None
    return tier.insert(page(index), SEAL, slots, rung="origin")


def fill(tier: MemoryTier, indexes: range) -> None:
    for index in indexes:
        put(tier, index).release()


def look(tier: MemoryTier, index: int) -> bool:
    """Reads the whole page, if it is there."""
    lease = tier.lease(page(index))
    if lease is None:
        return False
    lease.touch(0, GEOMETRY.page_bytes)
    lease.release()
    return True


def run(main: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(main())  # type: ignore[arg-type]


def test_what_was_put_in_is_found_by_its_whole_identity(tier: MemoryTier) -> None:
    put(tier, 3).release()
    assert tier.contains(page(3)) and not tier.contains(page(4))
    other = ObjectVersion(VERSION.object_id, '"v2"', VERSION.size)
    assert not tier.contains(page(3, other))


def test_a_hash_collision_is_a_miss(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """F30: entries are found by digest and compared in full."""
    monkeypatch.setattr(ObjectVersion, "digest", bytes(16))
    one, other = (
        ObjectVersion(ObjectId("cache", "b", key), '"v1"', 1 << 40) for key in (b"1", b"2")
    )
    assert page(3, one).key == page(3, other).key
    slots = tier.try_reserve(0, FRAMES, GEOMETRY.page_bytes)
    assert slots is not None
    tier.insert(page(3, one), SEAL, slots, rung="origin").release()
    assert tier.contains(page(3, one))
    assert not tier.contains(page(3, other))
    assert tier.lease(page(3, other)) is None
    tier.close()  # While the digests are what they were.


def test_the_arena_is_the_limit(tier: MemoryTier, arena: FrameArena) -> None:
    """F10, F41: pages beyond the limit push others out; never more is used."""
    fill(tier, range(25))
    assert len(tier) == 10
    assert tier.used_bytes == tier.limit_bytes == arena.slot_count * arena.slot_bytes


def test_a_leased_page_stays(tier: MemoryTier) -> None:
    """R7, F43: slots are somebody's until the last lease ends; eviction goes round them."""
    lease = put(tier, 0)
    before = bytes(lease.page.slots.frames[0])
    fill(tier, range(1, 40))
    assert tier.contains(page(0))
    assert bytes(lease.page.slots.frames[0]) == before
    lease.release()
    fill(tier, range(40, 60))
    assert not tier.contains(page(0))


def test_when_every_page_is_leased_there_is_no_room(tier: MemoryTier) -> None:
    leases = [put(tier, index) for index in range(10)]
    assert tier.try_reserve(0, 1, GEOMETRY.page_bytes) is None
    leases.pop().release()
    slots = tier.try_reserve(0, 1, GEOMETRY.page_bytes)
    assert slots is not None
    tier.return_slots(slots)
    for lease in leases:
        lease.release()


def test_a_dropped_page_lives_until_its_last_lease_ends(
    tier: MemoryTier, arena: FrameArena
) -> None:
    lease = put(tier, 0)
    second = lease.share()
    tier.drop(lease.page)
    assert not tier.contains(page(0))
    lease.release()
    lease.release()  # Twice is once.
    assert arena.free_slots == arena.slot_count - FRAMES
    second.release()
    assert arena.free_slots == arena.slot_count


def test_dropping_drops_exactly_that_copy(tier: MemoryTier) -> None:
    """R22: who finds an old copy bad does not take the fresh one away."""
    bad = put(tier, 0)
    tier.drop(bad.page)
    put(tier, 0).release()
    tier.drop(bad.page)
    assert tier.contains(page(0))
    bad.release()
    assert tier.contains(page(0))


def test_a_newer_copy_takes_the_place_of_the_older(tier: MemoryTier) -> None:
    older = put(tier, 0)
    newer = put(tier, 0)
    assert len(tier) == 1
    older.release()
    assert tier.lease(page(0)).page is newer.page  # type: ignore[union-attr]
    newer.release()
    newer.page.leases -= 1  # The one that was just looked at.
    tier.leases -= 1


def test_a_scan_leaves_what_is_read_again(tier: MemoryTier) -> None:
    """R24: a huge model read once passes through; hot pages stay."""
    fill(tier, range(4))
    for _ in range(2):
        assert all(look(tier, index) for index in range(4))
    fill(tier, range(100, 200))
    assert [index for index in range(4) if tier.contains(page(index))] == [0, 1, 2, 3]


def test_reading_a_page_in_chunks_is_one_read(tier: MemoryTier) -> None:
    """R24: front to back, each byte once, is a scan however small the chunks are."""
    fill(tier, range(1))
    for start in range(0, GEOMETRY.page_bytes, 4 * KIB):
        lease = tier.lease(page(0))
        assert lease is not None
        lease.touch(start, start + 4 * KIB)
        lease.release()
    fill(tier, range(100, 120))
    assert not tier.contains(page(0))


def test_a_page_that_comes_back_soon_is_taken_for_hot(tier: MemoryTier) -> None:
    fill(tier, range(12))
    assert tier.was_evicted(page(0)) and not tier.contains(page(0))
    put(tier, 0).release()
    assert not tier.was_evicted(page(0))
    fill(tier, range(100, 130))
    assert tier.contains(page(0))


def test_hot_pages_leave_when_they_are_read_no_more(tier: MemoryTier) -> None:
    """R24: the main queue is not for ever."""
    fill(tier, range(8))
    for _ in range(5):
        assert all(look(tier, index) for index in range(8))
    misses = []
    for _ in range(10):  # Another working set of eight, read again and again.
        missed = [index for index in range(100, 108) if not look(tier, index)]
        for index in missed:
            put(tier, index).release()
        misses.append(len(missed))
    assert misses[0] == 8 and misses[-1] == 0
    assert sum(tier.contains(page(index)) for index in range(8)) <= 2


def test_frames_of_a_part_are_held_and_not_kept(tier: MemoryTier, arena: FrameArena) -> None:
    slots = tier.try_reserve(1, 3, GEOMETRY.page_bytes)
    assert slots is not None and slots.count == 2
    assert [len(frame) for frame in slots.frames] == [16 * KIB + 16] * 2
    lease = tier.hold(page(0), SEAL, slots, rung="disk")
    assert not tier.contains(page(0))
    lease.release()
    assert arena.free_slots == arena.slot_count


def test_the_last_frame_of_a_short_page_is_short(tier: MemoryTier) -> None:
    slots = tier.try_reserve(0, 2, 16 * KIB + 100)
    assert slots is not None
    assert [len(frame) for frame in slots.frames] == [16 * KIB + 16, 116]
    tier.return_slots(slots)


def test_objects_are_known_by_their_pages(tier: MemoryTier) -> None:
    fill(tier, range(2))
    assert tier.objects() == [VERSION.object_id]
    for found in tier.pages_of(VERSION.object_id):
        tier.drop(found)
    assert tier.objects() == [] and tier.pages_of(VERSION.object_id) == []


# --- waiting for slots -----------------------------------------------------------------------


def reserve(tier: MemoryTier, count: int, patience: float = 60.0) -> asyncio.Task[object]:
    wait = tier.reserve(0, count, GEOMETRY.page_bytes, patience_seconds=patience)
    return asyncio.ensure_future(wait)


def test_slots_are_waited_for_in_turn(tier: MemoryTier) -> None:
    async def main() -> None:
        leases = [put(tier, index) for index in range(10)]
        first, second = reserve(tier, FRAMES), reserve(tier, 1)
        await asyncio.sleep(0)
        leases.pop().release()
        slots = await first
        await asyncio.sleep(0)
        assert not second.done()  # It fits no more: it did not overtake the first.
        leases.pop().release()
        tier.return_slots(slots)  # type: ignore[arg-type]
        tier.return_slots(await second)  # type: ignore[arg-type]
        for lease in leases:
            lease.release()

    run(main)


def test_who_is_cancelled_leaves_the_queue(tier: MemoryTier) -> None:
    async def main() -> None:
        leases = [put(tier, index) for index in range(10)]
        big, small = reserve(tier, 2 * FRAMES), reserve(tier, 1)
        await asyncio.sleep(0)
        leases.pop().release()
        await asyncio.sleep(0)
        assert not small.done()
        big.cancel()
        tier.return_slots(await small)  # type: ignore[arg-type]
        for lease in leases:
            lease.release()
        assert big.cancelled()

    run(main)


def test_slots_that_come_with_the_cancel_are_not_lost(tier: MemoryTier, arena: FrameArena) -> None:
    """F26: granted and cancelled in one turn of the loop."""

    async def main() -> None:
        leases = [put(tier, index) for index in range(10)]
        waiting = reserve(tier, 1)
        await asyncio.sleep(0)
        leases.pop().release()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for lease in leases:
            lease.release()

    run(main)
    tier.close()
    assert arena.free_slots == arena.slot_count


def test_patience_ends_when_nothing_moves(tier: MemoryTier) -> None:
    async def main() -> None:
        leases = [put(tier, index) for index in range(10)]
        assert await reserve(tier, 1, patience=0.01) is None
        for lease in leases:
            lease.release()

    run(main)


def test_what_cannot_be_is_refused_at_once(tier: MemoryTier) -> None:
    """More than the arena has; more waiters than the limit (a bound on every queue)."""

    async def main() -> None:
        assert await tier.reserve(0, 41, 1 << 20, patience_seconds=60) is None
        leases = [put(tier, index) for index in range(10)]
        waiting = [reserve(tier, 1) for _ in range(4)]
        await asyncio.sleep(0)
        assert await reserve(tier, 1) is None
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for lease in leases:
            lease.release()

    run(main)
