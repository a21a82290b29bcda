"""Walking many items without holding the loop, and a window of so many in progress at a time.

Layer: read; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from racerd.runtime.threads import settled

T = TypeVar("T")

_SLICE = 512


async def for_each_in_window(
    items: Iterator[T], width: int, work: Callable[[T], Awaitable[None]]
) -> None:
    """Runs `work` for every item, in order of start, at most `width` at a time.

    Raises the first failure once every other one has been cancelled and has ended. Cancelling
    does the same and ends as late: nothing that `work` started is left behind.
    """

    async def worker() -> None:
        for item in items:
            await work(item)

    ahead = list(islice(items, 2))
    items = chain(ahead, items)
    if width == 1 or len(ahead) < 2:
        await worker()  # Which needs no task of its own.
        return
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(worker()) for _ in range(width)]
    failed: set[asyncio.Task[None]] = set()
    try:
        # Not a TaskGroup: it would swallow a cancel that comes together with a failure.
        failed, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        while tasks:
            await settled(tasks.pop())
    # Popped, too: the failure will refer to this frame, which must not refer to the failure.
    del task
    while failed:
        await failed.pop()


async def in_slices(items: Sequence[T]) -> AsyncIterator[T]:
    """Yields `items`, and lets the loop do other work now and then."""
    for number, item in enumerate(items):
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        yield item
