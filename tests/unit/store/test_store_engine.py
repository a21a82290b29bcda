"""The engine: what is kept, what is given up, and that what is dropped stays dropped."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry
from racerd.store.claims import Evict, Found, Prepare, Refused, Reservation, Victim
from racerd.store.engine import Engine
from racerd.store.geometry import SEGMENT_HEADER_BYTES, SlabGeometry
from racerd.store.notes import Selector
from racerd.store.segments import SegmentState
from racerd.units import KIB, MIB

PAGE = PageGeometry(64 * KIB, 16 * KIB)
FULL = PAGE.page_bytes


def page(number: int, *, key: bytes = b"key", cache: str = "models") -> PageId:
    return PageId(ObjectVersion(ObjectId(cache, "b", key), '"1"', 1 << 40), number)


class Driven:
    """An engine whose driver's part is done at once and always succeeds."""

    def __init__(self, capacity: int = 4 * MIB, *, segment_records: int = 4) -> None:
        record = SlabGeometry(PAGE, 0, 0, 0).full_record_bytes
        geometry = SlabGeometry.plan(
            PAGE, capacity, segment_bytes=SEGMENT_HEADER_BYTES + segment_records * record
        )
        self.engine = Engine(geometry)
        for segment in range(geometry.segment_count):
            self.engine.settle(segment, SegmentState.FRESH, 0, 0)
        self.engine.recovered()
        self.moved = 0
        self.evicted = 0

    def reserve(self, which: PageId, length: int = FULL) -> Reservation | Refused:
        evict = True
        while True:
            answer = self.engine.reserve(which, length, evict=evict)
            match answer:
                case Prepare():
                    self.engine.prepared(answer)
                case Evict():
                    evict = self.evict()
                case _:
                    return answer

    def evict(self) -> bool:
        victim = self.engine.next_victim()
        if victim is None:
            return False
        for found in victim.moves:
            copy = self.engine.start_move(found)
            if copy is not None:
                assert self.engine.commit_move(copy) is None
                self.moved += 1
        todo, pages = self.engine.evicted(victim)
        self.evicted += pages
        self.engine.prepared(todo)
        return True

    def put(self, which: PageId, length: int = FULL) -> bool:
        space = self.reserve(which, length)
        if isinstance(space, Refused):
            return False
        assert self.engine.commit(space) is None
        return True

    def read(self, which: PageId) -> bool:
        found = self.engine.start_read(which)
        if found is None:
            return False
        self.engine.end_read(found)
        return True


def fill(driven: Driven) -> int:
    """Fills the slab up to the first eviction; returns the number of pages."""
    number = 0
    while driven.evicted == 0:
        assert driven.put(page(number))
        number += 1
    return number


def test_space_is_charged_before_anything_is_written() -> None:
    """F1, F10, F41: concurrent reservations never exceed the capacity."""
    driven = Driven()
    open_ = []
    for number in range(1000):
        space = driven.reserve(page(number))
        if isinstance(space, Refused):
            assert space.reason == "no_space"
            break
        open_.append(space)
    taken = sum(space.record_bytes for space in open_)
    assert 0 < taken <= driven.engine.capacity_bytes
    extents = sorted((space.offset, space.record_bytes) for space in open_)
    for (offset, size), (following, _) in pairwise(extents):
        assert offset + size <= following


def test_it_never_outgrows_its_capacity_whatever_comes() -> None:
    """F1, F7, F19, R24: any mix of page sizes, reads and drops."""
    chance = random.Random(1)
    driven = Driven()
    for _ in range(3000):
        which = page(chance.randrange(200))
        match chance.randrange(4):
            case 0:
                driven.read(which)
            case 1:
                dropped = driven.engine.drop(which)
                if dropped is not None:
                    driven.engine.tombstone_done(dropped)
            case _:
                if not driven.engine.contains(which):
                    assert driven.put(which, chance.choice([1, 4096, 5000, 40_000, FULL]))
        assert driven.engine.live_bytes <= driven.engine.capacity_bytes
        assert not any(driven.engine.segments.pins)
    assert driven.evicted > 100


def test_what_is_read_survives_a_scan() -> None:
    """R24: one pass over a huge model does not wipe out the hot pages."""
    driven = Driven()
    hot = [page(number, key=b"hot") for number in range(20)]
    for which in hot:
        driven.put(which)
    for number in range(2000):
        for which in hot:
            driven.read(which)
        driven.put(page(number, key=b"scan"))
    assert all(driven.engine.contains(which) for which in hot)


