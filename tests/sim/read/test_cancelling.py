"""Cancelling at every point: after each single step of a read, whatever it is doing then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.read_rig import FRAME, PAGE, ReadRig, content, small_settings
from tests.support.scripted_store import ScriptedStore
from tests.support.stepped_threads import SteppedThreads

DATA = content(2 * PAGE + 50)
STEPS_MAX = 400


class Stepper:
    """Moves the loop and the workers one step at a time."""

    def __init__(self, rig: ReadRig) -> None:
        threads = rig.threads
        pools = (threads.open, threads.disk, threads.origin)
        self.pools = [pool for pool in pools if isinstance(pool, SteppedThreads)]
        self.rig = rig
        self.count = 0

    async def step(self) -> None:
        self.count += 1
        if self.count % 2:
            await asyncio.sleep(0)
        else:
            self.pools[self.count // 2 % 3].step()

    async def settle(self) -> None:
        """Lets everything end, writes included."""
        idle = 0
        while idle < 20:
            stepped = [pool.step() for pool in self.pools]
            idle = 0 if any(stepped) else idle + 1
            await asyncio.sleep(0)

    async def run(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.step()
        await task


async def read(rig: ReadRig, destination: bytearray) -> None:
    view = memoryview(destination)
    await rig.reader.read_into(rig.version(), 0, len(DATA), view, rig.context(seconds=600))


async def read_part(rig: ReadRig, destination: bytearray) -> None:
    view = memoryview(destination)[: FRAME + 10]
    await rig.reader.read_into(rig.version(), 7, FRAME + 17, view, rig.context(seconds=600))


async def stream(rig: ReadRig, destination: bytearray) -> None:
    async for _ in rig.reader.stream(rig.version(), 0, len(DATA), rig.context(seconds=600)):
        pass


async def prefetch(rig: ReadRig, destination: bytearray) -> None:
    await rig.reader.prefetch(rig.version(), 0, len(DATA), rig.context(seconds=600))


@pytest.mark.parametrize("work", [read, read_part, stream, prefetch])
@pytest.mark.parametrize("state", ["cold", "disk", "rotten", "memory"])
def test_a_read_may_be_cancelled_after_any_step(
    tmp_path: Path, work: Callable[[ReadRig, bytearray], Awaitable[None]], state: str
) -> None:
    """R7: at every point cancelling ends the read, leaves its memory alone from then on, and
    leaves no lease, charge, flight or stray; the next read is right."""

    async def prepare(rig: ReadRig, stepper: Stepper, store: ScriptedStore) -> None:
        await stepper.run(rig.reader.evict("b", b"k", prefix=False))
        if state != "cold":
            await stepper.run(read(rig, bytearray(len(DATA))))
            await stepper.settle()
        if state in ("disk", "rotten"):
            rig.forget_memory()
        if state == "rotten":
            for page in store.pages:
                store.rot(page)

    async def main() -> None:
        store = ScriptedStore()
        rig = ReadRig(
            tmp_path, store=store, chance=random.Random(1), pages_in_memory=4,
            settings=small_settings(disk_seconds=600.0, progress_seconds=600.0),
        )  # fmt: skip
        async with rig:
            rig.origin.put(b"k", DATA)
            stepper = Stepper(rig)
            for steps in range(STEPS_MAX):
                await prepare(rig, stepper, store)
                destination = bytearray(b"\xaa" * len(DATA))
                task = asyncio.ensure_future(work(rig, destination))
                for _ in range(steps):
                    if not task.done():
                        await stepper.step()
                ended_by_itself = task.done()
                task.cancel()
                while not task.done():
                    await stepper.step()
                left = bytes(destination)
                await stepper.settle()
                assert destination == left, "touched after its read had ended"
                check_clean(rig)
                if ended_by_itself:
                    break
            else:
                raise AssertionError("the read never came to its end")
            again = bytearray(len(DATA))
            await stepper.run(read(rig, again))
            await stepper.settle()
            assert again == DATA

    asyncio.run(main())


def check_clean(rig: ReadRig) -> None:
    services = rig.services
    assert services.memory.leases == 0
    assert [budget.used for budget in services.admission.budgets] == [0, 0, 0, 0]
    assert [budget.waiting for budget in services.admission.budgets] == [0, 0, 0, 0]
    assert services.write_back.used == services.rooms.taken == 0
    assert len(services.flights) == len(services.strays) == len(rig.reader._strays) == 0
