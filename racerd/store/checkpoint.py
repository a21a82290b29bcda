"""Checkpoints: the index as one block of bytes, so that a restart does not read every header.

Layer: store; encoding and decoding are pure, `write_checkpoint` and `read_checkpoint` do the I/O.
Two areas alternate. The payload is written and flushed before the header that makes it valid, so
that a crash leaves the other one. A checkpoint is a hint: a segment whose header on the medium has
another generation is scanned instead, every record proves its identity when it is read, and a
slab without any checkpoint is recovered from its records.

What does not fit is left out, whole segments at a time, oldest first; those are scanned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from racerd.crc64 import crc64
from racerd.errors import IntegrityError
from racerd.store.buffers import aligned_buffer
from racerd.store.catalog import NO_TOKEN
from racerd.store.columns import Array
from racerd.store.device import BlockDevice
from racerd.store.engine import Engine
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.index import UNPROVEN
from racerd.store.record import FORMAT_V2, SECTOR_BYTES, check_crc, stamp_crc
from racerd.store.segments import SegmentState
from racerd.units import round_up

CHECKPOINT_MAGIC = b"RACERCKP"

_HEADER = struct.Struct("<8sQ HH I 16s QQQ QQ IIIII")
_SEGMENT_COLUMNS = {"generation": "<u8", "used": "<u4", "state": "<u1"}  # `used` in blocks.
_VERSION_COLUMNS = {
    "digest0": "<u8", "digest1": "<u8", "object0": "<u8", "object1": "<u8", "start": "<u8",
    "identity": "<u2", "token": "<u2", "cache": "<u2", "pinned": "<u1",
}  # fmt: skip
_PAGE_COLUMNS = {
    "version": "<u4", "page": "<u4", "segment": "<u4", "block": "<u4", "length": "<u4",
    "flags": "<u1", "hits": "<u1",
}  # fmt: skip


def _row_bytes(columns: dict[str, str]) -> int:
    return sum(np.dtype(kind).itemsize for kind in columns.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of one. Columns as in `Segments`, `Catalog` and `PageIndex`."""

    sequence: int
    next_sequence: int
    next_generation: int
    segments: dict[str, Array]
    versions: dict[str, Array]
    pages: dict[str, Array]
    names: bytes
    caches: list[str]

    @property
    def segment_count(self) -> int:
        return len(self.segments["state"])


@dataclass(frozen=True, slots=True)
class Frozen:
    """Copies of an engine's tables, taken while it stands still for a moment."""

    next_sequence: int
    next_generation: int
    checkpoint_bytes: int
    segments: dict[str, Array]
    versions: dict[str, Array]
    pages: dict[str, Array]
    names: bytes
    caches: list[str]


def freeze(engine: Engine) -> Frozen:
    """Copies what the engine knows: a millisecond or two, with the driver's lock held."""
    used = np.array(engine.segments.used, dtype=np.uint64)
    state = np.array(engine.segments.states, dtype=np.uint8)
    for segment, offset in engine.unwritten().items():
        # What is being written now may be there after a crash: recovery has to look.
        state[segment] = min(state[segment], int(SegmentState.OPEN))
        used[segment] = offset
    catalog, pages = engine.index.catalog, engine.index.table
    return Frozen(
        engine.next_sequence,
        engine.next_generation,
        engine.geometry.checkpoint_bytes,
        {
            "generation": np.array(engine.segments.generations, dtype=np.uint64),
            "used": used // BLOCK_BYTES,
            "state": state,
        },
        {
            name: catalog.table.arrays[name][: catalog.table.used].copy()
            for name in _VERSION_COLUMNS
        },
        {name: pages.arrays[name][: pages.used].copy() for name in _PAGE_COLUMNS},
        bytes(catalog.names),
        list(catalog.caches),
    )


def compose(frozen: Frozen, sequence: int) -> Checkpoint:
    """Makes a checkpoint of it, with no lock held."""
    chosen, rows = _what_fits(frozen)
    segments = dict(frozen.segments)
    segments["state"] = np.where(chosen, segments["state"], int(SegmentState.UNKNOWN))
    pages = {name: frozen.pages[name][rows] for name in _PAGE_COLUMNS}
    pages["flags"] &= ~np.uint8(UNPROVEN)
    versions, pages["version"] = np.unique(pages["version"], return_inverse=True)
    columns = {name: frozen.versions[name][versions] for name in _VERSION_COLUMNS}
    everything = len(versions) == np.count_nonzero(frozen.versions["identity"])
    names = frozen.names if everything else _names_of(frozen.names, columns)
    return Checkpoint(
        sequence, frozen.next_sequence, frozen.next_generation, segments, columns, pages, names,
        frozen.caches,
    )  # fmt: skip


def _token_bytes(columns: dict[str, Array]) -> Array:
    return np.where(columns["token"] == NO_TOKEN, 0, columns["token"]).astype(np.uint64)


def _names_of(names: bytes, columns: dict[str, Array]) -> bytes:
    """The names of the versions in `columns` only, whose starts are made to fit."""
    stops = columns["start"] + columns["identity"] + _token_bytes(columns)
    spans = zip(columns["start"].tolist(), stops.tolist(), strict=True)
    kept = b"".join(names[start:stop] for start, stop in spans)
    lengths = stops - columns["start"]
    columns["start"] = np.cumsum(lengths) - lengths
    return kept


def _what_fits(frozen: Frozen) -> tuple[Array, Array]:
    """Which segments go into the checkpoint, youngest first, and the rows of their pages."""
    generations, pages = frozen.segments["generation"], frozen.pages
    count = len(generations)
    area = frozen.checkpoint_bytes - BLOCK_BYTES - count * _row_bytes(_SEGMENT_COLUMNS)
    area -= sum(len(cache.encode()) + 4 for cache in frozen.caches)
    rank = np.empty(count, dtype=np.int64)  # 0 is the youngest segment.
    rank[np.argsort(generations)[::-1]] = np.arange(count)
    rows = np.flatnonzero(pages["flags"])
    ranks = rank[pages["segment"][rows]]
    order = np.argsort(ranks, kind="stable")
    rows, ranks = rows[order], ranks[order]
    cost = np.full(len(rows), _row_bytes(_PAGE_COLUMNS))
    seen, first = np.unique(pages["version"][rows], return_index=True)
    names = frozen.versions["identity"].astype(np.int64) + _token_bytes(frozen.versions).astype(int)
    cost[first] += _row_bytes(_VERSION_COLUMNS) + names[seen]
    over = np.cumsum(cost) > area
    limit = int(ranks[np.argmax(over)]) if over.any() else count
    if area < 0:
        limit = 0
    return rank < limit, rows[ranks < limit]


def encode(checkpoint: Checkpoint, slab: bytes) -> memoryview:
    """The bytes of a checkpoint: a header block and the payload, in aligned memory."""
    caches = b"".join(len(name).to_bytes(4, "little") + name.encode() for name in checkpoint.caches)
    parts = [
        np.ascontiguousarray(table[name], dtype=kind).tobytes()
        for table, columns in (
            (checkpoint.segments, _SEGMENT_COLUMNS),
            (checkpoint.versions, _VERSION_COLUMNS),
            (checkpoint.pages, _PAGE_COLUMNS),
        )
        for name, kind in columns.items()
    ]
    payload = b"".join((*parts, checkpoint.names, caches))
    target = aligned_buffer(BLOCK_BYTES + round_up(len(payload), BLOCK_BYTES))
    target[BLOCK_BYTES : BLOCK_BYTES + len(payload)] = payload
    _HEADER.pack_into(
        target, 0, CHECKPOINT_MAGIC, 0, FORMAT_V2, 0, BLOCK_BYTES, slab, checkpoint.sequence,
        checkpoint.next_sequence, checkpoint.next_generation, len(payload), crc64(payload),
        checkpoint.segment_count, len(checkpoint.versions["digest0"]),
        len(checkpoint.pages["page"]), len(checkpoint.names), len(caches),
    )  # fmt: skip
    stamp_crc(target[:SECTOR_BYTES])
    return target


@dataclass(frozen=True, slots=True)
class _Header:
    sequence: int
    next_sequence: int
    next_generation: int
    payload_bytes: int
    payload_crc: int
    counts: tuple[int, int, int, int, int]


def _decode_header_untrusted(block: memoryview, slab: bytes) -> _Header:
    magic, _, version, _, _, owner, *rest = _HEADER.unpack_from(block)
    if magic != CHECKPOINT_MAGIC or version != FORMAT_V2 or owner != slab:
        raise IntegrityError("checkpoint_magic", "there is no checkpoint of this slab")
    check_crc(block[:SECTOR_BYTES])
    sequence, next_sequence, next_generation, payload_bytes, payload_crc, *counts = rest
    segments, versions, pages, names, caches = counts
    implied = (
        segments * _row_bytes(_SEGMENT_COLUMNS)
        + versions * _row_bytes(_VERSION_COLUMNS)
        + pages * _row_bytes(_PAGE_COLUMNS)
        + names
        + caches
    )
    if payload_bytes != implied:
        raise IntegrityError("checkpoint_lengths", "a checkpoint's lengths contradict each other")
    return _Header(
        sequence, next_sequence, next_generation, payload_bytes, payload_crc,
        (segments, versions, pages, names, caches),
    )  # fmt: skip


def _decode_payload_untrusted(header: _Header, payload: memoryview) -> Checkpoint:
    if crc64(payload) != header.payload_crc:
        raise IntegrityError("checkpoint_crc", "a checkpoint fails its checksum")
    segments, versions, pages, names, caches = header.counts
    at = 0

    def columns(kinds: dict[str, str], count: int) -> dict[str, Array]:
        nonlocal at
        found = {}
        for name, kind in kinds.items():
            found[name] = np.frombuffer(payload, kind, count, at)
            at += found[name].nbytes
        return found

    segment_table = columns(_SEGMENT_COLUMNS, segments)
    version_table = columns(_VERSION_COLUMNS, versions)
    page_table = columns(_PAGE_COLUMNS, pages)
    text = bytes(payload[at : at + names])
    listed = _decode_caches(bytes(payload[at + names : at + names + caches]))
    return Checkpoint(
        header.sequence, header.next_sequence, header.next_generation, segment_table,
        version_table, page_table, text, listed,
    )  # fmt: skip


def _decode_caches(packed: bytes) -> list[str]:
    found, at = [], 0
    while at < len(packed):
        length = int.from_bytes(packed[at : at + 4], "little")
        found.append(packed[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return found


def write_checkpoint(
    device: BlockDevice, geometry: SlabGeometry, data: memoryview, slot: int
) -> None:
    """Writes encoded `data` to area `slot`. Raises DiskError; the other area is not touched."""
    start = geometry.checkpoint_offset(slot)
    device.write(start + BLOCK_BYTES, [data[BLOCK_BYTES:]])
    device.flush()
    device.write(start, [data[:BLOCK_BYTES]])
    device.flush()


def read_checkpoint(
    device: BlockDevice, geometry: SlabGeometry, slab: bytes
) -> tuple[Checkpoint | None, int]:
    """Returns the latest whole checkpoint, and the slot that the next one belongs into.

    A damaged checkpoint is passed over. Raises DiskError only if both cannot be read.
    """
    found: list[tuple[Checkpoint, int]] = []
    for slot in (0, 1):
        try:
            found.append((_read_slot(device, geometry, slab, slot), slot))
        except IntegrityError:
            continue  # Never written, torn or rotten: recovery says how many it could use.
    if not found:
        return None, 0
    latest, slot = max(found, key=lambda pair: pair[0].sequence)
    return latest, 1 - slot


def _read_slot(device: BlockDevice, geometry: SlabGeometry, slab: bytes, slot: int) -> Checkpoint:
    start = geometry.checkpoint_offset(slot)
    block = aligned_buffer(BLOCK_BYTES)
    if device.read(start, [block]) < BLOCK_BYTES:
        raise IntegrityError("checkpoint_magic", "the slab ends before the checkpoint")
    header = _decode_header_untrusted(block, slab)
    size = round_up(header.payload_bytes, BLOCK_BYTES)
    if size > geometry.checkpoint_bytes - BLOCK_BYTES:
        raise IntegrityError("checkpoint_lengths", "a checkpoint is longer than its area")
    payload = aligned_buffer(size)
    if size and device.read(start + BLOCK_BYTES, [payload]) < header.payload_bytes:
        raise IntegrityError("checkpoint_lengths", "the slab ends within the checkpoint")
    return _decode_payload_untrusted(header, payload[: header.payload_bytes])
