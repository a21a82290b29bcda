"""Where everything lies on a slab.

Layer: store, pure. A slab is

    front (64 KiB) | segment 0 | segment 1 | … | checkpoint A | checkpoint B

The front holds two superblocks, two notes and a probe block. A segment starts with a header of
one block; records follow back to back. All segments have the same size but the last, which takes
what is left, so that the waste is less than one record. Segments lie at the same places whatever
the capacity, so that a slab can grow or shrink and keep its records; the checkpoints move.

Invariant: every offset and length is a multiple of 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.pages import CRC_BYTES, TAG_BYTES, PageGeometry
from racerd.units import GIB, KIB, MIB, format_bytes, round_up

BLOCK_BYTES = 4 * KIB
FRONT_BYTES = 64 * KIB
SUPERBLOCK_OFFSETS = (0, FRONT_BYTES // 2)
PROBE_OFFSET = BLOCK_BYTES
NOTES_OFFSETS = (2 * BLOCK_BYTES, FRONT_BYTES // 2 + 2 * BLOCK_BYTES)
NOTES_BYTES = FRONT_BYTES // 2 - 2 * BLOCK_BYTES

SEGMENT_HEADER_BYTES = BLOCK_BYTES
RECORD_FIXED_BYTES = 128
# A header always has room for the longest cache, bucket and key and an ETag of 256 bytes.
IDENTITY_BYTES_GUARANTEED = 1664

_SEGMENT_BYTES_TARGET = 256 * MIB
_SEGMENT_BYTES_MAX = GIB
_SEGMENTS_MANY = 4096  # Recovery reads the header of each one.
_SEGMENTS_WANTED = 64
_SEGMENTS_FEW = 8
_RECORDS_PER_SEGMENT_WANTED = 16
_RECORDS_PER_SEGMENT_MIN = 4
_SEGMENTS_MIN = 3
_CHECKPOINT_BYTES_PER_RECORD = 192
_CHECKPOINT_BYTES_MIN = 16 * KIB
_CHECKPOINT_SHARE_MAX = 256  # One part in this many of the slab.


def header_bytes(page: PageGeometry) -> int:
    """Bytes of a v2 record's header: the same for every record of a store."""
    per_frame = TAG_BYTES + CRC_BYTES
    used = RECORD_FIXED_BYTES + IDENTITY_BYTES_GUARANTEED + per_frame * page.frames_per_page
    return round_up(used, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """The layout of one slab. Made by `plan`; the superblock keeps what `plan` chose."""

    page: PageGeometry
    capacity_bytes: int
    segment_bytes: int
    checkpoint_bytes: int

    @classmethod
    def plan(
        cls, page: PageGeometry, capacity_bytes: int, *, segment_bytes: int | None = None
    ) -> SlabGeometry:
        """Lays out `capacity_bytes`; an existing slab's `segment_bytes` is kept.

        Raises ValueError if there is no room for three segments.
        """
        capacity = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        record = header_bytes(page) + page.page_bytes
        checkpoint = _checkpoint_bytes(capacity, record)
        room = capacity - FRONT_BYTES - 2 * checkpoint
        if segment_bytes is None:
            segment_bytes = SEGMENT_HEADER_BYTES + record * _records_per_segment(room, record)
        geometry = cls(page, capacity, segment_bytes, checkpoint)
        if geometry.segment_count < _SEGMENTS_MIN:
            least = FRONT_BYTES + 2 * checkpoint + _SEGMENTS_MIN * (SEGMENT_HEADER_BYTES + record)
            raise ValueError(
                f"a slab of {format_bytes(capacity_bytes)} is too small for pages of"
                f" {format_bytes(page.page_bytes)}: give it {format_bytes(least)} or more"
            )
        return geometry

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.page)

    def record_bytes(self, length: int) -> int:
        """Slab bytes of a v2 record of `length` plaintext bytes."""
        return self.header_bytes + round_up(length, BLOCK_BYTES)

    @property
    def full_record_bytes(self) -> int:
        return self.record_bytes(self.page.page_bytes)

    @property
    def segments_stop(self) -> int:
        """End of the last segment's room."""
        return self.capacity_bytes - 2 * self.checkpoint_bytes

    @property
    def segment_count(self) -> int:
        """Segments, a short last one included if it holds at least one full record."""
        whole, rest = divmod(self.segments_stop - FRONT_BYTES, self.segment_bytes)
        return whole + (rest >= SEGMENT_HEADER_BYTES + self.full_record_bytes)

    def segment_offset(self, segment: int) -> int:
        return FRONT_BYTES + segment * self.segment_bytes

    def segment_size(self, segment: int) -> int:
        """Bytes of `segment`; less than `segment_bytes` only for the last."""
        return min(self.segment_bytes, self.segments_stop - self.segment_offset(segment))

    def checkpoint_offset(self, slot: int) -> int:
        """Start of checkpoint area 0 or 1."""
        return self.segments_stop + slot * self.checkpoint_bytes

    def full_records(self) -> int:
        """How many records of full pages the slab holds at most."""
        record = self.full_record_bytes
        return sum(
            (self.segment_size(segment) - SEGMENT_HEADER_BYTES) // record
            for segment in range(self.segment_count)
        )


def _checkpoint_bytes(capacity: int, record: int) -> int:
    wanted = capacity // record * _CHECKPOINT_BYTES_PER_RECORD
    bounded = min(wanted, capacity // _CHECKPOINT_SHARE_MAX)
    return round_up(max(bounded, _CHECKPOINT_BYTES_MIN), BLOCK_BYTES)


def _records_per_segment(room: int, record: int) -> int:
    """About 64 segments of 16 records or more and at most 256 MiB, but never less than 8.

    Slabs beyond a terabyte get larger segments, up to 1 GiB, rather than ever more of them.
    """
    total = max(room, 0) // record
    target = min(max(room // _SEGMENTS_MANY, _SEGMENT_BYTES_TARGET), _SEGMENT_BYTES_MAX)
    largest = max(target // record, _RECORDS_PER_SEGMENT_MIN)
    wanted = min(max(total // _SEGMENTS_WANTED, _RECORDS_PER_SEGMENT_WANTED), largest)
    return max(1, min(wanted, total // _SEGMENTS_FEW))
