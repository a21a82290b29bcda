"""Superblocks and segment headers: what a slab says about itself.

Layer: store, pure. Each fits one sector, so that a crash leaves the old one or the new one. There
are two superblocks, far apart; the valid one with the higher sequence counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from racerd.errors import IntegrityError
from racerd.pages import PageGeometry
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.record import FORMAT_V1, FORMAT_V2, SECTOR_BYTES, check_crc, stamp_crc

SUPERBLOCK_MAGIC = b"RACERSLB"
SEGMENT_MAGIC = b"RACERSEG"

_SUPERBLOCK = struct.Struct("<8sQ HH I 16s QQQQ II")
_SEGMENT = struct.Struct("<8sQ HH I 16s QQ")
_PREFIX = struct.Struct("<8sQ H")


@dataclass(frozen=True, slots=True)
class Superblock:
    """`version` is the newest record format in the slab; `slab` 16 random bytes."""

    version: int
    slab: bytes
    sequence: int
    geometry: SlabGeometry

    def encode(self, target: memoryview) -> None:
        """Writes a superblock of format v2 over `target`, one block."""
        geometry = self.geometry
        target[:] = bytes(len(target))
        _SUPERBLOCK.pack_into(
            target, 0, SUPERBLOCK_MAGIC, 0, FORMAT_V2, 0, BLOCK_BYTES, self.slab, self.sequence,
            geometry.capacity_bytes, geometry.segment_bytes, geometry.checkpoint_bytes,
            geometry.page.page_bytes, geometry.page.frame_bytes,
        )  # fmt: skip
        stamp_crc(target[:SECTOR_BYTES])


def decode_superblock_untrusted(block: memoryview) -> Superblock:
    """Raises IntegrityError: `slab_empty`, `slab_foreign`, `slab_version`, `slab_damaged`."""
    magic, _, version = _PREFIX.unpack_from(block)
    if magic != SUPERBLOCK_MAGIC:
        if block == bytes(len(block)):
            raise IntegrityError("slab_empty", "the superblock is all zeros")
        raise IntegrityError("slab_foreign", "the slab holds something that racerd did not write")
    if version > FORMAT_V2:
        raise IntegrityError("slab_version", f"the slab has format {version}")
    try:
        check_crc(block[:SECTOR_BYTES])
        fields = _SUPERBLOCK.unpack_from(block)
        slab, sequence, capacity, segment, checkpoint, page, frame = fields[5:12]
        geometry = SlabGeometry(PageGeometry(page, frame), capacity, segment, checkpoint)
    except (IntegrityError, ValueError) as error:
        raise IntegrityError("slab_damaged", f"a superblock is damaged: {error}") from error
    if version < FORMAT_V1 or segment == 0:
        raise IntegrityError("slab_damaged", f"a superblock has format {version}")
    return Superblock(version, slab, sequence, geometry)


def is_whole(block: memoryview) -> bool:
    """Whether a superblock of any version has its checksum, which is at the same place in all."""
    try:
        check_crc(block[:SECTOR_BYTES])
    except IntegrityError:
        return False
    return True


def encode_segment_header(
    target: memoryview, *, slab: bytes, segment: int, generation: int, offset: int
) -> None:
    """Starts a life of a segment: records of other generations in it are dead from now on."""
    target[:] = bytes(len(target))
    _SEGMENT.pack_into(
        target, 0, SEGMENT_MAGIC, 0, FORMAT_V2, 0, segment, slab, generation, offset
    )  # fmt: skip
    stamp_crc(target[:SECTOR_BYTES])


def decode_segment_header_untrusted(
    block: memoryview, *, slab: bytes, segment: int, offset: int
) -> int:
    """Returns the segment's generation. Raises IntegrityError if the header is not this one's."""
    magic, _, _, _, number, owner, generation, at = _SEGMENT.unpack_from(block)
    if magic != SEGMENT_MAGIC:
        raise IntegrityError("segment_magic", f"segment {segment} has no header")
    check_crc(block[:SECTOR_BYTES])
    if (number, owner, at) != (segment, slab, offset):
        raise IntegrityError("segment_place", f"segment {segment} has the header of another")
    return int(generation)
