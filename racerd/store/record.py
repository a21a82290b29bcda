"""What a record says about itself: the values that both formats decode to.

Layer: store, pure. A record is a page on a slab with a header that describes it. The header holds
the slab's id, the record's own offset and its segment's generation, so that a record that was
written elsewhere, copied, or left over from an earlier life of its segment is not taken for a live
one. `record_v2` and `record_v1` are the formats, `codec` tells them apart.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from racerd.crc64 import crc64
from racerd.errors import IntegrityError, RacerError
from racerd.ids import ObjectVersion, PageId
from racerd.pages import Seal
from racerd.store.catalog import unpack_identity

RECORD_MAGIC = b"RACERREC"
TOMBSTONE_MAGIC = b"RACERDEL"
FORMAT_V1 = 1
FORMAT_V2 = 2
SECTOR_BYTES = 512
# The longest header that is read: 256 frames and the longest names.
HEADER_BYTES_MAX = 16 * 1024

_CRC_START = 16  # The CRC covers the magic and everything from here on.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands: what its header repeats to prove that it belongs there.

    `offset` is in bytes from the start of the slab.
    """

    slab: bytes
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A verified header. `identity` is `ObjectVersion.packed` of the page's version.

    `page_bytes` and `frame_bytes` are 0 in format v1, which does not record them.
    """

    version: int
    place: Place
    sequence: int
    header_bytes: int
    record_bytes: int
    page_bytes: int
    frame_bytes: int
    identity: bytes
    token: str | None
    page_index: int
    seal: Seal

    def page(self) -> PageId:
        """The page this record says it is. Raises IntegrityError `header_identity`."""
        try:
            object_id, etag, size = unpack_identity(self.identity)
        except (ValueError, RacerError) as error:
            raise IntegrityError("header_identity", f"a record's identity: {error}") from error
        return PageId(ObjectVersion(object_id, etag, size, self.token), self.page_index)

    def is_of(self, page: PageId) -> bool:
        """Whether the full identity is that of `page`."""
        return self.page_index == page.index and self.identity == page.version.packed

    @property
    def data_offset(self) -> int:
        """First byte of the ciphertext, from the start of the slab."""
        return self.place.offset + self.header_bytes


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A record that was dropped; its space is taken until the segment is evicted."""

    place: Place
    record_bytes: int


def lengths_error() -> IntegrityError:
    return IntegrityError(
        "header_lengths", "the lengths in a record's header contradict each other"
    )


def header_crc(block: memoryview) -> int:
    """The CRC of a header, segment header or superblock: all but the field that holds it."""
    return crc64(block[_CRC_START:], crc64(block[:8]))


def stamp_crc(block: memoryview) -> None:
    """Puts `header_crc` into bytes 8 to 16 of `block`."""
    struct.pack_into("<Q", block, 8, header_crc(block))


def check_crc(block: memoryview) -> None:
    """Raises IntegrityError `header_crc` unless `block` carries its own CRC."""
    if struct.unpack_from("<Q", block, 8)[0] != header_crc(block):
        raise IntegrityError("header_crc", "a header on the slab fails its checksum")
