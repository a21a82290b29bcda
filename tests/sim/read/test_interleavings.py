"""Random interleavings of reads, cancels, failures and rot, replayed by seed.

The threads are stepped: the simulation decides which piece starts and when it ends, so that every
order of loop and workers can come up, and a seed brings the same one again
(RACER_SIM_SEED=n runs only that one; RACER_SIM_SEEDS=n runs so many).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from racerd.errors import RacerError, SourceError
from racerd.ids import ObjectVersion
from racerd.read.settings import ReadSettings
from tests.support.read_rig import PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import ScriptedOrigin, unavailable, version_changed
from tests.support.scripted_store import ScriptedStore
from tests.support.stepped_threads import SteppedThreads

SEEDS = (
    [int(os.environ["RACER_SIM_SEED"])]
    if "RACER_SIM_SEED" in os.environ
    else list(range(int(os.environ.get("RACER_SIM_SEEDS", "60"))))
)
STEPS = 250
ALLOWED = {
    "origin_unavailable", "origin_cancelled", "overloaded", "deadline_exceeded", "corrupt",
    "version_changed", "not_found",
}  # fmt: skip


class ObedientOrigin(ScriptedOrigin):
    """Fails by chance, and stops by chance when it is asked to. Never blocks: threads are steps."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.trouble = 0.0

    def fetch(self, version, start, stop, *, deadline, cancel, room=None):  # type: ignore[no-untyped-def]
        if cancel.cancelled and self.chance.random() < 0.5:
            raise SourceError("origin_cancelled", "the fetch was cancelled")
        if self.chance.random() < self.trouble:
            raise self.chance.choice([unavailable(), version_changed(version)])
        return super().fetch(version, start, stop, deadline=deadline, cancel=cancel)


@dataclass
class Read:
    """One read of the simulation and what it may have done to its destination."""

    task: asyncio.Task[None]
    destination: bytearray
    start: int
    outcome: str = "running"
    at_the_end: bytes = b""


