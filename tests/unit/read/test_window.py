"""A window of items in progress: bounded, in order, ended as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from racerd.read.window import for_each_in_window, in_slices


def run(main: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(main())  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 3, 20])
def test_so_many_at_a_time_and_each_once(width: int) -> None:
    async def main() -> None:
        running, running_max, started = 0, 0, []

        async def work(item: int) -> None:
            nonlocal running, running_max
            started.append(item)
            running += 1
            running_max = max(running, running_max)
            await asyncio.sleep(0)
            running -= 1

        await for_each_in_window(iter(range(10)), width, work)
        assert started == list(range(10))
        assert running == 0 and running_max == min(width, 10)

    run(main)


@pytest.mark.parametrize("width", [1, 4])
def test_the_first_failure_ends_all_and_is_raised_as_it_is(width: int) -> None:
    """R7: nothing that was started goes on after the failure is told."""

    async def main() -> None:
        running: set[int] = set()

        async def work(item: int) -> None:
            running.add(item)
            try:
                if item == 2:
                    raise KeyError("the cause")
                if item > 2 or width > 1:
                    await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                running.discard(item)

        with pytest.raises(KeyError, match="the cause"):
            await for_each_in_window(iter(range(10)), width, work)
        assert not running

    run(main)


def test_a_cancel_is_not_lost_to_a_failure() -> None:
    """R7: cancelled and failing at once is cancelled, or its task would go on."""

    async def main() -> None:
        started = asyncio.Event()

        async def work(item: int) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError("on the way out") from None

        task = asyncio.ensure_future(for_each_in_window(iter(range(4)), 2, work))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(main)


def test_slices_let_the_loop_go_on() -> None:
    async def main() -> None:
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        assert [item async for item in in_slices(range(3000))] == list(range(3000))
        assert others >= 5
        task.cancel()
        await asyncio.wait([task])

    run(main)


@pytest.mark.parametrize("items", [[], [7]])
def test_a_single_item_needs_no_task(items: list[int]) -> None:
    """What most requests are: one batch of pages that memory has."""

    async def main() -> None:
        tasks = []

        async def work(item: int) -> None:
            tasks.append(asyncio.current_task())

        await for_each_in_window(iter(items), 8, work)
        assert tasks == [asyncio.current_task()] * len(items)

    run(main)
