"""Where things lie on a slab."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.pages import PageGeometry
from racerd.store.geometry import (
    BLOCK_BYTES,
    FRONT_BYTES,
    NOTES_BYTES,
    NOTES_OFFSETS,
    PROBE_OFFSET,
    SEGMENT_HEADER_BYTES,
    SUPERBLOCK_OFFSETS,
    SlabGeometry,
    header_bytes,
)
from racerd.store.slab import floor_bytes
from racerd.units import GIB, KIB, MIB, TIB

PAGES = [
    PageGeometry(64 * KIB, 4 * KIB),
    PageGeometry(MIB, 64 * KIB),
    PageGeometry(),
    PageGeometry(64 * MIB, 256 * KIB),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.page_bytes // KIB}KiB")
@pytest.mark.parametrize("records", [256, 1000, 4099, 70_000])
def test_less_than_two_percent_are_wasted_with_full_pages(page: PageGeometry, records: int) -> None:
    """R24: of a slab for hundreds of records at most 2 % hold no full record."""
    capacity = records * (header_bytes(page) + page.page_bytes)
    geometry = SlabGeometry.plan(page, capacity)
    used = geometry.full_records() * geometry.full_record_bytes
    assert used >= 0.98 * capacity


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: f"{page.page_bytes // KIB}KiB")
def test_headers_are_part_of_the_two_percent_from_1_mib_pages_on(page: PageGeometry) -> None:
    geometry = SlabGeometry.plan(page, 4000 * page.page_bytes)
    assert geometry.full_records() * page.page_bytes >= 0.98 * geometry.capacity_bytes


@given(
    page=st.sampled_from(PAGES),
    capacity=st.integers(0, 200 * TIB),
)
def test_nothing_overlaps_and_all_is_aligned(page: PageGeometry, capacity: int) -> None:
    """F31, F33: every offset and length is a multiple of 4 KiB, whatever the capacity."""
    if capacity < 6 * page.page_bytes:
        return  # Too small, perhaps: another test.
    geometry = SlabGeometry.plan(page, capacity)
    last = geometry.segment_count - 1
    marks = [
        FRONT_BYTES, geometry.segment_offset(0), geometry.segment_offset(1),
        geometry.segment_offset(last), geometry.segment_offset(last) + geometry.segment_size(last),
        geometry.checkpoint_offset(0), geometry.checkpoint_offset(1),
        geometry.checkpoint_offset(1) + geometry.checkpoint_bytes, geometry.capacity_bytes,
        capacity,
    ]  # fmt: skip
    assert marks == sorted(marks)
    assert all(mark % BLOCK_BYTES == 0 for mark in marks[:-1])
    assert geometry.segment_size(last) >= SEGMENT_HEADER_BYTES + geometry.full_record_bytes
    assert geometry.segment_bytes < 2**32, "a place in a segment has 32 bits"


@given(first=st.integers(GIB, 4 * GIB), second=st.integers(GIB // 2, 4 * GIB))
def test_segments_stay_where_they_are_when_the_capacity_changes(first: int, second: int) -> None:
    """F3: growing and shrinking keep the place of every segment that still fits."""
    before = SlabGeometry.plan(PAGES[0], first)
    after = SlabGeometry.plan(PAGES[0], second, segment_bytes=before.segment_bytes)
    for segment in {0, min(before.segment_count, after.segment_count) - 1}:
        assert before.segment_offset(segment) == after.segment_offset(segment)


def test_what_the_front_holds_does_not_overlap() -> None:
    places = [(offset, BLOCK_BYTES) for offset in SUPERBLOCK_OFFSETS]
    places += [(PROBE_OFFSET, BLOCK_BYTES)]
    places += [(offset, NOTES_BYTES) for offset in NOTES_OFFSETS]
    places.sort()
    for (offset, size), following in zip(places, [*places[1:], (FRONT_BYTES, 0)], strict=True):
        assert offset % BLOCK_BYTES == 0
        assert offset + size <= following[0]


def test_a_slab_that_is_too_small_says_how_large_it_must_be() -> None:
    with pytest.raises(ValueError, match=r"4 MiB is too small for pages of 16 MiB: give it 4\d"):
        SlabGeometry.plan(PageGeometry(), 4 * MIB)


@given(total=st.integers(0, 1 << 50), ratio=st.floats(0, 0.99))
def test_the_floor_is_never_below_its_share(total: int, ratio: float) -> None:
    """F13: the arithmetic of the free-space floor rounds up, not down."""
    floor = floor_bytes(total, ratio)
    assert floor >= total * ratio
    assert floor < total * ratio + 1 + total * 1e-15