def test_what_is_no_longer_read_goes() -> None:
    driven = Driven()
    for _ in range(3):
        for number in range(20):
            driven.put(page(number, key=b"old"))
            driven.read(page(number, key=b"old"))
    for number in range(500):
        driven.put(page(number, key=b"new"))
    assert not any(driven.engine.contains(page(number, key=b"old")) for number in range(20))


def test_a_segment_that_is_mostly_hot_gets_a_second_chance_without_a_copy() -> None:
    driven = Driven()
    count = fill(driven)
    oldest = driven.engine.segments.queue[0]
    rows = list(driven.engine.index.rows_of_segment(oldest))
    pages = [driven.engine.index.page(row) for row in rows]
    assert len(pages) == 4
    for which in pages:
        driven.read(which)
    moved = driven.moved
    while driven.evicted < 8:
        driven.put(page(count))
        count += 1
    assert all(driven.engine.contains(which) for which in pages)
    assert driven.moved == moved


def test_hot_records_of_a_cold_segment_are_copied() -> None:
    driven = Driven()
    count = fill(driven)
    oldest = driven.engine.segments.queue[0]
    hot = driven.engine.index.page(next(driven.engine.index.rows_of_segment(oldest)))
    driven.read(hot)
    before = driven.evicted
    while driven.evicted == before:
        driven.put(page(count))
        count += 1
    assert driven.moved == 1 and driven.evicted == before + 3
    found = driven.engine.start_read(hot)
    assert found is not None and found.segment != oldest
    driven.engine.end_read(found)


def test_a_segment_in_use_is_not_evicted() -> None:
    """F30, R7: a pin keeps the bytes until the read has ended."""
    driven = Driven()
    count = fill(driven)
    oldest = driven.engine.segments.queue[0]
    held = driven.engine.index.page(next(driven.engine.index.rows_of_segment(oldest)))
    found = driven.engine.start_read(held)
    assert found is not None
    for number in range(count, count + 200):
        driven.put(page(number))
    assert driven.engine.segments.generations[oldest] == found.generation
    assert driven.engine.contains(held)
    driven.engine.end_read(found)
    for number in range(count + 200, count + 400):
        driven.put(page(number))
    assert driven.engine.segments.generations[oldest] > found.generation


def test_a_segment_that_was_read_while_it_was_emptied_waits_for_the_reader() -> None:
    driven = Driven()
    fill(driven)
    engine = driven.engine
    victim = engine.next_victim()
    assert victim is not None
    which = engine.index.page(next(engine.index.rows_of_segment(victim.segment)))
    found = engine.start_read(which)
    assert found is not None
    todo, _ = engine.evicted(victim)
    engine.prepared(todo)
    assert victim.segment not in engine.segments.free
    engine.end_read(found)
    assert victim.segment in engine.segments.free


def test_when_everything_is_in_use_the_page_is_refused() -> None:
    driven = Driven()
    count = fill(driven)
    held = []
    for number in range(count):
        found = driven.engine.start_read(page(number))
        if found is not None:
            held.append(found)
    answers = [driven.reserve(page(10_000 + number)) for number in range(10)]
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert refused and {answer.reason for answer in refused} == {"no_space"}
    for found in held:
        driven.engine.end_read(found)


def test_a_page_dropped_while_it_is_written_is_not_kept() -> None:
    """F29, F30: the fence between drop and commit."""
    driven = Driven()
    space = driven.reserve(page(1))
    assert isinstance(space, Reservation)
    driven.engine.drop(page(1))
    again = driven.reserve(page(1))
    assert isinstance(again, Reservation)
    dropped = driven.engine.commit(space)
    assert dropped is not None and dropped.offset == space.offset
    assert not driven.engine.contains(page(1))
    assert driven.engine.commit(again) is None
    assert driven.engine.contains(page(1))
    driven.engine.tombstone_done(dropped)
    assert driven.engine.segments.pins[space.segment] == 0


def test_an_object_evicted_while_a_page_of_it_is_written_is_not_kept() -> None:
    driven = Driven()
    space = driven.reserve(page(1))
    assert isinstance(space, Reservation)
    driven.put(page(2))
    assert len(driven.engine.drop_selected(Selector("models", "b", b"ke", exact=False))) == 1
    assert driven.engine.commit(space) is not None
    assert len(driven.engine.index) == 0


