"""The ends of calls of the asyncio client: nothing is left, however often one is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from racer.aio.gpu import AsyncGpuSide, AsyncStagingRing
from racer.aio.threads import to_end


def test_a_call_that_is_cancelled_twice_waits_for_its_thread_all_the_same() -> None:
    """The thread still has the caller's memory, and what it makes is not lost."""
    release, undone = threading.Event(), []

    def work() -> str:
        release.wait()
        return "made"

    async def main() -> None:
        call = asyncio.ensure_future(to_end(work, undone.append))
        for _ in range(3):
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not call.done(), "it left its thread behind"
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert undone == ["made"]

    try:
        asyncio.run(main())
    finally:
        release.set()


class Slots:
    """Stands for a ring, on a machine without a GPU; what comes first fails."""

    def __init__(self) -> None:
        self.back: list[object] = []

    async def one_fails(self, slot: object = None) -> None:
        self.back.append(slot)
        if len(self.back) == 1:
            raise asyncio.CancelledError

    aclose = give_back = one_fails


def test_every_slot_comes_back_though_one_cannot() -> None:
    """A slot that stays out is room that no later read has."""
    slots = Slots()

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await AsyncStagingRing.give_all_back(slots, ["a", "b", "c"])  # type: ignore[arg-type]

    asyncio.run(main())
    assert sorted(map(str, slots.back)) == ["a", "b", "c"]


def test_every_ring_is_closed_though_one_cannot() -> None:
    slots = Slots()

    async def main() -> None:
        side = AsyncGpuSide(None)  # type: ignore[arg-type]
        side._rings = {"one": slots, "other": slots}  # type: ignore[dict-item]
        with pytest.raises(asyncio.CancelledError):
            await side.aclose()

    asyncio.run(main())
    assert len(slots.back) == 2
