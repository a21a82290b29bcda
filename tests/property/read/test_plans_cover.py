"""Plans cover a range exactly, whatever the geometry."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from racerd.pages import PageGeometry
from racerd.read.plan import (
    FrameCut,
    PagePart,
    frame_span,
    part_count,
    plan_batches,
    plan_frames,
    plan_pages,
)
from racerd.units import KIB


@st.composite
def ranges(draw: st.DrawFn) -> tuple[PageGeometry, int, int, int]:
    geometry = PageGeometry(64 * KIB, draw(st.sampled_from([4, 16, 64])) * KIB)
    size = draw(st.integers(0, 5 * geometry.page_bytes + 17))
    start = draw(st.integers(0, size))
    return geometry, size, start, draw(st.integers(start, size))


@given(ranges(), st.integers(1, 20))
def test_every_byte_comes_once(drawn: tuple[PageGeometry, int, int, int], run_frames: int) -> None:
    """R1, F46: pages, runs and cuts put each byte of the range to its place, once, in bounds."""
    geometry, size, start, stop = drawn
    covered = bytearray(stop - start)
    parts = list(plan_pages(size, start, stop, geometry))
    assert len(parts) == part_count(start, stop, geometry)
    for part in parts:
        assert part.page_length == geometry.page_length(size, part.index)
        runs, cuts = plan_frames(part, geometry.frame_bytes, run_frames)
        assert len(cuts) <= 2 and all(run.stop - run.first <= run_frames for run in runs)
        first, last = frame_span(part, geometry.frame_bytes)
        for piece in [*runs, *cuts]:
            if isinstance(piece, FrameCut):
                frame, length, within = piece.frame, piece.stop - piece.start, piece.start
                whole = geometry.frame_length(part.page_length, frame)
                assert 0 < length < whole, "a whole frame is no cut"
            else:
                frame, length, within = piece.first, piece.length, 0
                assert first <= piece.first < piece.stop <= last
            # Where the piece lies in the object must be where its offset puts it.
            at = part.index * geometry.page_bytes + frame * geometry.frame_bytes + within
            assert at == start + piece.offset
            for byte in range(piece.offset, piece.offset + length, 499):
                covered[byte] += 1
            covered[piece.offset + length - 1] |= 0x80
    assert sum(piece_lengths(parts, geometry, run_frames)) == stop - start
    assert all(mark & 0x7F <= 1 for mark in covered)


def piece_lengths(parts, geometry, run_frames):  # type: ignore[no-untyped-def]
    for part in parts:
        runs, cuts = plan_frames(part, geometry.frame_bytes, run_frames)
        yield from (run.length for run in runs)
        yield from (cut.stop - cut.start for cut in cuts)


@given(ranges(), st.sets(st.integers(0, 5)), st.integers(1, 4))
def test_batches_are_the_parts_in_order(
    drawn: tuple[PageGeometry, int, int, int], fitting: set[int], batch_pages: int
) -> None:
    """R1: each part once and in order; together only what fits, as much as may be and no more."""
    geometry, size, start, stop = drawn
    parts = list(plan_pages(size, start, stop, geometry))
    batch_bytes = batch_pages * geometry.page_bytes
    batches = list(plan_batches(iter(parts), lambda part: part.index in fitting, batch_bytes))
    assert [part for batch in batches for part in batch] == parts

    def allowed(batch: list[PagePart]) -> bool:
        fits = all(part.index in fitting for part in batch)
        return fits and sum(part.length for part in batch) <= batch_bytes

    assert all(len(batch) == 1 or allowed(batch) for batch in batches)
    for batch, following in pairwise(batches):
        assert not allowed([*batch, following[0]])
