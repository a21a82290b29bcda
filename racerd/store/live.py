"""An open slab: the state that its reader, its writer and the disk's own thread share.

Layer: store; thread-safe under `lock`, which guards the engine and is never held during I/O.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from racerd.store.claims import Dropped, Found
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
    last checkpoint. `number`: no other opening of a slab in this process has it. `nudge` wakes the
    disk's own thread.
    """

    slab: Slab
    engine: Engine
    lock: threading.Lock
    io: RecordIO
    tombstones: Tombstones
    nudge: Callable[[], None]
    progress: Progress = field(default_factory=Progress)
    settled: bool = False
    changed: bool = False
    number: int = field(default_factory=_numbers.__next__)

    def end_read(self, found: Found) -> None:
        with self.lock:
            self.engine.end_read(found)

    def bury_soon(self, dropped: Sequence[Dropped]) -> None:
        """Has the disk's own thread write tombstones."""
        if dropped:
            self.tombstones.add(dropped)
            self.changed = True
            self.nudge()


def make_live(slab: Slab, watch: DiskWatch, fates: Fates, *, nudge: Callable[[], None]) -> LiveSlab:
    """Builds what works on an open slab; its pages are unknown until recovery found them."""
    lock = threading.Lock()
    engine = Engine(slab.geometry, fates=fates)
    engine.mark_pinned(slab.notes.pins)
    record_io = RecordIO(slab.device, slab.id, slab.geometry)
    tombstones = Tombstones(engine, lock, record_io, watch)
    return LiveSlab(slab, engine, lock, record_io, tombstones, nudge)
