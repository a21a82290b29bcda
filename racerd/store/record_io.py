"""Moving records between memory and a device.

Layer: store; blocking. Frames are read straight into the caller's buffers, one vector each, and
written from them; only the part of a last frame that does not fill a block goes through a block of
our own. Whatever comes from the device is checked before it is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from racerd.crc64 import crc64
from racerd.errors import IntegrityError
from racerd.pages import TAG_BYTES, PageGeometry, Seal, SealedPage
from racerd.store.buffers import BufferPool, aligned_buffer, copy
from racerd.store.claims import Dropped, Found, Reservation
from racerd.store.codec import decode_untrusted
from racerd.store.device import BlockDevice
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.record import Place, RecordHeader, Tombstone
from racerd.store.record_v1 import with_tag
from racerd.store.record_v2 import encode_header, encode_tombstone, relocate
from racerd.units import MIB, round_up

_COPY_BYTES = MIB
_POOL_BUFFERS = 8


class RecordIO:
    """Reads and writes records of one slab. Safe from any thread."""

    def __init__(self, device: BlockDevice, slab: bytes, geometry: SlabGeometry) -> None:
        self._device = device
        self._slab = slab
        self._geometry = geometry
        # A header, and the block that holds the end of a last frame.
        self._headers = BufferPool(geometry.header_bytes + BLOCK_BYTES, _POOL_BUFFERS)

    def read(self, found: Found, first: int, frames: Sequence[memoryview]) -> Seal:
        """Fills `frames` with frames `first`… of the record, each followed by its tag.

        Raises IntegrityError if the record is not whole or not of this page: what is in `frames`
        must not be used then. Raises DiskError. Raises ValueError if `frames` do not fit the page.
        """
        lengths = _frame_lengths(found, first, frames, self._geometry.page)
        if found.v1:
            return self._read_v1(found, frames)
        with self._headers.borrow() as buffer:
            header = buffer[: self._geometry.header_bytes]
            tail = buffer[self._geometry.header_bytes :]
            vectors = _vectors(frames, lengths, tail)
            data = found.offset + len(header) + first * self._geometry.page.frame_bytes
            if first == 0:
                self._read_all(found.offset, [header, *vectors])
            else:
                self._read_all(found.offset, [header])
                self._read_all(data, vectors)
            seal = self._verified(header, found).seal
            _finish_tail(frames, lengths, tail)
        for index, (frame, length) in enumerate(zip(frames, lengths, strict=True), first):
            if crc64(frame[:length]) != seal.crcs[index]:
                raise IntegrityError("frame_crc", f"frame {index} of {found.page.text} is damaged")
            frame[length:] = seal.tag(index)
        return seal

    def header(self, found: Found) -> RecordHeader:
        """Reads and checks the header of a v2 record; its frames are neither read nor checked.

        Raises as `read`.
        """
        with self._headers.borrow() as buffer:
            block = buffer[: self._geometry.header_bytes]
            self._read_all(found.offset, [block])
            return self._verified(block, found)

    def _read_all(self, offset: int, vectors: list[memoryview]) -> None:
        wanted = sum(len(vector) for vector in vectors)
        got = self._device.read(offset, vectors)
        if got < wanted:
            raise IntegrityError(
                "short_read", f"the slab ends at {offset + got}, within a record of {wanted} bytes"
            )

    def _verified(self, block: memoryview, found: Found) -> RecordHeader:
        """The header in `block`, if it is of the very page that was looked for."""
        place = Place(self._slab, found.offset, found.generation)
        header = decode_untrusted(block, place)
        if isinstance(header, Tombstone):
            raise IntegrityError("tombstone", f"{found.page.text} was dropped earlier")
        page = self._geometry.page
        sizes = (header.page_bytes, header.frame_bytes)
        if not header.is_of(found.page) or header.seal.length != found.length:
            raise IntegrityError("identity", f"the record of {found.page.text} is of another page")
        if not found.v1 and sizes != (page.page_bytes, page.frame_bytes):
            raise IntegrityError("geometry", f"{found.page.text} was cut with other sizes")
        return header

    def _read_v1(self, found: Found, frames: Sequence[memoryview]) -> Seal:
        """Reads a whole v1 record through a bounce buffer, since its ciphertext is not aligned."""
        bounce = aligned_buffer(found.record_bytes)
        self._read_all(found.offset, [bounce])
        header = self._verified(bounce, found)
        start, stop = header.header_bytes, header.header_bytes + found.length
        cipher = bounce[start:stop]
        if crc64(cipher) != header.seal.crcs[0]:
            raise IntegrityError("frame_crc", f"{found.page.text} is damaged")
        at = 0
        for frame in frames:
            length = len(frame) - TAG_BYTES
            frame[:length] = cipher[at : at + length]
            at += length
        return with_tag(header.seal, bytes(bounce[stop : stop + TAG_BYTES]))

    def write(self, space: Reservation, sealed: SealedPage) -> None:
        """Writes the record of `sealed`. Raises DiskError; IntegrityError `identity_too_long`."""
        page = self._geometry.page
        length = space.length
        lengths = [page.frame_length(length, index) for index in range(len(sealed.frames))]
        with self._headers.borrow() as buffer:
            header = buffer[: self._geometry.header_bytes]
            tail = buffer[self._geometry.header_bytes :]
            encode_header(
                header, sealed.page, sealed.seal, page, place=self._place(space),
                sequence=space.sequence,
            )  # fmt: skip
            vectors = _vectors(sealed.frames, lengths, tail)
            rest = lengths[-1] % BLOCK_BYTES
            if rest:
                copy(tail, sealed.frames[-1][lengths[-1] - rest : lengths[-1]])
            self._device.write(space.offset, [header, *vectors])

    def move(self, found: Found, space: Reservation) -> None:
        """Copies a record to `space`: the ciphertext first, then a header for the new place.

        Raises IntegrityError, DiskError. The frames' CRCs are carried along, so damage shows later.
        """
        with self._headers.borrow() as buffer:
            block = buffer[: self._geometry.header_bytes]
            self._read_all(found.offset, [block])
            header = self._verified(block, found)
            shift = space.offset - found.offset
            bounce = aligned_buffer(min(_COPY_BYTES, found.record_bytes))
            stop = found.offset + found.record_bytes
            for start in range(found.offset + len(block), stop, len(bounce)):
                part = bounce[: min(len(bounce), stop - start)]
                self._read_all(start, [part])
                self._device.write(start + shift, [part])
            relocate(block, header, self._place(space), space.sequence)
            self._device.write(space.offset, [block])

    def bury(self, dropped: Dropped) -> None:
        """Writes a tombstone over a record's header. Raises DiskError."""
        place = Place(self._slab, dropped.offset, dropped.generation)
        with self._headers.borrow() as buffer:
            block = buffer[:BLOCK_BYTES]
            encode_tombstone(block, place, dropped.record_bytes)
            self._device.write(dropped.offset, [block])

    def check(self, found: Found) -> int:
        """Verifies every CRC of a record, without keys. Returns the bytes read.

        Raises IntegrityError, DiskError.
        """
        with self._headers.borrow() as buffer:
            block = buffer[: self._geometry.header_bytes]
            self._read_all(found.offset, [block])
            header = self._verified(block, found)
        page = self._geometry.page
        frame_bytes = found.length if found.v1 else page.frame_bytes
        bounce = aligned_buffer(round_up(frame_bytes, BLOCK_BYTES) + 2 * BLOCK_BYTES)
        for index, crc in enumerate(header.seal.crcs):
            start = header.data_offset + index * frame_bytes
            length = min(frame_bytes, found.length - index * frame_bytes)
            skip = start % BLOCK_BYTES
            part = bounce[: round_up(skip + length, BLOCK_BYTES)]
            self._read_all(start - skip, [part])
            if crc64(part[skip : skip + length]) != crc:
                raise IntegrityError("frame_crc", f"frame {index} of {found.page.text} is damaged")
        return found.record_bytes

    def _place(self, space: Reservation) -> Place:
        return Place(self._slab, space.offset, space.generation)