@dataclass
class Simulation:
    rig: ReadRig
    origin: ObedientOrigin
    store: ScriptedStore
    chance: random.Random
    data: bytes
    version: ObjectVersion
    reads: list[Read] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def pools(self) -> list[SteppedThreads]:
        threads = self.rig.threads
        return [pool for pool in (threads.open, threads.disk, threads.origin)
                if isinstance(pool, SteppedThreads)]  # fmt: skip

    async def step(self) -> None:
        """One thing happens; now and then the loop gets some turns."""
        acts = [self.work] * 10 + [self.turns] * 4 + [
            self.read, self.read, self.cancel, self.stream, self.prefetch, self.evict, self.rot,
            self.tear, self.squeeze,
        ]  # fmt: skip
        self.origin.trouble = self.chance.choice([0.0, 0.0, 0.0, 0.3])
        await self.chance.choice(acts)()

    async def work(self) -> None:
        self.chance.choice(self.pools).step()

    async def turns(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            await asyncio.sleep(0)

    def _range(self) -> tuple[int, int]:
        start, stop = sorted(self.chance.choices(range(len(self.data) + 1), k=2))
        return (0, len(self.data)) if self.chance.random() < 0.2 else (start, stop)

    def _begin(self, start: int, destination: bytearray, work) -> None:  # type: ignore[no-untyped-def]
        read = Read(asyncio.get_running_loop().create_task(work), destination, start)
        read.task.add_done_callback(lambda _: self._ended(read))
        self.reads.append(read)

    def _ended(self, read: Read) -> None:
        read.at_the_end = bytes(read.destination)
        if read.task.cancelled():
            read.outcome = "cancelled"
        elif (error := read.task.exception()) is None:
            read.outcome = "done"
        else:
            assert isinstance(error, RacerError), error
            assert error.code in ALLOWED, (error.code, error)
            read.outcome = error.code
        self.outcomes[read.outcome] += 1

    def _context(self):  # type: ignore[no-untyped-def]
        return self.rig.context(self.chance.choice(["a", "b", "c"]), 600.0)

    async def read(self) -> None:
        start, stop = self._range()
        destination = bytearray(b"\xaa" * (stop - start))
        work = self._read(start, stop, destination)
        self._begin(start, destination, work)

    async def _read(self, start: int, stop: int, destination: bytearray) -> None:
        # Not released at the end: a piece that ran too late would find it and be found out.
        view = memoryview(destination)
        await self.rig.reader.read_into(self.version, start, stop, view, self._context())

    async def stream(self) -> None:
        start, stop = self._range()
        destination = bytearray()
        self._begin(start, destination, self._stream(start, stop, destination))

    async def _stream(self, start: int, stop: int, destination: bytearray) -> None:
        stream = self.rig.reader.stream(self.version, start, stop, self._context())
        patience = self.chance.choice([None, None, 1, 3])
        try:
            async for chunk in stream:
                destination += chunk
                if patience is not None and (patience := patience - 1) == 0:
                    raise asyncio.CancelledError
        finally:
            await stream.aclose()

    async def prefetch(self) -> None:
        start, stop = self._range()
        self._begin(0, bytearray(), self._prefetch(start, stop))

    async def _prefetch(self, start: int, stop: int) -> None:
        await self.rig.reader.prefetch(self.version, start, stop, self._context())

    async def evict(self) -> None:
        async def work() -> None:
            await self.rig.reader.evict("b", b"k", prefix=self.chance.random() < 0.5)

        if self.chance.random() < 0.3:
            self._begin(0, bytearray(), work())

    async def cancel(self) -> None:
        running = [read for read in self.reads if not read.task.done()]
        if running:
            self.chance.choice(running).task.cancel()

    async def rot(self) -> None:
        if self.store.pages:
            self.store.rot(self.chance.choice(list(self.store.pages)), 0)

    async def tear(self) -> None:
        if self.store.pages:
            self.store.tear(self.chance.choice(list(self.store.pages)), 0)

    async def squeeze(self) -> None:
        """Memory forgets a page, so that the disk is asked."""
        memory = self.rig.services.memory
        for page in memory.pages_of(self.version.object_id)[:2]:
            memory.drop(page)

    async def drain(self) -> None:
        """Everything runs to its end. Nothing to do and not at the end: it hangs."""
        self.origin.trouble = 0.0
        idle = 0
        while idle < 100:
            if not self.busy:
                await self.turns()  # The last outcomes are noted by callbacks.
                return
            stepped = [pool.step() for pool in self.pools]
            idle = 0 if any(stepped) else idle + 1
            await self.turns()
        raise AssertionError(f"reads hang: {self.rig.services.flights.describe()}")

    @property
    def busy(self) -> bool:
        running = any(not read.task.done() for read in self.reads)
        return (
            running or any(pool.busy for pool in self.pools) or len(self.rig.services.flights) > 0
        )

    def check(self) -> None:
        for read in self.reads:
            assert read.outcome != "running"
            # R7: whoever waits for a read owns the destination again at its end.
            assert read.destination == read.at_the_end
            if read.outcome == "done":
                stop = read.start + len(read.destination)
                assert read.destination == self.data[read.start : stop], "wrong bytes"
            else:
                self.check_partial(read)

    def check_partial(self, read: Read) -> None:
        """After a failure: verified bytes, zeros, or what lay there before."""
        expected = self.data[read.start : read.start + len(read.destination)]
        for got, good in zip(read.destination, expected, strict=True):
            assert got in (good, 0, 0xAA)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_interleaving_ends_clean_with_the_right_bytes(seed: int, tmp_path: Path) -> None:
    """R7, R22, R32, F26, F30, F55: whatever happens in whatever order, bytes are right, nobody
    touches a destination after its read ended, and no lease, charge, flight or stray is left."""
    chance = random.Random(seed)
    settings = small_settings(
        request_pages=chance.choice([1, 2, 8]),
        plaintext_bytes=chance.choice([3, 6, 16]) * PAGE,
        dirty_bytes=chance.choice([1, 2, 8]) * PAGE,
        reading_bytes=chance.choice([1, 4]) * PAGE,
        opening_bytes=chance.choice([1, 4]) * PAGE,
        admission_seconds=600.0, frames_seconds=600.0, disk_seconds=600.0, fetch_seconds=600.0,
        write_seconds=600.0, progress_seconds=600.0,
    )  # fmt: skip
    asyncio.run(_simulate(seed, chance, settings, tmp_path))


async def _simulate(seed: int, chance: random.Random, settings: ReadSettings, folder: Path) -> None:
    print(f"seed {seed}: replay with RACER_SIM_SEED={seed}")
    origin, store = ObedientOrigin(chance), ScriptedStore()
    data = content(chance.choice([5 * PAGE + 777, 3 * PAGE, 100]), seed)
    origin.put(b"k", data)
    rig = ReadRig(
        folder, settings=settings, pages_in_memory=chance.choice([2, 4, 16]), origin=origin,
        store=store, chance=chance,
    )  # fmt: skip
    async with rig:
        simulation = Simulation(rig, origin, store, chance, data, rig.version())
        for _ in range(STEPS):
            await simulation.step()
        await simulation.drain()
        simulation.check()
        await _still_serves(simulation)


async def _still_serves(simulation: Simulation) -> None:
    """R22: whatever is bad on disk by then, the whole object is read, and it is right."""
    await simulation.squeeze()
    for page in simulation.store.pages:
        simulation.store.rot(page)
    destination = bytearray(len(simulation.data))
    simulation._begin(0, destination, simulation._read(0, len(destination), destination))
    await simulation.drain()
    assert simulation.reads[-1].outcome == "done", simulation.reads[-1].outcome
    assert destination == simulation.data
