"""What all caches of the node share: memory, flights, budgets, write-back, and the threads.

Layer: read; loop thread. `app` builds the parts below (arena, threads, store, keyring), enters
this, makes a `CacheReader` for each cache on it, and leaves it when the readers are closed: before
the threads end, before the store and the arena are closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from racerd.crypto.keyring import Keyring
from racerd.pages import PageGeometry
from racerd.read.admission import Admission
from racerd.read.delivery import Delivery
from racerd.read.explain import ServeRecord
from racerd.read.flight import FlightTable
from racerd.read.gpu_disk import GpuDisk
from racerd.read.holds import Holds
from racerd.read.keeping import Keeper
from racerd.read.memory import MemoryTier
from racerd.read.partial import PartialReads
from racerd.read.rooms import Rooms
from racerd.read.rungs import DiskRung
from racerd.read.settings import ReadSettings
from racerd.read.shares import SharedLandings
from racerd.read.strays import Strays
from racerd.read.writeback import WriteBack
from racerd.runtime.arena import FrameArena
from racerd.runtime.threads import WorkerThreads
from racerd.store import Store
from racerd.telemetry import Metrics


@dataclass(frozen=True, slots=True)
class ReadThreads:
    """The pools that reads run on: AEAD and copies, disks, origins."""

    open: WorkerThreads
    disk: WorkerThreads
    origin: WorkerThreads


class ReadServices:
    """See the module. An async context manager; leaving it waits for everything that runs."""

    def __init__(
        self,
        *,
        arena: FrameArena,
        threads: ReadThreads,
        store: Store,
        keyring: Keyring,
        geometry: PageGeometry,
        metrics: Metrics,
        settings: ReadSettings | None = None,
    ) -> None:
        """Everything is borrowed and outlives this. Raises ConfigError on budgets too small."""
        self.settings = settings = settings or ReadSettings()
        settings.check(geometry)
        self.geometry = geometry
        self.store = store
        self.threads = threads
        self.metrics = metrics
        self.strays = Strays()
        self.admission = Admission(settings, geometry, metrics)
        self.rooms = Rooms(geometry.page_bytes)
        self.holds = Holds(self.admission.plaintext)
        self.memory = MemoryTier(arena, geometry, waiters_max=settings.waiters_max)
        self.flights = FlightTable(metrics, flights_max=settings.waiters_max)
        # Half of the arena at most: pages that wait for a disk must leave room to read others.
        dirty = min(settings.dirty_bytes, arena.slot_count * arena.frame_bytes // 2)
        self.write_back = WriteBack(store, threads.disk, dirty, settings, metrics)
        self.keeper = Keeper(
            self.memory, self.write_back, self.flights, threads.open, keyring, settings, metrics
        )
        self.delivery = Delivery(threads.open, self.admission, keyring, geometry, settings, metrics)
        self.disk = DiskRung(
            store, threads.disk, self.memory, self.admission, self.strays, settings, metrics
        )
        self.shares = SharedLandings(
            threads.open,
            geometry,
            metrics,
            limit_bytes=settings.share_bytes,
            idle_seconds=settings.share_idle_seconds,
        )
        self.gpu_disk = GpuDisk(
            store, threads.disk, keyring, geometry, self.strays, settings, metrics
        )
        self.partial = PartialReads(geometry, settings.promote_share)
        self.record = ServeRecord(settings.record_pages)
        metrics.budget_limit.labels("memory").set(self.memory.limit_bytes)
        metrics.budget_used.labels("memory").set_function(lambda: self.memory.used_bytes)

    async def __aenter__(self) -> ReadServices:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shares.close()
        await self.flights.close()
        await self.write_back.close()
        await self.strays.close()
        self.memory.close()
