"""The arena: one bounded, reused block of memory for sealed frames.

Layer: bottom; safe from any thread. A memfd, mapped once, cut into equal slots of one frame plus
4 KiB: slots stay aligned for O_DIRECT and have room for the tag right behind the ciphertext. A
page takes as many slots as it has frames, wherever they lie, so that nothing fragments. Being a
memfd, it can be shared with a GPU or verbs worker later, which pins it.

Only ciphertext lives here, and it is left out of core dumps all the same.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from racerd.pages import ALIGNMENT_BYTES, TAG_BYTES
from racerd.runtime.memory_map import MemoryMap
from racerd.runtime.populate import PopulateAhead
from racerd.units import MIB, round_up

_FIRST_BYTES = 512 * MIB  # Touched at the start.
_AHEAD_BYTES = 64 * MIB  # Touched before they are used, from then on.


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
        self._taken = bytearray(self.slot_count)  # 1 for a slot that somebody holds.
        self._map: MemoryMap | None = None
        self._view: memoryview | None = None
        self.fd = -1
        self._ahead: PopulateAhead | None = None

    def __enter__(self) -> FrameArena:
        size = self.slot_count * self.slot_bytes
        self.fd = os.memfd_create("racerd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self._map = MemoryMap(self.fd, 0, size)
        except BaseException:
            self._close_descriptor()
            raise
        self._view = self._map.view()
        # Low slots first: memory that was touched once is reused before fresh memory is.
        self._free = list(range(self.slot_count - 1, -1, -1))
        self._ahead = PopulateAhead(
            self._map,
            self.fd,
            ahead_bytes=_AHEAD_BYTES,
            first_bytes=_FIRST_BYTES,
            name="arena",
        ).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._view is not None and self._map is not None and self._ahead is not None
        self._ahead.__exit__(None, None, None)
        self._close_descriptor()
        self._view.release()
        self._map.close()  # BufferError if somebody still holds a frame: a defect worth hearing of.

    def _close_descriptor(self) -> None:
        os.close(self.fd)
        self.fd = -1

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Returns `count` slot numbers, or None if fewer are free."""
        if count < 0:
            raise ValueError(f"{count} slots cannot be taken")
        with self._lock:
            first = len(self._free) - count
            if first < 0:
                return None
            taken = self._free[first:]
            del self._free[first:]
            for slot in taken:
                self._taken[slot] = 1
        if taken and self._ahead is not None:
            self._ahead.need((taken[0] + 1) * self.slot_bytes)
        return taken[::-1]

    def give_back(self, slots: list[int]) -> None:
        """Frees `slots`. The caller's views of them must be dead or never touched again.

        Raises RuntimeError, and frees none, if one is free already or given twice: two pages in
        one slot would destroy each other.
        """
        with self._lock:
            if len(set(slots)) != len(slots) or not all(self._taken[slot] for slot in slots):
                raise RuntimeError("a frame slot was given back twice")
            for slot in slots:
                self._taken[slot] = 0
            self._free.extend(reversed(slots))

    def frame(self, slot: int, length: int) -> memoryview:
        """A writable view of `slot`: room for `length` bytes of ciphertext and the tag."""
        assert self._view is not None
        if not (0 <= slot < self.slot_count and 0 <= length <= self.frame_bytes):
            raise ValueError(f"no frame of {length} bytes in slot {slot}")
        start = slot * self.slot_bytes
        return self._view[start : start + length + TAG_BYTES]
