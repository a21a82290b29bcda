"""What happens to a slab while no daemon has it: rot, and the loss of both checkpoints.

Layer: torture. It knows the layout from the slab's own superblock. One of the two superblocks and
one of the two notes are damaged at a time, as one fault does: with both gone a slab starts anew.
The other one's turn comes when a daemon was ready in between, which mends the first.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from racerd.errors import IntegrityError
from racerd.store.geometry import (
    BLOCK_BYTES,
    FRONT_BYTES,
    NOTES_OFFSETS,
    SUPERBLOCK_OFFSETS,
    SlabGeometry,
)
from racerd.store.superblock import decode_superblock_untrusted

_SPOTS = 6
_SPOT_BYTES_MAX = 64


def geometry_of(slab: Path) -> SlabGeometry:
    """The layout that the slab's superblock tells."""
    with slab.open("rb") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset)
            try:
                return decode_superblock_untrusted(memoryview(file.read(BLOCK_BYTES))).geometry
            except IntegrityError:
                continue  # The other copy tells.
    raise ValueError(f"{slab} has no whole superblock")


def lose_checkpoints(slab: Path) -> None:
    """Overwrites both checkpoint areas with zeros."""
    geometry = geometry_of(slab)
    with slab.open("r+b") as file:
        file.seek(geometry.checkpoint_offset(0))
        file.write(bytes(2 * geometry.checkpoint_bytes))
        file.flush()
        os.fsync(file.fileno())


def rot(slab: Path, chance: random.Random, copy: int) -> int:
    """Overwrites a few spots with random bytes, of the front in `copy` only. Returns how many."""
    geometry = geometry_of(slab)
    size = slab.stat().st_size
    with slab.open("r+b") as file:
        for _ in range(_SPOTS):
            at = _somewhere(geometry, chance, copy)
            if at < size:
                file.seek(at)
                file.write(chance.randbytes(chance.randint(1, _SPOT_BYTES_MAX)))
        file.flush()
        os.fsync(file.fileno())
    return _SPOTS


def _somewhere(geometry: SlabGeometry, chance: random.Random, copy: int) -> int:
    """An offset: mostly in a segment, now and then in a checkpoint, or in `copy` of the front."""
    kind = chance.randrange(12)
    if kind == 0:
        front = chance.choice((SUPERBLOCK_OFFSETS, NOTES_OFFSETS))
        return front[copy] + chance.randrange(512)
    if kind == 1:
        areas = 2 * geometry.checkpoint_bytes
        return geometry.checkpoint_offset(0) + chance.randrange(areas)
    return chance.randrange(FRONT_BYTES, geometry.segments_stop)
