"""Mounting a slab: what works on it, built anew each time that its device is opened.

Layer: store; blocking, on the disk's own thread. Who holds a `Mount` may use it from any thread,
also when the disk has another one by now: its device is closed then, and every I/O is a DiskError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from racerd.pages import PageGeometry
from racerd.store.budget import WriteBudget
from racerd.store.checkpoint_writer import CheckpointWriter
from racerd.store.device import BlockDevice
from racerd.store.fates import Fates
from racerd.store.live import LiveSlab, make_live
from racerd.store.reader import SlabReader
from racerd.store.recovery import Recovery
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.store.slab import Slab, open_slab
from racerd.store.watch import DiskWatch
from racerd.store.writer import SlabWriter
from racerd.telemetry import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mount:
    """An open slab with everything that works on it."""

    live: LiveSlab
    reader: SlabReader
    writer: SlabWriter
    recovery: Recovery
    checkpoints: CheckpointWriter


class Mounter:
    """Of one disk. `watch`, `budget` and `fates` are the disk's, and outlive its mounts."""

    def __init__(
        self, settings: DiskSettings, store: StoreSettings, page: PageGeometry, metrics: Metrics, *,
        open_device: Callable[[DiskSettings], BlockDevice], watch: DiskWatch, budget: WriteBudget,
        fates: Fates,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._store = store
        self._page = page
        self._metrics = metrics
        self._open_device = open_device
        self._watch = watch
        self._budget = budget
        self._fates = fates
        self._label = str(settings.path)

    def mount(self, nudge: Callable[[], None]) -> Mount:
        """Opens the device and the slab on it; `nudge` wakes the disk's own thread.

        Raises DiskError; IntegrityError for a slab that is not to be touched. Nothing stays open
        where this raises.
        """
        device = self._open_device(self._settings)
        try:
            slab = open_slab(device, self._settings, self._store, self._page)
            mount = self._built(slab, nudge)
        except BaseException:
            device.close()
            raise
        self._show(mount.live)
        return mount

    def _built(self, slab: Slab, nudge: Callable[[], None]) -> Mount:
        watch, metrics, label = self._watch, self._metrics, self._label
        live = make_live(slab, watch, self._fates, nudge=nudge)
        recovery = Recovery(slab, live.engine, live.lock)
        live.progress = recovery.progress
        return Mount(
            live,
            SlabReader(live, watch, self._fates, metrics, label=label),
            SlabWriter(live, watch, self._budget, metrics, label=label, settings=self._store),
            recovery,
            CheckpointWriter(
                live, watch, label=label, every_seconds=self._store.checkpoint_seconds
            ),
        )

    def _show(self, live: LiveSlab) -> None:
        device = live.slab.device
        self._metrics.store_capacity_bytes.labels(self._label).set(live.engine.capacity_bytes)
        self._metrics.store_buffered.labels(self._label).set(not device.direct)
        bounced = self._metrics.store_bounced_bytes.labels(self._label)
        bounced.set_function(partial(getattr, device, "bounced_bytes"))
        if not device.direct:
            log.warning(
                "%s: the file system refuses O_DIRECT, so the page cache is used: slower, and it"
                " takes memory; put the slab on ext4, xfs or a block device", self._label,
            )  # fmt: skip
