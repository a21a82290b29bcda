"""From a range to pages and frames: every byte once, few cuts."""

from __future__ import annotations

import pytest

from racerd.pages import PageGeometry
from racerd.read.plan import (
    FrameCut,
    FrameRun,
    PagePart,
    frame_span,
    part_count,
    plan_frames,
    plan_pages,
)
from racerd.units import KIB

GEOMETRY = PageGeometry(64 * KIB, 4 * KIB)
PAGE, FRAME = GEOMETRY.page_bytes, GEOMETRY.frame_bytes


def test_an_empty_range_has_no_part() -> None:
    assert list(plan_pages(100, 7, 7, GEOMETRY)) == []
    assert part_count(7, 7, GEOMETRY) == 0


def test_a_range_over_three_pages() -> None:
    size = 3 * PAGE + 100
    parts = list(plan_pages(size, PAGE - 10, 3 * PAGE + 5, GEOMETRY))
    assert parts == [
        PagePart(0, PAGE, PAGE - 10, PAGE, 0),
        PagePart(1, PAGE, 0, PAGE, 10),
        PagePart(2, PAGE, 0, PAGE, PAGE + 10),
        PagePart(3, 100, 0, 5, 2 * PAGE + 10),
    ]
    assert [part.whole for part in parts] == [False, True, True, False]


def test_an_object_smaller_than_a_page_is_whole_by_its_bytes() -> None:
    """F6: a page is complete when its bytes are, not when it is as long as others."""
    (part,) = plan_pages(100, 0, 100, GEOMETRY)
    assert part.whole
    assert plan_frames(part, FRAME, 4) == ([FrameRun(0, 1, 0, 100)], [])


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 101), (101, 101)])
def test_a_range_outside_is_a_defect_of_the_caller(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not in an object"):
        list(plan_pages(100, start, stop, GEOMETRY))


def test_a_range_in_one_frame_is_one_cut() -> None:
    part = PagePart(0, PAGE, FRAME + 1, FRAME + 3, 0)
    assert plan_frames(part, FRAME, 4) == ([], [FrameCut(1, 1, 3, 0)])
    assert frame_span(part, FRAME) == (1, 2)


def test_cuts_at_both_ends_and_runs_between() -> None:
    part = PagePart(0, PAGE, FRAME - 1, 6 * FRAME + 2, 1000)
    runs, cuts = plan_frames(part, FRAME, 3)
    assert cuts == [FrameCut(0, FRAME - 1, FRAME, 1000), FrameCut(6, 0, 2, 1001 + 5 * FRAME)]
    assert runs == [FrameRun(1, 4, 1001, 3 * FRAME), FrameRun(4, 6, 1001 + 3 * FRAME, 2 * FRAME)]
