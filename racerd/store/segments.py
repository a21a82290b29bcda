"""Segments: the unit in which a slab is filled and emptied.

Layer: store, pure; not thread-safe: the engine owns it. A segment's life:

    UNKNOWN ──recovery──▶ FRESH | FREE | OPEN | SEALED
    FRESH ─prepared─▶ FREE ─▶ OPEN ─full─▶ SEALED ─eviction─▶ EMPTIED ─prepared─▶ FREE
    FRESH, EMPTIED ─its header cannot be written─▶ BAD ─prepared later─▶ FREE

`prepared` means that a header with a new generation is on the medium: everything written in
earlier lives is dead from then on, whatever a crash brings back. A pin keeps a segment's bytes as
they are: reads, writes and tombstones in flight hold one, and an emptied segment becomes FREE only
when its last pin is gone.
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import IntEnum

from racerd.store.geometry import SEGMENT_HEADER_BYTES, SlabGeometry


class SegmentState(IntEnum):
    """See the module's diagram. The numbers are written to checkpoints."""

    UNKNOWN = 0
    FRESH = 1
    FREE = 2
    OPEN = 3
    SEALED = 4
    EMPTIED = 5
    BAD = 6


class Segments:
    """State of every segment of a slab. `used` counts bytes from the segment's start."""

    def __init__(self, geometry: SlabGeometry) -> None:
        count = geometry.segment_count
        self._geometry = geometry
        self.states = [SegmentState.UNKNOWN] * count
        self.generations = array("Q", bytes(8 * count))
        self.used = array("Q", bytes(8 * count))
        self.live_bytes = array("Q", bytes(8 * count))
        self.pins = array("L", bytes(array("L").itemsize * count))
        self.free: deque[int] = deque()
        self.fresh: deque[int] = deque()
        self.bad: deque[int] = deque()
        # Sealed segments, the next to be looked at for eviction first.
        self.queue: deque[int] = deque()
        self.open: int | None = None
        self._header_written = bytearray(count)  # While EMPTIED: free as soon as unpinned.

    def __len__(self) -> int:
        return len(self.states)

    @property
    def taking_space(self) -> int:
        """How many segments take space on the medium."""
        return len(self.states) - len(self.fresh)

    def room(self, segment: int) -> int:
        """Bytes left behind the last record."""
        return self._geometry.segment_size(segment) - self.used[segment]

    def in_use(self, segment: int) -> bool:
        """Whether `segment` is being filled or is full."""
        return self.states[segment] in (SegmentState.OPEN, SegmentState.SEALED)

    def append(self, segment: int, size: int) -> int:
        """Takes `size` bytes at the end of `segment`; returns their offset in the slab."""
        offset = self._geometry.segment_offset(segment) + self.used[segment]
        self.used[segment] += size
        return int(offset)

    def open_next(self) -> None:
        """Makes the next free segment the open one."""
        segment = self.free.popleft()
        self.states[segment] = SegmentState.OPEN
        self.open = segment

    def seal_open(self) -> None:
        if self.open is not None:
            self._seal(self.open)
            self.open = None

    def _seal(self, segment: int) -> None:
        self.states[segment] = SegmentState.SEALED
        self.queue.append(segment)

    def empty(self, segment: int) -> None:
        """Takes a sealed segment, whose records are all gone, out of the queue."""
        self.queue.remove(segment)
        self.states[segment] = SegmentState.EMPTIED
        self._header_written[segment] = 0

    def prepared(self, segment: int, generation: int) -> None:
        """A header with `generation` is on the medium."""
        if self.states[segment] is SegmentState.FRESH:
            self.fresh.remove(segment)
        elif self.states[segment] is SegmentState.BAD:
            self.bad.remove(segment)
        self.states[segment] = SegmentState.EMPTIED
        self.generations[segment] = generation
        self.used[segment] = SEGMENT_HEADER_BYTES
        self._header_written[segment] = 1
        self._free_if_unpinned(segment)

    def spoil(self, segment: int) -> None:
        """The header could not be written: the segment is not used until it can be."""
        if self.states[segment] is SegmentState.FRESH:
            self.fresh.remove(segment)
        if self.states[segment] is SegmentState.BAD:
            self.bad.rotate(-1)
            return
        self.states[segment] = SegmentState.BAD
        self.bad.append(segment)

    def give_up(self) -> int:
        """Makes a free segment one that was never used."""
        segment = self.free.pop()
        self.states[segment] = SegmentState.FRESH
        self.fresh.append(segment)
        return segment

    def pin(self, segment: int) -> None:
        self.pins[segment] += 1

    def unpin(self, segment: int) -> None:
        self.pins[segment] -= 1
        self._free_if_unpinned(segment)

    def _free_if_unpinned(self, segment: int) -> None:
        if (
            self.states[segment] is SegmentState.EMPTIED
            and self._header_written[segment]
            and self.pins[segment] == 0
        ):
            self.states[segment] = SegmentState.FREE
            self.free.append(segment)

    def expect(self, segment: int, generation: int) -> None:
        """Records of an UNKNOWN segment are known, and are of this generation."""
        assert self.states[segment] is SegmentState.UNKNOWN
        self.generations[segment] = generation

    def settle(self, segment: int, state: SegmentState, generation: int, used: int) -> None:
        """What recovery found out about an UNKNOWN segment: FRESH, FREE or SEALED."""
        assert self.states[segment] is SegmentState.UNKNOWN
        self.generations[segment] = generation
        self.used[segment] = used
        if state is SegmentState.SEALED:
            self._seal(segment)
            return
        self.states[segment] = state
        (self.fresh if state is SegmentState.FRESH else self.free).append(segment)

    def recovered(self) -> None:
        """Orders the queue by age and goes on filling the youngest segment if it has room.

        A short last segment is used first, so that the last one left to grow into is a whole one.
        """
        self.fresh = deque(sorted(self.fresh, key=self._geometry.segment_size))
        self.queue = deque(sorted(self.queue, key=lambda segment: self.generations[segment]))
        full = self._geometry.full_record_bytes
        if self.open is None and self.queue and self.room(self.queue[-1]) >= full:
            self.open = self.queue.pop()
            self.states[self.open] = SegmentState.OPEN
