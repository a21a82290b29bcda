"""An open slab with everything that works on it: what a disk replaces when its device comes back.

Layer: store. `lock` guards the engine and is never held during I/O.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from racerd.store.engine import Engine
from racerd.store.fates import Fates
from racerd.store.record_io import RecordIO
from racerd.store.recovery import Progress
from racerd.store.slab import Slab
from racerd.store.tombstones import Tombstones
from racerd.store.watch import DiskWatch

_numbers = itertools.count(1)


@dataclass(slots=True)
class LiveSlab:
    """`settled`: recovery is over, and what it had to write is written: no page can be found any
    more that is not known, and no noted eviction is left. `changed`: something happened since the
    last checkpoint. `number`: no other opening of a slab in this process has it.
    """

    slab: Slab
    engine: Engine
    lock: threading.Lock
    io: RecordIO
    tombstones: Tombstones
    progress: Progress = field(default_factory=Progress)
    settled: bool = False
    changed: bool = False
    next_checkpoint: int = 0  # The area the next one goes to.
    checkpoint_sequence: int = 1
    number: int = field(default_factory=_numbers.__next__)


def make_live(slab: Slab, watch: DiskWatch, fates: Fates) -> LiveSlab:
    """Builds what works on an open slab; its pages are unknown until recovery found them."""
    lock = threading.Lock()
    engine = Engine(slab.geometry, fates=fates)
    record_io = RecordIO(slab.device, slab.id, slab.geometry)
    return LiveSlab(slab, engine, lock, record_io, Tombstones(engine, lock, record_io, watch))