def _frame_lengths(
    found: Found, first: int, frames: Sequence[memoryview], page: PageGeometry
) -> list[int]:
    """Checks the caller's buffers against the page. Raises ValueError."""
    count = page.frame_count(found.length)
    if first < 0 or not frames or first + len(frames) > count:
        raise ValueError(f"frames {first} to {first + len(frames)} of a page that has {count}")
    lengths = [page.frame_length(found.length, first + at) for at in range(len(frames))]
    for frame, length in zip(frames, lengths, strict=True):
        if len(frame) != length + TAG_BYTES:
            raise ValueError(f"a buffer has {len(frame)} bytes, its frame needs {length} and a tag")
    if found.v1 and len(frames) != count:
        raise ValueError("a v1 record is read as a whole")
    return lengths


def _vectors(
    frames: Sequence[memoryview], lengths: Sequence[int], tail: memoryview
) -> list[memoryview]:
    """Whole blocks of each frame; the rest of the last one, if any, lies in `tail`."""
    vectors = [
        frame[: length // BLOCK_BYTES * BLOCK_BYTES]
        for frame, length in zip(frames, lengths, strict=True)
    ]
    if lengths[-1] % BLOCK_BYTES:
        if not vectors[-1]:
            vectors.pop()
        vectors.append(tail)
    return vectors


def _finish_tail(frames: Sequence[memoryview], lengths: Sequence[int], tail: memoryview) -> None:
    rest = lengths[-1] % BLOCK_BYTES
    if rest:
        frames[-1][lengths[-1] - rest : lengths[-1]] = tail[:rest]
