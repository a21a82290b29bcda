"""From a byte range to pages, from pages to batches, and from a page's part to frames.

Layer: read, pure. A frame that the range covers whole is opened straight into the destination;
only a frame that the range **cuts** goes through a scratch frame, and there are at most two of them
in a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from racerd.pages import PageGeometry


@dataclass(frozen=True, slots=True)
class PagePart:
    """Bytes [start, stop) of page `index`, and where they go.

    `page_length` is the plaintext length of the page; `offset` counts from the destination's
    start. Never empty.
    """

    index: int
    page_length: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.page_length


@dataclass(frozen=True, slots=True)
class FrameCut:
    """Bytes [start, stop) of frame `frame`, a proper part of it; `offset` as in `PagePart`."""

    frame: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Whole frames [first, stop), back to back into the destination from `offset`."""

    first: int
    stop: int
    offset: int
    length: int


def plan_pages(size: int, start: int, stop: int, geometry: PageGeometry) -> Iterator[PagePart]:
    """Yields the parts of pages that make up bytes [start, stop) of an object of `size` bytes.

    In order, adjoining, covering the range exactly. Raises ValueError for a range outside.
    """
    if not 0 <= start <= stop <= size:
        raise ValueError(f"bytes {start} to {stop} are not in an object of {size}")
    page_bytes = geometry.page_bytes
    for index in range(start // page_bytes, -(-stop // page_bytes) if start < stop else 0):
        yield part_of_page(size, start, stop, index, geometry)


def part_of_page(size: int, start: int, stop: int, index: int, geometry: PageGeometry) -> PagePart:
    """The part of page `index` in bytes [start, stop) of an object of `size`; they must meet."""
    page_start = index * geometry.page_bytes
    begin = max(start, page_start)
    end = min(stop, page_start + geometry.page_bytes)
    return PagePart(
        index=index,
        page_length=geometry.page_length(size, index),
        start=begin - page_start,
        stop=end - page_start,
        offset=begin - start,
    )


def part_count(start: int, stop: int, geometry: PageGeometry) -> int:
    """How many parts `plan_pages` yields."""
    if start == stop:
        return 0
    return (stop - 1) // geometry.page_bytes - start // geometry.page_bytes + 1


def plan_batches(
    parts: Iterable[PagePart], fits: Callable[[PagePart], bool], batch_bytes: int
) -> Iterator[list[PagePart]]:
    """Yields adjoining parts that `fits` says yes to together, and every other part alone.

    In order, each once; no more than `batch_bytes` together. `fits` is asked as parts are come to.
    """
    batch: list[PagePart] = []
    length = 0
    for part in parts:
        fitting = fits(part)
        if batch and not (fitting and length + part.length <= batch_bytes):
            yield batch
            batch, length = [], 0
        if fitting:
            batch.append(part)
            length += part.length
        else:
            yield [part]
    if batch:
        yield batch


def frame_span(part: PagePart, frame_bytes: int) -> tuple[int, int]:
    """The frames [first, stop) that `part` touches."""
    return part.start // frame_bytes, -(-part.stop // frame_bytes)


def plan_frames(
    part: PagePart, frame_bytes: int, run_frames: int
) -> tuple[list[FrameRun], list[FrameCut]]:
    """Splits `part` into runs of at most `run_frames` whole frames, and at most two cuts.

    Together they cover the part exactly, each byte once.
    """
    first, stop = frame_span(part, frame_bytes)
    cuts = []
    for frame in () if part.whole else sorted({first, stop - 1}):
        frame_start = frame * frame_bytes
        frame_stop = min(frame_start + frame_bytes, part.page_length)
        begin, end = max(part.start, frame_start), min(part.stop, frame_stop)
        if end - begin < frame_stop - frame_start:
            offset = part.offset + begin - part.start
            cuts.append(FrameCut(frame, begin - frame_start, end - frame_start, offset))
    cut_frames = {cut.frame for cut in cuts}
    whole_first = first + 1 if first in cut_frames else first
    whole_stop = stop - 1 if stop - 1 in cut_frames else stop
    runs = []
    for at in range(whole_first, whole_stop, run_frames):
        end_frame = min(at + run_frames, whole_stop)
        begin = at * frame_bytes
        length = min(end_frame * frame_bytes, part.page_length) - begin
        runs.append(FrameRun(at, end_frame, part.offset + begin - part.start, length))
    return runs, cuts
