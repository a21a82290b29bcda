"""Rooms: memory for the plaintext of whole pages, reused while pages keep coming.

Layer: read; loop thread only, the bytes themselves are written by `origin` threads. The first touch
of fresh memory costs more than receiving into it, so a room goes from page to page. It is private,
left out of core dumps, and covered by the charge of the page that is in it. When the last page is
gone every room is unmapped: no plaintext stays behind, and an idle daemon holds none of it.
"""

from __future__ import annotations

import contextlib
import mmap

from racerd.units import KIB

_ROOM_BYTES_MIN = 256 * KIB  # Smaller pages are not worth it.


class Rooms:
    """The rooms of the node. Their number is bounded by the plaintext budget."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._idle: list[mmap.mmap] = []
        self.taken = 0

    def take(self) -> mmap.mmap | None:
        """Room for a page, or None where pages are so small that it would not pay."""
        if self._page_bytes < _ROOM_BYTES_MIN:
            return None
        self.taken += 1
        return self._idle.pop() if self._idle else self._fresh()

    def give_back(self, room: mmap.mmap | None) -> None:
        """Nobody touches `room` any more."""
        if room is None:
            return
        self.taken -= 1
        self._idle.append(room)
        if not self.taken:
            self._idle.clear()  # Unmaps each as soon as the last view of it is gone.

    def _fresh(self) -> mmap.mmap:
        room = mmap.mmap(-1, self._page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_DONTDUMP)
        with contextlib.suppress(OSError):  # A kernel without huge pages.
            room.madvise(mmap.MADV_HUGEPAGE)
        return room
