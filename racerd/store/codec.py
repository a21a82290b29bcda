"""Tells what stands at a place of a slab, of any known format.

Layer: store, pure. Bytes are untrusted; a refusal is an IntegrityError whose code is the reason.
"""

from __future__ import annotations

import struct

from racerd.errors import IntegrityError
from racerd.store.record import (
    FORMAT_V1,
    FORMAT_V2,
    RECORD_MAGIC,
    TOMBSTONE_MAGIC,
    Place,
    RecordHeader,
    Tombstone,
)
from racerd.store.record_v1 import decode_v1_untrusted
from racerd.store.record_v2 import decode_tombstone_untrusted, decode_v2_untrusted

_PREFIX = struct.Struct("<8sQ H")


def decode_untrusted(block: memoryview, place: Place) -> RecordHeader | Tombstone:
    """Returns what stands at `place`, of any known format; `block` starts there.

    `block` may be longer than the header. `place.generation` is compared too.
    Raises IntegrityError: `header_magic`, `header_version`, `header_crc`, `header_lengths`,
    `header_place`.
    """
    header = peek_untrusted(block, place.slab, place.offset)
    if header.place.generation != place.generation:
        raise IntegrityError(
            "header_place",
            f"the record at {place.offset} is of generation {header.place.generation},"
            f" its segment of {place.generation}",
        )
    return header


def peek_untrusted(block: memoryview, slab: bytes, offset: int) -> RecordHeader | Tombstone:
    """As `decode_untrusted`, for a record of any generation."""
    magic, _, version = _PREFIX.unpack_from(block)
    if magic == TOMBSTONE_MAGIC:
        found: RecordHeader | Tombstone = decode_tombstone_untrusted(block)
    elif magic != RECORD_MAGIC:
        raise IntegrityError("header_magic", f"no record starts at offset {offset}")
    elif version == FORMAT_V2:
        found = decode_v2_untrusted(block)
    elif version == FORMAT_V1:
        found = decode_v1_untrusted(block)
    else:
        raise IntegrityError(
            "header_version", f"the record at {offset} has format {version}, known are 1 and 2"
        )
    if found.place.slab != slab or found.place.offset != offset:
        raise IntegrityError(
            "header_place", f"the record at {offset} says it belongs at {found.place.offset}"
        )
    return found
