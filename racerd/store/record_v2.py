"""Records, format v2: how pages are written.

Layer: store, pure: bytes in, values out. `docs/store-format.md` is the specification.

    fixed part (128 bytes) | identity | origin token | tags | CRCs | zeros to header_bytes
    ciphertext, frame after frame | zeros to a block boundary

The ciphertext starts on a block boundary and is exactly as long as the plaintext: O_DIRECT and a
GPU's DMA read it as it lies. A tombstone overwrites the first sector of a header; being one
sector, it cannot tear.

Decoding treats bytes as untrusted and raises IntegrityError, whose code is the reason.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from racerd.errors import IntegrityError
from racerd.ids import PageId
from racerd.pages import CRC_BYTES, FRAMES_PER_PAGE_MAX, SALT_BYTES, TAG_BYTES, PageGeometry, Seal
from racerd.store.buffers import copy
from racerd.store.catalog import NO_TOKEN
from racerd.store.geometry import BLOCK_BYTES, RECORD_FIXED_BYTES
from racerd.store.record import (
    FORMAT_V2,
    HEADER_BYTES_MAX,
    RECORD_MAGIC,
    SECTOR_BYTES,
    TOMBSTONE_MAGIC,
    Place,
    RecordHeader,
    Tombstone,
    check_crc,
    lengths_error,
    stamp_crc,
)
from racerd.units import round_up

_FIXED = struct.Struct("<8sQ HH IIIIII HH 16s QQQQQ 24s")
assert _FIXED.size == RECORD_FIXED_BYTES


def encode_header(
    target: memoryview, page: PageId, seal: Seal, geometry: PageGeometry, *,
    place: Place, sequence: int,
) -> None:  # fmt: skip
    """Writes the header of a v2 record over all of `target`, which is header_bytes long.

    Raises IntegrityError `identity_too_long` if the names do not fit.
    """
    token = page.version.origin_token
    header = RecordHeader(
        FORMAT_V2, place, sequence, len(target),
        len(target) + round_up(seal.length, BLOCK_BYTES),
        geometry.page_bytes, geometry.frame_bytes,
        page.version.packed, token, page.index, seal,
    )  # fmt: skip
    _encode(target, header)


def relocate(target: memoryview, header: RecordHeader, place: Place, sequence: int) -> None:
    """Writes `header` anew for another place; what it says about the page stays."""
    _encode(target, replace(header, place=place, sequence=sequence))


def _encode(target: memoryview, header: RecordHeader) -> None:
    seal, place = header.seal, header.place
    token = b"" if header.token is None else header.token.encode()
    crcs = struct.pack(f"<{seal.frame_count}Q", *seal.crcs)
    body = header.identity + token + seal.tags + crcs
    if len(body) > len(target) - RECORD_FIXED_BYTES:
        raise IntegrityError(
            "identity_too_long",
            f"the names of a page take {len(header.identity) + len(token)} bytes, its header has"
            f" {len(target) - RECORD_FIXED_BYTES - len(seal.tags) - len(crcs)}",
        )
    _FIXED.pack_into(
        target, 0, RECORD_MAGIC, 0, FORMAT_V2, seal.frame_count, header.header_bytes,
        header.record_bytes, seal.length, header.page_bytes, header.frame_bytes, seal.epoch,
        len(header.identity), NO_TOKEN if header.token is None else len(token), place.slab,
        place.offset, place.generation, header.sequence, header.page_index, seal.plain_crc,
        seal.salt,
    )  # fmt: skip
    copy(target[RECORD_FIXED_BYTES:], body)
    stamp_crc(target)


def encode_tombstone(target: memoryview, place: Place, record_bytes: int) -> None:
    """Writes a tombstone over all of `target`, one block; only its first sector matters."""
    copy(target, b"")
    _FIXED.pack_into(
        target, 0, TOMBSTONE_MAGIC, 0, FORMAT_V2, 0, BLOCK_BYTES, record_bytes, 0, 0, 0, 0,
        0, 0, place.slab, place.offset, place.generation, 0, 0, 0, bytes(SALT_BYTES),
    )  # fmt: skip
    stamp_crc(target[:SECTOR_BYTES])


def decode_tombstone_untrusted(block: memoryview) -> Tombstone:
    """Raises IntegrityError: `header_crc`, `header_lengths`."""
    check_crc(block[:SECTOR_BYTES])
    fields = _FIXED.unpack_from(block)
    record_bytes, slab, offset, generation = fields[5], fields[12], fields[13], fields[14]
    if record_bytes == 0 or record_bytes % BLOCK_BYTES:
        raise lengths_error()
    return Tombstone(Place(slab, offset, generation), record_bytes)


def decode_v2_untrusted(block: memoryview) -> RecordHeader:
    """Raises IntegrityError: `header_crc`, `header_lengths`, `header_identity`."""
    (
        _, _, _, frames, header_bytes, record_bytes, length, page_bytes, frame_bytes, epoch,
        identity_bytes, token_bytes, slab, offset, generation, sequence, page_index, plain_crc,
        salt,
    ) = _FIXED.unpack_from(block)  # fmt: skip
    if not RECORD_FIXED_BYTES <= header_bytes <= min(len(block), HEADER_BYTES_MAX):
        raise lengths_error()
    check_crc(block[:header_bytes])
    token_length = 0 if token_bytes == NO_TOKEN else token_bytes
    tags_at = RECORD_FIXED_BYTES + identity_bytes + token_length
    crcs_at = tags_at + TAG_BYTES * frames
    if (
        header_bytes % BLOCK_BYTES
        or record_bytes != header_bytes + round_up(length, BLOCK_BYTES)
        or not 0 < frame_bytes <= page_bytes
        or not 0 < length <= page_bytes
        or frames != -(-length // frame_bytes)
        or frames > FRAMES_PER_PAGE_MAX
        or crcs_at + CRC_BYTES * frames > header_bytes
    ):
        raise lengths_error()
    token = None if token_bytes == NO_TOKEN else _text(block[tags_at - token_length : tags_at])
    return RecordHeader(
        FORMAT_V2, Place(slab, offset, generation), sequence, header_bytes, record_bytes,
        page_bytes, frame_bytes,
        bytes(block[RECORD_FIXED_BYTES : RECORD_FIXED_BYTES + identity_bytes]), token, page_index,
        Seal(
            epoch, salt, length, bytes(block[tags_at:crcs_at]),
            struct.unpack_from(f"<{frames}Q", block, crcs_at), plain_crc,
        ),
    )  # fmt: skip


def _text(part: memoryview) -> str:
    try:
        return str(part, "utf-8")
    except UnicodeDecodeError as error:
        raise IntegrityError("header_identity", "an origin token is not UTF-8") from error
