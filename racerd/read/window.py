"""Walking many items without holding the loop, and a window of so many in progress at a time.

Layer: read; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

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

    if width == 1:
        await worker()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
    else:
        return
    raise first


async def in_slices(items: Sequence[T]) -> AsyncIterator[T]:
    """Yields `items`, and lets the loop do other work now and then."""
    for number, item in enumerate(items):
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        yield item
