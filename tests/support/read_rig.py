"""A node's read layer with real parts: arena, threads, store on a slab file, keyring.

`async with ReadRig(tmp_path) as rig:` gives `rig.reader` on `rig.origin`. Leaving it checks that
nothing is left: no lease, no charge, no flight, no stray, no record on loan. With `store` the disk
is a scripted one, with `chance` the threads are stepped ones.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

from racerd.crypto.keyring import Keyring
from racerd.ids import ObjectId, ObjectVersion
from racerd.pages import PageGeometry
from racerd.read.reader import CacheReader, RequestContext
from racerd.read.services import ReadServices, ReadThreads
from racerd.read.settings import ReadSettings
from racerd.read.shares import SharedPiece
from racerd.runtime.arena import FrameArena
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import WorkerThreads, settled
from racerd.store import DiskSettings, Store, StoreSettings
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.scripted_origin import ScriptedOrigin
from tests.support.scripted_store import ScriptedStore
from tests.support.stepped_threads import SteppedThreads

GEOMETRY = PageGeometry(64 * KIB, 4 * KIB)
PAGE = GEOMETRY.page_bytes
FRAME = GEOMETRY.frame_bytes


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class ReadRig:
    """See the module. `pages_in_memory` sizes the arena; `disk_bytes` 0 means no disk."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: ReadSettings | None = None,
        pages_in_memory: int = 16,
        disk_bytes: int = 8 * MIB,
        origin: ScriptedOrigin | None = None,
        store: ScriptedStore | None = None,
        chance: random.Random | None = None,
        origin_threads: int = 8,
    ) -> None:
        self.folder = folder
        self.settings = settings or small_settings()
        self.origin = origin or ScriptedOrigin()
        self.metrics = Metrics()
        self._arena_bytes = pages_in_memory * GEOMETRY.frames_per_page * (FRAME + 4 * KIB)
        self._disk_bytes = disk_bytes
        self._origin_threads = origin_threads
        self.scripted_store = store
        self._chance = chance
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ReadRig:
        enter, aenter = self._stack.enter_context, self._stack.enter_async_context
        self.keyring = Keyring.open(self.folder / "keys")
        self.arena = enter(FrameArena(FRAME, self._arena_bytes))
        self.store = self._open_store()
        self.threads = ReadThreads(
            open=await aenter(self._threads("open", 2)),
            disk=await aenter(self._threads("disk", 2)),
            origin=await aenter(self._threads("origin", self._origin_threads)),
        )
        self._stack.push_async_callback(self._check_nothing_is_left)
        self.services = await aenter(
            ReadServices(
                arena=self.arena,
                threads=self.threads,
                store=self.store,
                keyring=self.keyring,
                geometry=GEOMETRY,
                metrics=self.metrics,
                settings=self.settings,
            )
        )
        self.reader = await aenter(CacheReader("cache", self.origin, self.services))
        # Recovery runs on the store's own threads, which know no event.
        while self.scripted_store is None and self.store.recovering:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self

    def _open_store(self) -> Store:
        if self.scripted_store is not None:
            return cast(Store, self.scripted_store)
        disks = (DiskSettings(self.folder / "slab", self._disk_bytes),) if self._disk_bytes else ()
        settings = StoreSettings(disks, free_floor_ratio=0.0, scrub_bytes_per_second=0)
        return self._stack.enter_context(Store(settings, GEOMETRY, self.metrics))

    def _threads(self, name: str, count: int) -> WorkerThreads:
        if self._chance is not None:
            return SteppedThreads(name, count, self._chance)
        return WorkerThreads(name, count)

    async def __aexit__(self, *exception: object) -> None:
        self.origin.release()
        await self._stack.aclose()

    async def _check_nothing_is_left(self) -> None:
        services = self.services
        assert services.memory.leases == 0
        assert self.arena.free_slots == self.arena.slot_count
        assert {budget.name: budget.used for budget in services.admission.budgets} == {
            "plaintext": 0,
            "streams": 0,
            "reading": 0,
            "opening": 0,
        }
        assert services.write_back.used == 0
        assert len(services.flights) == 0
        assert len(services.strays) == 0
        assert self.origin.running == 0
        if self.scripted_store is None:
            # What was dropped holds its segment until the disk's own thread has written that down.
            self.store.checkpoint()
            for disk in self.store.disks:
                assert disk._live is None or not any(disk._live.engine.segments.pins)

    # --- what tests do ----------------------------------------------------------------------

    def object_id(self, key: bytes = b"k", bucket: str = "b") -> ObjectId:
        return ObjectId("cache", bucket, key)

    def version(self, key: bytes = b"k") -> ObjectVersion:
        """The version that the origin has now."""
        data, etag = self.origin.objects["b", key]
        return ObjectVersion(self.object_id(key), etag, len(data))

    def context(self, connection: str = "one", seconds: float = 20.0) -> RequestContext:
        return RequestContext(connection, Deadline.after(seconds))

    async def read(
        self, version: ObjectVersion, start: int = 0, stop: int | None = None, **context: object
    ) -> tuple[bytes, dict[str, int]]:
        """Reads into a fresh buffer; returns its bytes and the report's rungs."""
        stop = version.size if stop is None else stop
        buffer = bytearray(b"\xaa" * (stop - start))
        report = await self.reader.read_into(
            version,
            start,
            stop,
            memoryview(buffer),
            self.context(**context),  # type: ignore[arg-type]
        )
        assert report.bytes == stop - start == sum(report.rungs.values())
        return bytes(buffer), report.rungs

    async def stored(self) -> None:
        """Waits until every flight is over and write-back has nothing to do."""
        await self.flights_over()
        await self.services.write_back.settled(lambda _: True)

    async def flights_over(self) -> None:
        """Waits until what landed is sealed, and queued for its disk or given up."""
        for flight in list(self.services.flights._running):
            assert flight._task is not None
            await settled(flight._task)

    async def arrived(self, count: int = 1) -> None:
        """Waits until `count` origin calls more stand at the gate."""
        for _ in range(count):
            assert await asyncio.to_thread(self.origin.arrived.acquire, timeout=20)

    def forget_memory(self) -> None:
        """Empties the memory tier."""
        memory = self.services.memory
        for name in memory.objects():
            for page in memory.pages_of(name):
                memory.drop(page)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def small_settings(**changes: object) -> ReadSettings:
    """Settings that fit `GEOMETRY`."""
    values: dict[str, object] = {
        "plaintext_bytes": 16 * PAGE,
        "reading_bytes": 16 * PAGE,
        "opening_bytes": 16 * PAGE,
        "dirty_bytes": 8 * PAGE,
        "run_bytes": 4 * FRAME,
        "stream_chunk_bytes": 4 * FRAME,
        **changes,
    }
    return ReadSettings(**values)  # type: ignore[arg-type]


def taken(piece: SharedPiece) -> bytes:
    """Reads all of a shared piece and lets it go."""
    length = piece.stop - piece.start
    with mmap.mmap(piece.descriptor, length, prot=mmap.PROT_READ) as mapping:
        found = mapping[:]
    os.close(piece.descriptor)
    return found
