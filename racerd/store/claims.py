"""Claims on segments: the values that an engine and its driver hand each other.

Layer: store, pure. What names a record (`Found`, `Reservation`, `Dropped`, and the records of a
`Victim`) pins its segment, so that nothing else comes to lie there, from the engine's call that
gave it to the one that takes it back. `Prepare`, `Evict` and `Refused` say what has to be done
before there is a place for a record, or that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from racerd.ids import PageId


@dataclass(frozen=True, slots=True)
class Found:
    """A record, pinned for reading until `end_read`. `offset` is in the slab.

    `proven`: its header was seen, or written, since the slab was opened.
    """

    page: PageId
    segment: int
    offset: int
    generation: int
    length: int
    record_bytes: int
    v1: bool
    proven: bool


@dataclass(slots=True, eq=False)
class Reservation:
    """Space for one record, charged and pinned until `commit` or `abort`."""

    page: PageId
    segment: int
    offset: int
    generation: int
    sequence: int
    length: int
    record_bytes: int
    moves: Found | None = None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record that left the index. Its segment is pinned until `tombstone_done`."""

    segment: int
    offset: int
    generation: int
    record_bytes: int

    @classmethod
    def of(cls, record: Reservation) -> Dropped:
        """A record that was, or may have been, written and is not wanted: its pin goes on."""
        return cls(record.segment, record.offset, record.generation, record.record_bytes)


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to be evicted and the records in it that are worth a copy, pinned each."""

    segment: int
    moves: list[Found] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prepare:
    """Write a header of `generation` to `segment`, then call `prepared` or `not_prepared`.

    `allocate`: the segment was never used; the medium must be asked for its space first.
    """

    segment: int
    generation: int
    allocate: bool


class Evict:
    """Call `next_victim`, copy what it says, call `evicted`, then ask again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no place, and nothing that could be done for one. `reason` goes into metrics."""

    reason: str