def test_a_record_dropped_while_it_is_moved_is_not_kept() -> None:
    """F29: eviction and drop meet."""
    driven = Driven()
    fill(driven)
    engine = driven.engine
    oldest = engine.segments.queue[0]
    hot = engine.index.page(next(engine.index.rows_of_segment(oldest)))
    driven.read(hot)
    victim = engine.next_victim()
    assert victim is not None and len(victim.moves) == 1
    copy = engine.start_move(victim.moves[0])
    assert copy is not None
    original = engine.drop(hot)
    dropped = engine.commit_move(copy)
    assert original is not None and dropped is not None
    assert dropped.offset == copy.offset
    assert not engine.contains(hot)


def test_a_segment_with_a_tombstone_to_come_is_not_reused() -> None:
    """F29: else the tombstone would hit what comes next."""
    driven = Driven()
    count = fill(driven)
    oldest = driven.engine.segments.queue[0]
    which = driven.engine.index.page(next(driven.engine.index.rows_of_segment(oldest)))
    dropped = driven.engine.drop(which)
    assert dropped is not None
    for number in range(count, count + 200):
        driven.put(page(number))
    assert driven.engine.segments.generations[oldest] == dropped.generation
    driven.engine.tombstone_done(dropped)


def test_one_writer_per_page() -> None:
    """F30: the second one is told, not served."""
    driven = Driven()
    first = driven.reserve(page(1))
    assert isinstance(first, Reservation)
    assert driven.reserve(page(1)) == Refused("in_flight")
    driven.engine.commit(first)
    assert driven.reserve(page(1)) == Refused("present")


def test_a_failed_write_gives_its_space_back_or_leaves_a_tombstone() -> None:
    """F26: a failed attempt leaves no marker behind."""
    driven = Driven()
    driven.put(page(0))
    space = driven.reserve(page(1))
    assert isinstance(space, Reservation)
    assert driven.engine.abort(space, written=False) is None
    start = driven.engine.geometry.segment_offset(space.segment)
    assert start + driven.engine.segments.used[space.segment] == space.offset
    space = driven.reserve(page(1))
    assert isinstance(space, Reservation)
    dropped = driven.engine.abort(space, written=True)
    assert dropped is not None
    driven.engine.tombstone_done(dropped)
    assert driven.put(page(1))


def test_a_segment_whose_header_cannot_be_written_is_set_aside() -> None:
    driven = Driven()
    engine = driven.engine
    answer = engine.reserve(page(1), FULL)
    assert isinstance(answer, Prepare)
    capacity = engine.capacity_bytes
    engine.not_prepared(answer, no_space=False)
    assert engine.capacity_bytes < capacity
    assert driven.put(page(1))
    found = engine.start_read(page(1))
    assert found is not None and found.segment != answer.segment


def test_a_file_system_without_space_means_eviction_not_growth() -> None:
    """F1: ENOSPC on growing: what is allocated already is used again."""
    driven = Driven()
    for number in range(10):
        driven.put(page(number))
    driven.engine.growing = False
    for number in range(10, 100):
        assert driven.put(page(number))
    used = [s for s in driven.engine.segments.states if s is not SegmentState.FRESH]
    assert len(used) <= 4


def test_a_quota_drops_the_caches_own_oldest_pages() -> None:
    """F9: one cache's quota never costs another cache a page."""
    driven = Driven()
    record = driven.engine.geometry.full_record_bytes
    driven.engine.quotas = {"small": 10 * record}
    for number in range(10):
        driven.put(page(number, cache="other"))
    for number in range(30):
        which = page(number, cache="small")
        for dropped in driven.engine.trim(which, FULL):
            driven.engine.tombstone_done(dropped)
        assert driven.put(which)
        number_of = driven.engine.index.catalog.known_cache_number("small")
        assert driven.engine.cache_bytes[number_of] <= 10 * record
    assert all(driven.engine.contains(page(number, cache="other")) for number in range(10))
    assert driven.engine.contains(page(29, cache="small"))
    assert not driven.engine.contains(page(0, cache="small"))


def test_a_quota_smaller_than_a_page_refuses_it() -> None:
    driven = Driven()
    driven.engine.quotas = {"models": 100}
    driven.put(page(1, cache="other"))
    assert driven.engine.trim(page(1), FULL) == []
    assert driven.reserve(page(1)) == Refused("quota")


def test_a_quota_counts_what_is_being_written() -> None:
    driven = Driven()
    driven.engine.quotas = {"models": driven.engine.geometry.full_record_bytes}
    assert isinstance(driven.reserve(page(1)), Reservation)
    assert driven.reserve(page(2)) == Refused("quota")


