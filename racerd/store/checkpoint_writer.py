"""Writes the checkpoints of one slab: when one is due, and into which of the two areas.

Layer: store; on the disk's own thread. What a checkpoint holds is `checkpoint`'s.
"""

from __future__ import annotations

import logging

from racerd.store.checkpoint import (
    Checkpoint,
    compose,
    encode,
    freeze,
    read_checkpoint,
    write_checkpoint,
)
from racerd.store.device import DiskError
from racerd.store.live import LiveSlab
from racerd.store.watch import DiskWatch

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Of one live slab. `every_seconds`: how long a change may wait for the next one."""

    def __init__(
        self, live: LiveSlab, watch: DiskWatch, *, label: str, every_seconds: float
    ) -> None:
        self._live = live
        self._watch = watch
        self._label = label
        self._every_seconds = every_seconds
        self._due_at = 0.0
        self._area = 0  # Which one the next goes to.
        self._sequence = 1

    def read_latest(self) -> Checkpoint | None:
        """The latest whole one on the slab; the next will replace the other. Raises DiskError."""
        slab = self._live.slab
        latest, self._area = read_checkpoint(slab.device, slab.before, slab.id)
        self._sequence = latest.sequence + 1 if latest is not None else 1
        return latest

    def forget_areas(self) -> None:
        """The slab was laid out anew: where the last one was is segment room now, or no more."""
        self._area = 0

    def schedule(self, *, now: bool = False) -> None:
        """The next one comes at its time, or as soon as it can."""
        if now:
            self._live.changed = True
        self._due_at = self._watch.now() + (0.0 if now else self._every_seconds)

    @property
    def due(self) -> bool:
        return self._live.changed and self._watch.now() >= self._due_at

    def write(self) -> None:
        """Writes one if recovery is over. A failure is told; the next one is tried at its time."""
        live, slab = self._live, self._live.slab
        if not live.progress.done:
            return
        live.changed = False
        live.tombstones.bury()
        with live.lock:
            frozen = freeze(live.engine)
        data = encode(compose(frozen, self._sequence), slab.id)
        try:
            with self._watch.operation():
                write_checkpoint(slab.device, slab.geometry, data, self._area)
        except DiskError as error:
            live.changed = True
            log.warning("%s: no checkpoint was written: %s", self._label, error.message)
        else:
            self._sequence += 1
            self._area = 1 - self._area
        self.schedule()
