"""A window: so many items in progress at a time, the first failure ends all.

Layer: read; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
