"""The doorkeeper's turns, and the stopwatch of a newcomer."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable

import pytest
import uvloop

from racerd.serve import doorkeeper
from racerd.serve.door import PRICE_SECONDS
from racerd.serve.doorkeeper import Doorkeeper, Newcomer
from racerd.telemetry import Metrics


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(doorkeeper, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_sockets_have_turns_one_after_the_other(clock: Clock) -> None:
    """One cache's crowd does not keep the newcomers of another outside."""
    called: list[str] = []

    async def main() -> None:
        keeper, over = Doorkeeper(Metrics()), asyncio.Event()

        def again(name: str) -> Callable[[], None]:
            def turn() -> None:
                called.append(name)
                keeper.wait(turn)
                if len(called) >= 6:
                    over.set()

            return turn

        first, second = again("first"), again("second")
        assert keeper.offer(first)
        assert not keeper.offer(second)
        await over.wait()
        keeper.forget(first)
        keeper.forget(second)

    uvloop.run(main())
    assert called[:6] == ["first", "first", "second", "first", "second", "first"]


def test_a_shut_door_opens_when_the_others_are_done(clock: Clock) -> None:
    async def main() -> None:
        keeper, called = Doorkeeper(Metrics()), asyncio.Event()
        keeper.door.work_began()
        keeper.entered()
        keeper.took(1.0)
        assert keeper.describe().startswith("shut")
        assert not keeper.offer(called.set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not called.is_set()
        keeper.door.work_ended(clock.now - 1.0)
        await called.wait()

    uvloop.run(main())


def test_a_turn_that_is_forgotten_is_not_called(clock: Clock) -> None:
    async def main() -> None:
        keeper, called = Doorkeeper(Metrics()), asyncio.Event()

        def never() -> None:
            raise AssertionError("it was forgotten")

        keeper.wait(never)
        keeper.forget(never)
        keeper.wait(never)
        keeper.wait(called.set)
        keeper.forget(never)
        await called.wait()

    uvloop.run(main())


def test_steps_are_counted_and_waits_are_not(clock: Clock) -> None:
    """What it takes is the loop's time, in its task and in its callbacks."""

    async def main() -> None:
        newcomer, gate = Newcomer(Doorkeeper(Metrics())), asyncio.Event()

        async def work() -> str:
            clock.now += PRICE_SECONDS / 4
            await gate.wait()
            clock.now += PRICE_SECONDS / 4
            return "done"

        task = asyncio.ensure_future(asyncio.wait_for(newcomer.timed(work()), None))
        await asyncio.sleep(0)
        clock.now += 1000.0
        gate.set()
        assert await task == "done"
        assert not newcomer.established

        def callback() -> None:
            clock.now += PRICE_SECONDS

        newcomer.timing(callback)()
        assert newcomer.established

    uvloop.run(main())


def test_what_newcomers_take_counts_while_others_are_served(clock: Clock) -> None:
    async def main() -> None:
        metrics = Metrics()
        keeper = Doorkeeper(metrics)

        def taken() -> float | None:
            return metrics.registry.get_sample_value("racer_newcomer_loop_seconds_total")

        Newcomer(keeper).timing(lambda: setattr(clock, "now", clock.now + 0.5))()
        assert taken() == 0.0
        keeper.door.work_began()
        Newcomer(keeper).timing(lambda: setattr(clock, "now", clock.now + 0.5))()
        assert taken() == 0.5

    uvloop.run(main())


def test_errors_and_cancelling_pass_through_the_stopwatch(clock: Clock) -> None:
    """R7: what is awaited through it ends as if it were awaited itself."""
    ended: list[str] = []

    async def main() -> None:
        newcomer = Newcomer(Doorkeeper(Metrics()))

        async def work() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # It may still have something to end.
                ended.append("cancelled")
                raise

        async def broken() -> None:
            await asyncio.sleep(0)
            raise ValueError("of its own")

        async def through() -> None:
            await newcomer.timed(work())

        task = asyncio.ensure_future(through())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        with pytest.raises(ValueError, match="of its own"):
            await newcomer.timed(broken())

    uvloop.run(main())
    assert ended == ["cancelled"]
