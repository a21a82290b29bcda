"""The arena: one bounded, reused block of memory for sealed frames.

Layer: bottom; safe from any thread. A memfd, mapped once, cut into equal slots of one frame plus
4 KiB: slots stay aligned for O_DIRECT and have room for the tag right behind the ciphertext. A
page takes as many slots as it has frames, wherever they lie, so that nothing fragments. Being a
memfd, it can be shared with a GPU or verbs worker later, which pins it.

Only ciphertext lives here, and it is left out of core dumps all the same.
"""

from __future__ import annotations

import mmap
import os
import threading
from types import TracebackType

from racerd.pages import ALIGNMENT_BYTES, TAG_BYTES
from racerd.units import round_up


class FrameArena:
    """`budget_bytes` of frame slots. A hard limit: `take` says no rather than grow."""

    def __init__(self, frame_bytes: int, budget_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.slot_bytes = round_up(frame_bytes, ALIGNMENT_BYTES) + ALIGNMENT_BYTES
        self.slot_count = budget_bytes // self.slot_bytes
        if self.slot_count < 1:
            raise ValueError(f"an arena of {budget_bytes} bytes has no room for one frame")
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self.fd = -1
        self.huge_pages = False

    def __enter__(self) -> FrameArena:
        size = self.slot_count * self.slot_bytes
        self.fd = os.memfd_create("racerd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.huge_pages = self._ask_for_huge_pages(self._map)
        self._view = memoryview(self._map)
        # Low slots first: memory that was touched once is reused before fresh memory is.
        self._free = list(range(self.slot_count - 1, -1, -1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._view is not None and self._map is not None
        self._view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    @staticmethod
    def _ask_for_huge_pages(mapping: mmap.mmap) -> bool:
        """Returns whether the kernel took the advice; without it the arena is only slower."""
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return True

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Returns `count` slot numbers, or None if fewer are free."""
        with self._lock:
            if count > len(self._free):
                return None
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        return taken[::-1]

    def give_back(self, slots: list[int]) -> None:
        """Frees `slots`. The caller's views of them must be dead or never touched again."""
        with self._lock:
            self._free.extend(reversed(slots))

    def frame(self, slot: int, length: int) -> memoryview:
        """A writable view of `slot`: room for `length` bytes of ciphertext and the tag."""
        assert self._view is not None
        start = slot * self.slot_bytes
        return self._view[start : start + length + TAG_BYTES]
