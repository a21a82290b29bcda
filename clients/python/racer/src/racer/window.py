"""One stretch of address space, filled piece by piece from different places.

Layer: bottom. A tensor whose bytes lie in several pieces of shared memory can still be one array: a
window reserves room for all of them, and each piece is mapped to its place. Nothing is copied.

What is mapped from shared memory is mapped **privately**: whoever writes to it gets pages of its
own, copied at that moment, and nobody else sees a change. (A read-only mapping would end the
process of whoever writes to a tensor in place.)

Lifetime: the address space belongs to the views. It goes when the window and the last view of it
are gone, and never earlier.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading

from racer.address_space import (
    HUGE_PAGE_BYTES,
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    Reservation,
    advise,
    forbid,
    last_errno,
    map_over,
)
from racer.errors import MemoryUnavailable

_PAGE_BYTES = mmap.PAGESIZE

# Windows from this size on are mapped by whole huge pages at their ends, too. Smaller ones would
# count for much more resident memory than they are.
_WIDENED_BYTES_MIN = 4 * HUGE_PAGE_BYTES

# An eighth of the mappings that a process may have by default: a window takes two, and one for each
# piece that is mapped into it.
WINDOWS_MAX = 8192


# Each space refers to this: its references tell how many there are. The kernel limits a process's
# mappings, and each space takes some. Counted by anything that runs when a space goes, an interrupt
# in there would leave the count wrong for ever.
_mark = object()
_MARK_REFERENCES = sys.getrefcount(_mark)


def windows_count() -> int:
    """How many windows this process has, or views of them."""
    return sys.getrefcount(_mark) - _MARK_REFERENCES


class _Space(Reservation):
    """The reservation of a window; counted."""

    def __init__(self, nbytes: int) -> None:
        """Raises MemoryUnavailable."""
        self._mark = _mark
        if windows_count() > WINDOWS_MAX:
            raise MemoryUnavailable(
                f"{WINDOWS_MAX:,} windows are open in this process",
                hint="use memory without them; each takes mappings (vm.max_map_count)",
            )
        try:
            super().__init__(nbytes)
        except (OSError, OverflowError) as error:
            raise _unavailable(nbytes, getattr(error, "errno", None)) from error
        forbid(self.address, nbytes)


class Window:
    """Room for bytes [start, stop) of an object; both count from the object's beginning.

    Safe from any thread, as long as each part is put there once, and read only afterwards.
    """

    def __init__(self, start: int, stop: int) -> None:
        """Raises MemoryUnavailable where there are no addresses left."""
        self.start = start
        self.stop = stop
        # Only addresses that agree with offsets to 2 MiB can be mapped a huge page at a time.
        self._origin = start - start % HUGE_PAGE_BYTES
        nbytes = _round_up(stop - self._origin, HUGE_PAGE_BYTES)
        self._space = _Space(nbytes + HUGE_PAGE_BYTES)
        self._base = _round_up(self._space.address, HUGE_PAGE_BYTES)
        self._private = _Ranges()
        self._lock = threading.Lock()

    def view(self) -> memoryview:
        """All of it, writable. Reading a part that was not put there yet ends the process."""
        kind = ctypes.c_char * (self.stop - self.start)
        array = kind.from_address(self._address_of(self.start))
        array.space = self._space  # type: ignore[attr-defined]  # A view keeps it alive.
        return memoryview(array).cast("B")

    def map_shared(self, descriptor: int, origin: int, start: int, stop: int) -> None:
        """Maps what this has in common with [start, stop); `origin` lies at offset 0 of the memory.

        `origin` and `start` are multiples of the page size, and so is `stop`, or it is the end of
        what the memory holds. Raises MemoryUnavailable.
        """
        begin, end = self._pages(start, stop)
        if begin >= end:
            return
        begin, end = self._widened(begin, end, descriptor, origin)
        self._map(begin, end, mmap.MAP_PRIVATE, descriptor, begin - origin)
        # Puts the pages into our table at once, without copying any. A kernel before 5.14 does it
        # page by page, when they are read.
        advise(self._address_of(begin), end - begin, MADV_POPULATE_READ)

    def make_private(self, start: int, stop: int) -> None:
        """Puts zeroed memory of this process's own where [start, stop) lies. Once for each byte.

        `start` and `stop` are as for `map_shared`.
        """
        begin, end = self._pages(start, stop)
        with self._lock:
            for gap_start, gap_stop in self._private.missing(begin, end):
                self._map(gap_start, gap_stop, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
                # First touch is what loading waits for; a kernel without huge pages says EINVAL.
                advise(self._address_of(gap_start), gap_stop - gap_start, MADV_HUGEPAGE)
                self._private.add(gap_start, gap_stop)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        """The whole pages of this window that [start, stop) touches."""
        begin, end = max(start, self.start), min(stop, self.stop)
        return begin - begin % _PAGE_BYTES, _round_up(end, _PAGE_BYTES)

    def _widened(self, begin: int, end: int, descriptor: int, origin: int) -> tuple[int, int]:
        """[begin, end), and at the ends of the window what lies beside it in the same huge page.

        One entry of the page table does for all of the page then. What is mapped too much lies
        outside of the window, and is of memory that could be mapped anyway.
        """
        first, last = self._pages(self.start, self.stop)
        if last - first < _WIDENED_BYTES_MIN:
            return begin, end
        if begin == first:
            begin = max(self._origin, origin)
        if end == last:
            there = origin + os.fstat(descriptor).st_size // _PAGE_BYTES * _PAGE_BYTES
            end = max(end, min(_round_up(end, HUGE_PAGE_BYTES), there))
        return begin, end

    def _map(self, begin: int, end: int, flags: int, descriptor: int, offset: int) -> None:
        if not map_over(self._address_of(begin), end - begin, flags, descriptor, offset):
            # The kernel may have left a hole, where another thread's memory may lie by now: the
            # addresses are not ours to give back any more.
            self._space.leave()
            raise _unavailable(end - begin, last_errno())

    def _address_of(self, position: int) -> int:
        return self._base + position - self._origin


class _Ranges:
    """Disjoint ranges that were added. Few: linear is enough."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Adds [start, stop), of which nothing was added before."""
        self._ranges.append((start, stop))

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) was not added yet."""
        gaps = [(start, stop)] if start < stop else []
        for old_start, old_stop in self._ranges:
            left = []
            for begin, end in gaps:
                if begin < min(end, old_start):
                    left.append((begin, min(end, old_start)))
                if max(begin, old_stop) < end:
                    left.append((max(begin, old_stop), end))
            gaps = left
        return gaps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _unavailable(nbytes: int, number: int | None) -> MemoryUnavailable:
    number = number or errno.ENOMEM
    return MemoryUnavailable(
        f"the system does not map {nbytes:,} bytes: {os.strerror(number)}",
        hint="check vm.max_map_count, the memory limit and the address-space limit (ulimit -v)",
    )
