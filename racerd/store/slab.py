"""Opening a slab: is it ours, how is it laid out, may it grow.

Layer: store; blocking. Nothing is written before the superblocks say that the slab is racerd's, or
before it is all zeros where they belong. A slab of a newer format, and anything that racerd did not
write, is left alone.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from racerd.errors import IntegrityError
from racerd.pages import PageGeometry
from racerd.store.buffers import aligned_buffer
from racerd.store.device import BlockDevice
from racerd.store.geometry import BLOCK_BYTES, SUPERBLOCK_OFFSETS, SlabGeometry
from racerd.store.record import FORMAT_V2
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.superblock import Superblock, decode_superblock_untrusted
from racerd.units import format_bytes

log = logging.getLogger(__name__)

_SLAB_ID_BYTES = 16


@dataclass(slots=True)
class Slab:
    """An open slab. `checkpoint_geometry` says where the last run left its checkpoints."""

    device: BlockDevice
    id: bytes
    geometry: SlabGeometry
    checkpoint_geometry: SlabGeometry
    free_floor_ratio: float
    next_checkpoint: int = 0
    checkpoint_sequence: int = 1

    def may_grow(self, size: int) -> bool:
        """Whether the file system keeps its floor of free space if the slab takes `size` more."""
        space = self.device.space()
        return space is None or space.free - size >= floor_bytes(space.total, self.free_floor_ratio)


def floor_bytes(total: int, ratio: float) -> int:
    """Bytes of a file system of `total` bytes that stay free: at least `ratio` of it."""
    return -int(-total * ratio // 1)


def open_slab(
    device: BlockDevice, disk: DiskSettings, store: StoreSettings, page: PageGeometry
) -> Slab:
    """Reads, makes or adapts the slab on `device`, which stays the caller's.

    Raises DiskError; IntegrityError `slab_version`, `slab_foreign`, `slab_small`, with a hint.
    """
    found = _superblock(device, disk)
    capacity = _capacity(device, disk, store)
    old = found.geometry if found is not None else None
    keep = found is not None and old is not None and old.page == page
    try:
        geometry = SlabGeometry.plan(
            page, capacity, segment_bytes=old.segment_bytes if keep and old is not None else None
        )
    except ValueError as error:
        raise IntegrityError(
            "slab_small", str(error), hint="raise the capacity of this disk"
        ) from error
    device.prove_writes()
    if found is not None and not keep:
        log.warning(
            "%s was made for other page sizes: it is started anew and its pages are dropped",
            disk.path,
        )
    slab = found.slab if found is not None and keep else os.urandom(_SLAB_ID_BYTES)
    if found is None or not keep or found.geometry != geometry or found.version != FORMAT_V2:
        sequence = found.sequence + 1 if found is not None else 1
        _write_superblocks(device, Superblock(FORMAT_V2, slab, sequence, geometry))
    before = old if keep and old is not None else geometry
    return Slab(device, slab, geometry, before, store.free_floor_ratio)


def _superblock(device: BlockDevice, disk: DiskSettings) -> Superblock | None:
    """The slab's superblock, or None for a slab that is empty or was ours and lost both."""
    found, reasons = [], []
    for offset in SUPERBLOCK_OFFSETS:
        block = aligned_buffer(BLOCK_BYTES)
        device.read(offset, [block])
        try:
            found.append(decode_superblock_untrusted(block))
        except IntegrityError as error:
            reasons.append(error)
    if found:
        return max(found, key=lambda superblock: superblock.sequence)
    codes = {reason.code for reason in reasons}
    if "slab_version" in codes:
        raise IntegrityError(
            "slab_version",
            f"{disk.path} has a newer format than this racerd knows",
            hint="start the newer racerd again, or give this one another path",
        )
    if "slab_damaged" in codes:
        log.warning("%s: both superblocks are damaged: the slab is started anew", disk.path)
        return None
    if "slab_foreign" in codes:
        raise IntegrityError(
            "slab_foreign",
            f"{disk.path} holds something that racerd did not write",
            hint="name another path, or remove what is there if nobody needs it",
        )
    return None


def _write_superblocks(device: BlockDevice, superblock: Superblock) -> None:
    block = aligned_buffer(BLOCK_BYTES)
    superblock.encode(block)
    for offset in SUPERBLOCK_OFFSETS:
        device.write(offset, [block])
        device.flush()


def _capacity(device: BlockDevice, disk: DiskSettings, store: StoreSettings) -> int:
    """The capacity asked for, or what the medium offers: a device as it is, a file to the floor."""
    space = device.space()
    if space is None:
        whole = device.size_bytes
        return min(whole, disk.capacity_bytes) if disk.capacity_bytes is not None else whole
    if disk.capacity_bytes is not None:
        return disk.capacity_bytes
    offered = space.free + device.size_bytes - floor_bytes(space.total, store.free_floor_ratio)
    log.info("%s: no capacity was set, it may take %s", disk.path, format_bytes(max(offered, 0)))
    return max(offered, 0)
