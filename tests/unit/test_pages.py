"""How objects are cut into pages and frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.pages import (
    FRAME_BYTES_MIN,
    FRAMES_PER_PAGE_MAX,
    PAGE_BYTES_MAX,
    PAGE_BYTES_MIN,
    PageGeometry,
    Seal,
)
from racerd.units import KIB, MIB


@st.composite
def geometries(draw: st.DrawFn) -> PageGeometry:
    page = draw(st.integers(16, 26))
    frame = draw(st.integers(max(12, page - 8), page))
    return PageGeometry(1 << page, 1 << frame)


@given(geometries(), st.integers(0, 2**50))
def test_pages_cover_the_object_exactly(geometry: PageGeometry, size: int) -> None:
    count = geometry.page_count(size)
    if size == 0:
        assert count == 0  # F50: an empty object has no page to fetch.
        return
    assert (count - 1) * geometry.page_bytes < size <= count * geometry.page_bytes
    assert geometry.page_length(size, 0) == min(size, geometry.page_bytes)
    last = geometry.page_length(size, count - 1)
    assert 1 <= last <= geometry.page_bytes
    assert (count - 1) * geometry.page_bytes + last == size


@given(geometries(), st.data())
def test_frames_cover_the_page_exactly(geometry: PageGeometry, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, geometry.page_bytes))
    count = geometry.frame_count(length)
    lengths = [geometry.frame_length(length, frame) for frame in range(count)]
    assert sum(lengths) == length
    assert all(part == geometry.frame_bytes for part in lengths[:-1])
    assert 1 <= lengths[-1] <= geometry.frame_bytes
    assert count <= geometry.frames_per_page <= FRAMES_PER_PAGE_MAX


@pytest.mark.parametrize(
    ("page", "frame", "message"),
    [
        (PAGE_BYTES_MIN // 2, FRAME_BYTES_MIN, "page_bytes must be"),
        (PAGE_BYTES_MAX * 2, MIB, "page_bytes must be"),
        (3 * MIB, MIB, "page_bytes must be a power of two"),
        (MIB, 5000, "frame_bytes must be a power of two"),
        (MIB, 2 * MIB, "frame_bytes must be"),
        (MIB, FRAME_BYTES_MIN // 2, "frame_bytes must be"),
        (PAGE_BYTES_MAX, FRAME_BYTES_MIN, "at most 256 frames"),
        (0, 4096, "power of two"),
        (-MIB, 4096, "power of two"),
    ],
)
def test_sizes_out_of_bounds_are_refused(page: int, frame: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageGeometry(page, frame)


def test_the_default_geometry() -> None:
    geometry = PageGeometry()
    assert (geometry.page_bytes, geometry.frame_bytes) == (16 * MIB, 256 * KIB)
    assert geometry.frames_per_page == 64


def test_a_seal_has_one_tag_and_one_crc_a_frame() -> None:
    seal = Seal(1, bytes(24), 10, b"a" * 16 + b"b" * 16, (1, 2), 3)
    assert seal.frame_count == 2
    assert (seal.tag(0), seal.tag(1)) == (b"a" * 16, b"b" * 16)
    for salt, tags, crcs in ((23, 32, (1, 2)), (24, 31, (1, 2)), (24, 32, (1,))):
        with pytest.raises(ValueError, match="seal"):
            Seal(1, bytes(salt), 10, bytes(tags), crcs, 3)
