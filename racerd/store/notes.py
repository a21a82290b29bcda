"""Notes: the little that a slab must remember even if all of its checkpoints are lost.

Layer: store, pure. Pins name what eviction spares. Fences name what was dropped while recovery had
not seen every record yet: what it still finds of that must not come back. Both are selectors. Two
copies alternate by sequence, each with its own checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from racerd.errors import IntegrityError
from racerd.ids import ObjectId
from racerd.store.geometry import NOTES_BYTES
from racerd.store.record import FORMAT_V2, check_crc, stamp_crc

NOTES_MAGIC = b"RACERNTS"

_HEADER = struct.Struct("<8sQ HH I 16s QQ HH")
_EXACT = 1


@dataclass(frozen=True, slots=True)
class Selector:
    """Objects by name: the one called `key`, or every one whose key starts with it."""

    cache: str
    bucket: str
    key: bytes
    exact: bool

    def matches(self, object_id: ObjectId) -> bool:
        if (object_id.cache, object_id.bucket) != (self.cache, self.bucket):
            return False
        return object_id.key == self.key if self.exact else object_id.key.startswith(self.key)

    def packed(self) -> bytes:
        parts = (self.cache.encode(), self.bucket.encode(), self.key)
        flags = _EXACT if self.exact else 0
        return bytes([flags]) + b"".join(len(part).to_bytes(2, "little") + part for part in parts)


@dataclass(frozen=True, slots=True)
class Notes:
    """`sequence` counts writes to this slab; `pins_version` changes of the pins, on all slabs."""

    sequence: int = 0
    pins_version: int = 0
    pins: tuple[Selector, ...] = ()
    fences: tuple[Selector, ...] = field(default=())

    def pinned(self, object_id: ObjectId) -> bool:
        return any(pin.matches(object_id) for pin in self.pins)

    def fenced(self, object_id: ObjectId) -> bool:
        return any(fence.matches(object_id) for fence in self.fences)

    @property
    def fits(self) -> bool:
        """Whether the notes have room on a slab."""
        return _HEADER.size + len(_packed(self.pins) + _packed(self.fences)) <= NOTES_BYTES

    @property
    def slot(self) -> int:
        """Which of the two places these notes are written to."""
        return self.sequence % 2

    def encode(self, target: memoryview, slab: bytes) -> None:
        """Writes the notes over `target`, NOTES_BYTES long. They must fit."""
        body = _packed(self.pins) + _packed(self.fences)
        target[:] = bytes(len(target))
        _HEADER.pack_into(
            target, 0, NOTES_MAGIC, 0, FORMAT_V2, 0, len(body), slab, self.sequence,
            self.pins_version, len(self.pins), len(self.fences),
        )  # fmt: skip
        target[_HEADER.size : _HEADER.size + len(body)] = body
        stamp_crc(target)


def _packed(selectors: Iterable[Selector]) -> bytes:
    return b"".join(selector.packed() for selector in selectors)


def decode_notes_untrusted(block: memoryview, slab: bytes) -> Notes:
    """Raises IntegrityError if there are no whole notes of this slab in `block`."""
    magic, _, version, _, _, owner, sequence, pins_version, pins, fences = _HEADER.unpack_from(
        block
    )
    if magic != NOTES_MAGIC or version != FORMAT_V2 or owner != slab:
        raise IntegrityError("notes_magic", "there are no notes of this slab")
    check_crc(block)
    try:
        found = _unpack(bytes(block[_HEADER.size :]), pins + fences)
    except (UnicodeDecodeError, IndexError) as error:
        raise IntegrityError("notes_lengths", "notes on the slab contradict themselves") from error
    return Notes(sequence, pins_version, tuple(found[:pins]), tuple(found[pins:]))


def _unpack(body: bytes, count: int) -> list[Selector]:
    found, at = [], 0
    for _ in range(count):
        exact = bool(body[at] & _EXACT)
        at += 1
        parts = []
        for _ in range(3):
            length = int.from_bytes(body[at : at + 2], "little")
            parts.append(body[at + 2 : at + 2 + length])
            at += 2 + length
        cache, bucket, key = parts
        found.append(Selector(cache.decode(), bucket.decode(), key, exact))
    return found
