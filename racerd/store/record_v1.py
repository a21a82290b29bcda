"""Records, format v1: read, never written.

Layer: store, pure. A short, unpadded header; the ciphertext right behind it, and one tag right
behind the ciphertext: the whole page is one frame. The ciphertext is not aligned, so such a record
takes the host path only, and is always read as a whole.

    fixed part (120 bytes) | identity | ciphertext | tag | zeros to a block boundary
"""

from __future__ import annotations

import struct

from racerd.errors import IntegrityError
from racerd.pages import PAGE_BYTES_MAX, TAG_BYTES, Seal
from racerd.store.geometry import BLOCK_BYTES
from racerd.store.record import (
    FORMAT_V1,
    HEADER_BYTES_MAX,
    Place,
    RecordHeader,
    check_crc,
    lengths_error,
)
from racerd.units import round_up

FIXED = struct.Struct("<8sQ HH III 16s QQQQQQ 24s")
FIXED_BYTES = FIXED.size


def v1_header_bytes(identity_bytes: int) -> int:
    return FIXED_BYTES + identity_bytes


def v1_record_bytes(identity_bytes: int, length: int) -> int:
    """Slab bytes of a v1 record of `length` plaintext bytes."""
    return round_up(v1_header_bytes(identity_bytes) + length + TAG_BYTES, BLOCK_BYTES)


def decode_v1_untrusted(block: memoryview) -> RecordHeader:
    """Reads the header at the start of `block`. Its seal has no tag yet: see `with_tag`.

    Raises IntegrityError: `header_crc`, `header_lengths`.
    """
    (
        _, _, _, identity_bytes, header_bytes, length, epoch, slab, offset, generation, sequence,
        page_index, cipher_crc, plain_crc, salt,
    ) = FIXED.unpack_from(block)  # fmt: skip
    if (
        header_bytes != v1_header_bytes(identity_bytes)
        or header_bytes > min(len(block), HEADER_BYTES_MAX)
        or not 0 < length <= PAGE_BYTES_MAX
    ):
        raise lengths_error()
    check_crc(block[:header_bytes])
    return RecordHeader(
        FORMAT_V1, Place(slab, offset, generation), sequence, header_bytes,
        v1_record_bytes(identity_bytes, length), 0, 0,
        bytes(block[FIXED_BYTES:header_bytes]), None, page_index,
        Seal(epoch, salt, length, bytes(TAG_BYTES), (cipher_crc,), plain_crc),
    )  # fmt: skip


def with_tag(seal: Seal, tag: bytes) -> Seal:
    """The seal of a v1 record whose tag was read from behind the ciphertext."""
    if seal.frame_count != 1:
        raise IntegrityError("header_lengths", "a v1 record has one frame")
    return Seal(seal.epoch, seal.salt, seal.length, tag, seal.crcs, seal.plain_crc)