def test_pins_are_spared_and_bounded() -> None:
    """R24: pinned pages stay through a flood; pins of everything do not stop the cache."""
    driven = Driven()
    for number in range(12):
        driven.put(page(number, key=b"pinned/x"))
    pin = Selector("models", "b", b"pinned/", exact=False)
    driven.engine.mark_pinned([pin])
    for number in range(1000):
        assert driven.put(page(number, key=b"flood"))
    assert all(driven.engine.contains(page(n, key=b"pinned/x")) for n in range(12))
    driven.engine.mark_pinned([Selector("models", "b", b"", exact=False)])
    for number in range(1000):
        driven.put(page(number, key=b"more"))
    assert driven.engine.contains(page(999, key=b"more"))
    driven.engine.mark_pinned([])
    assert driven.engine.pinned_bytes == 0


def test_a_pin_waits_for_what_comes_under_its_name() -> None:
    """R24: pages that come after the pin are spared like those that were there before."""
    driven = Driven()
    driven.engine.mark_pinned([Selector("models", "b", b"pinned/", exact=False)])
    for number in range(12):
        driven.put(page(number, key=b"pinned/x"))
    assert driven.engine.pinned_bytes == driven.engine.live_bytes
    for number in range(1000):
        assert driven.put(page(number, key=b"flood"))
    assert all(driven.engine.contains(page(n, key=b"pinned/x")) for n in range(12))


def test_a_quota_spares_pinned_pages() -> None:
    driven = Driven()
    record = driven.engine.geometry.full_record_bytes
    driven.engine.quotas = {"models": 3 * record}
    driven.put(page(0, key=b"pinned"))
    driven.put(page(1))
    driven.put(page(2))
    driven.engine.mark_pinned([Selector("models", "b", b"pinned", exact=True)])
    dropped = driven.engine.trim(page(3), FULL)
    assert len(dropped) == 1 and driven.engine.contains(page(0, key=b"pinned"))
    assert not driven.engine.contains(page(1))


@pytest.mark.parametrize("records", [1, 2, 7])
def test_slabs_of_few_and_small_segments_work(records: int) -> None:
    """F7: odd sizes find a victim too."""
    driven = Driven(
        64 * KIB + 32 * KIB + 3 * (4 * KIB + records * 68 * KIB), segment_records=records
    )
    assert driven.engine.geometry.segment_count == 3
    for number in range(50):
        assert driven.put(page(number))
        assert driven.engine.contains(page(number))


def test_drop_found_means_this_very_record() -> None:
    driven = Driven()
    driven.put(page(1))
    found = driven.engine.start_read(page(1))
    assert isinstance(found, Found)
    dropped = driven.engine.drop(page(1))
    driven.put(page(1))
    assert driven.engine.drop_found(found) is None
    assert driven.engine.contains(page(1))
    driven.engine.end_read(found)
    assert dropped is not None


def test_an_empty_segment_goes_first() -> None:
    driven = Driven()
    fill(driven)
    engine = driven.engine
    middle = engine.segments.queue[3]
    for row in list(engine.index.rows_of_segment(middle)):
        dropped = engine.drop(engine.index.page(row))
        assert dropped is not None
        engine.tombstone_done(dropped)
    assert engine.next_victim() == Victim(middle)


def test_a_new_version_of_an_object_makes_the_old_one_cold() -> None:
    """R24: after a roll-out the old version's pages are the first to go."""
    driven = Driven()

    def of(etag: str, number: int) -> PageId:
        return PageId(ObjectVersion(ObjectId("models", "b", b"model"), etag, 1 << 40), number)

    for number in range(8):
        driven.put(of("old", number))
        for _ in range(3):
            driven.read(of("old", number))
    driven.put(of("new", 0))
    driven.read(of("new", 0))
    count = 0
    while driven.evicted < 8:
        driven.put(page(count, key=b"other"))
        count += 1
    assert not any(driven.engine.contains(of("old", number)) for number in range(8))
    assert driven.engine.contains(of("new", 0))


def test_dropping_many_goes_in_bounded_steps() -> None:
    driven = Driven(64 * MIB, segment_records=16)
    for number in range(300):
        driven.put(page(number, key=b"a"), 100)
    for number in range(10):
        driven.put(page(number, key=b"b"), 100)
    selector = Selector("models", "b", b"a", exact=False)
    steps, cursor = [], 0
    while cursor is not None:
        dropped, cursor = driven.engine.drop_some(selector, cursor)
        steps.append(len(dropped))
    assert steps == [128, 128, 44]
    assert len(driven.engine.index) == 10
