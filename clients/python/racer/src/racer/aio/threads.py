"""Work that would hold the loop, on a thread, and never beyond the call that asked for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_end(function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Runs `function` on a thread and returns its result.

    A cancelled caller waits until the thread is done with the caller's memory, however often it is
    cancelled; a result that nobody gets any more is passed to `undo`.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # Once more changes nothing.
                await asyncio.wait({running})
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise
