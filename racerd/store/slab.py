"""Opening a slab: is it ours, how is it laid out, may it grow.

Layer: store; blocking. Nothing is written before the superblocks say that the slab is racerd's, or
before it is all zeros where they belong. A slab of a newer format, and anything that racerd did not
write, is left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from racerd.errors import IntegrityError
from racerd.pages import PageGeometry
from racerd.store.buffers import aligned_buffer
from racerd.store.device import BlockDevice, DiskError, Extent
from racerd.store.geometry import (
    BLOCK_BYTES,
    FRONT_BYTES,
    NOTES_BYTES,
    NOTES_OFFSETS,
    SUPERBLOCK_OFFSETS,
    SlabGeometry,
)
from racerd.store.notes import Notes, decode_notes_untrusted
from racerd.store.record import FORMAT_V2
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.superblock import Superblock, decode_superblock_untrusted, is_whole
from racerd.units import MIB, format_bytes

log = logging.getLogger(__name__)

_SLAB_ID_BYTES = 16
_ERASE_BYTES = MIB
_GROWTH_WORTH_IT = 1.1  # Of a capacity that was not set: less than this is not worth a new layout.


@dataclass(slots=True)
class Slab:
    """An open slab. `before` says how it was laid out, and where its checkpoints are, till now."""

    device: BlockDevice
    id: bytes
    geometry: SlabGeometry
    before: SlabGeometry
    notes: Notes
    free_floor_ratio: float

    def may_grow(self, size: int) -> bool:
        """Whether the file system keeps its floor of free space if the slab takes `size` more."""
        return self.missing_bytes(size) == 0

    def missing_bytes(self, size: int = 0) -> int:
        """How far the file system's free space would be below the floor after taking `size`."""
        space = self.device.space()
        if space is None:
            return 0
        return max(0, floor_bytes(space.total, self.free_floor_ratio) - (space.free - size))

    def write_notes(self, notes: Notes) -> None:
        """Makes `notes` durable. Raises DiskError; the notes before stay valid then."""
        block = aligned_buffer(NOTES_BYTES)
        notes.encode(block, self.id)
        self.device.write(NOTES_OFFSETS[notes.slot], [block])
        self.device.flush()
        self.notes = notes


def floor_bytes(total: int, ratio: float) -> int:
    """Bytes of a file system of `total` bytes that stay free: at least `ratio` of it."""
    return -int(-total * ratio // 1)


def open_slab(
    device: BlockDevice, disk: DiskSettings, store: StoreSettings, page: PageGeometry
) -> Slab:
    """Reads, makes or adapts the slab on `device`, which stays the caller's.

    Raises DiskError; IntegrityError `slab_version`, `slab_foreign`, `slab_small`, with a hint.
    """
    found, spoilt = _superblock(device, disk)
    kept, geometry = _plan(device, disk, store, page, found)
    _prove_writes(device, known=kept is not None)
    if found is not None and kept is None:
        log.warning(
            "%s: %s: the slab is started anew, without its pages and the pins noted on it",
            disk.path, _why_anew(found.geometry, geometry),
        )  # fmt: skip
    if kept is not None and kept.geometry == geometry and kept.version == FORMAT_V2:
        superblock = kept
        _renew_superblocks(device, superblock, spoilt)
    else:
        slab = kept.slab if kept is not None else os.urandom(_SLAB_ID_BYTES)
        sequence = found.sequence + 1 if found is not None else 1
        superblock = Superblock(FORMAT_V2, slab, sequence, geometry)
        if kept is not None:
            _erase_what_is_new(device, kept.geometry, geometry)
        _write_superblocks(device, superblock)
        _allocate_ends(device, geometry)
    before = kept.geometry if kept is not None else geometry
    notes = _notes(device, superblock.slab)
    return Slab(device, superblock.slab, geometry, before, notes, store.free_floor_ratio)


def _prove_writes(device: BlockDevice, *, known: bool) -> None:
    """A full medium does not stop a slab that has pages: they can be read, and evicted."""
    try:
        device.prove_writes()
    except DiskError as error:
        if not (known and error.full):
            raise
        log.warning("%s; %s", error.message, error.hint)


def _plan(
    device: BlockDevice, disk: DiskSettings, store: StoreSettings, page: PageGeometry,
    found: Superblock | None,
) -> tuple[Superblock | None, SlabGeometry]:  # fmt: skip
    """The layout, and the superblock whose records stay where they are in it, if one can.

    Records cannot stay when the page sizes changed, or when the slab has become smaller than
    three of its segments.
    """
    if found is not None and found.geometry.page == page:
        capacity = _capacity(device, disk, store, found.geometry)
        try:
            return found, SlabGeometry.plan(
                page, capacity, segment_bytes=found.geometry.segment_bytes
            )
        except ValueError:
            pass  # It has become too small for its segments; `_why_anew` says so.
    try:
        return None, SlabGeometry.plan(page, _capacity(device, disk, store, None))
    except ValueError as error:
        raise IntegrityError(
            "slab_small", str(error), hint="raise the capacity of this disk"
        ) from error


def _why_anew(old: SlabGeometry, new: SlabGeometry) -> str:
    """The settings whose change records cannot outlive, each with its value then and now."""
    sizes = [
        ("page_bytes", old.page.page_bytes, new.page.page_bytes),
        ("frame_bytes", old.page.frame_bytes, new.page.frame_bytes),
    ]
    changed = [
        f"{name} was {format_bytes(then)} and is {format_bytes(now)} now"
        for name, then, now in sizes
        if then != now
    ]
    return ", ".join(changed) or (
        f"its capacity was {format_bytes(old.capacity_bytes)} and is"
        f" {format_bytes(new.capacity_bytes)} now, too little for segments of"
        f" {format_bytes(old.segment_bytes)}"
    )


def _capacity(
    device: BlockDevice, disk: DiskSettings, store: StoreSettings, old: SlabGeometry | None
) -> int:
    """The capacity asked for, or what the medium offers: a device as it is, a file to the floor."""
    space = device.space()
    if space is None:
        whole = device.size_bytes
        return min(whole, disk.capacity_bytes) if disk.capacity_bytes is not None else whole
    if disk.capacity_bytes is not None:
        return disk.capacity_bytes
    offered = space.free + space.own - floor_bytes(space.total, store.free_floor_ratio)
    if old is not None and offered < old.capacity_bytes * _GROWTH_WORTH_IT:
        offered = min(offered, old.capacity_bytes)
    log.info("%s: no capacity was set, it may take %s", disk.path, format_bytes(max(offered, 0)))
    return max(offered, 0)


def _superblock(device: BlockDevice, disk: DiskSettings) -> tuple[Superblock | None, list[int]]:
    """The slab's superblock, and the offsets where a copy of it is missing.

    None for a slab that is empty or was ours and lost both. One copy of a newer format is enough to
    leave the slab alone: a newer racerd had begun to take it over.
    """
    found, codes, newer = {}, set(), False
    for offset in SUPERBLOCK_OFFSETS:
        block = aligned_buffer(BLOCK_BYTES)
        device.read(offset, [block])
        try:
            found[offset] = decode_superblock_untrusted(block)
        except IntegrityError as error:
            codes.add(error.code)
            newer |= error.code == "slab_version" and is_whole(block)
    if found and not newer:
        latest = max(found.values(), key=lambda superblock: superblock.sequence)
        return latest, [at for at in SUPERBLOCK_OFFSETS if found.get(at) != latest]
    if "slab_version" in codes:
        raise IntegrityError(
            "slab_version",
            f"{disk.path} has a newer format than this racerd knows",
            hint="start the newer racerd again, or give this one another path",
        )
    if "slab_damaged" in codes:
        log.warning("%s: both superblocks are damaged: the slab is started anew", disk.path)
        return None, []
    if "slab_foreign" in codes:
        raise IntegrityError(
            "slab_foreign",
            f"{disk.path} holds something that racerd did not write",
            hint="name another path, or remove what is there if nobody needs it",
        )
    return None, []


def _write_superblocks(
    device: BlockDevice, superblock: Superblock, offsets: Sequence[int] = SUPERBLOCK_OFFSETS
) -> None:
    block = aligned_buffer(BLOCK_BYTES)
    superblock.encode(block)
    for offset in offsets:
        device.write(offset, [block])
        device.flush()


def _renew_superblocks(device: BlockDevice, superblock: Superblock, spoilt: list[int]) -> None:
    """Writes the copies that are damaged or old, so that the next fault finds two again."""
    if not spoilt:
        return
    log.warning("%s: a copy of the superblock was damaged, and is written anew", device.path)
    try:
        _write_superblocks(device, superblock, spoilt)
    except DiskError as error:
        if not error.full:
            raise
        log.warning("%s; %s", error.message, error.hint)


def _erase_what_is_new(device: BlockDevice, old: SlabGeometry, new: SlabGeometry) -> None:
    """Before a slab grows: what an earlier, larger life left behind its end must not come back.

    The last segment, which was short, is zeroed to its new end; of each further one the header and
    the first record's are, which makes it one that was never used.
    """
    zeros = aligned_buffer(_ERASE_BYTES)
    stop = device.size_bytes
    for segment in range(max(old.segment_count - 1, 0), new.segment_count):
        start = new.segment_offset(segment)
        erase = Extent(start, 2 * BLOCK_BYTES)
        if segment < old.segment_count:
            start += old.segment_size(segment)
            erase = Extent(start, new.segment_offset(segment) + new.segment_size(segment) - start)
        for offset in range(erase.offset, min(erase.offset + erase.length, stop), len(zeros)):
            length = min(len(zeros), erase.offset + erase.length - offset)
            device.write(offset, [zeros[:length]])
    device.flush()


def _allocate_ends(device: BlockDevice, geometry: SlabGeometry) -> None:
    """Reserves front and checkpoint areas: a full file system must not stop a checkpoint."""
    extents = (
        Extent(0, FRONT_BYTES),
        Extent(geometry.segments_stop, 2 * geometry.checkpoint_bytes),
    )
    try:
        for extent in extents:
            device.allocate(extent)
    except DiskError as error:
        if not error.full:
            raise
        log.warning("%s; the index may have to be rebuilt at each start", error.message)


def _notes(device: BlockDevice, slab: bytes) -> Notes:
    """The latest whole notes, or empty ones."""
    found = [Notes()]
    for offset in NOTES_OFFSETS:
        block = aligned_buffer(NOTES_BYTES)
        try:
            device.read(offset, [block])
            found.append(decode_notes_untrusted(block, slab))
        except IntegrityError:
            continue  # Never written, or torn: the other copy is the one before.
    return max(found, key=lambda notes: notes.sequence)
