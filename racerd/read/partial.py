"""Which reads of a page on disk take only the frames they need.

Layer: read; loop thread only, no I/O. A small read of a page that only a disk has reads its frames
and leaves the rest. Once such reads have taken `promote_share` of the page's frames, the next one
takes the whole page into memory: it is being read after all.
"""

from __future__ import annotations

from collections import OrderedDict

from racerd.ids import PageId
from racerd.pages import PageGeometry
from racerd.read.plan import PagePart, frame_span

_PAGES_MAX = 4096


class PartialReads:
    """Frames read so far, of the pages that were read in part lately."""

    def __init__(self, geometry: PageGeometry, promote_share: float) -> None:
        self._geometry = geometry
        self._promote_share = promote_share
        self._frames_read: OrderedDict[PageId, int] = OrderedDict()

    def takes_whole(self, page: PageId, part: PagePart) -> bool:
        """Whether to read the whole page for `part`, which is about to be read and is counted."""
        first, stop = frame_span(part, self._geometry.frame_bytes)
        count = self._geometry.frame_count(part.page_length)
        frames_read = self._frames_read.pop(page, 0) + stop - first
        if stop - first == count or frames_read > count * self._promote_share:
            return True
        self._frames_read[page] = frames_read
        if len(self._frames_read) > _PAGES_MAX:
            self._frames_read.popitem(last=False)
        return False
