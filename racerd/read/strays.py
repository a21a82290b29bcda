"""Calls that nobody waits for any more, and what they still hold.

Layer: read; loop thread only. A call on a worker thread cannot be stopped. When its reader has left
or lost patience the call is a **stray**: its buffers and charges stay taken until it returns, and
only then are they given back (R7). The daemon waits for its strays on the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from racerd.runtime.threads import Job, settled


class Strays:
    """The strays of the node."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._futures)

    def leave(self, job: Job[Any], release: Callable[[], None]) -> None:
        """Cancels `job` and calls `release` on the loop once no thread touches its buffers."""
        job.cancel()
        self._futures.add(job.future)
        job.future.add_done_callback(partial(self._ended, release))

    def watch(self, job: Job[Any]) -> None:
        """Lets `job` run to its end, with or without somebody who waits for it."""
        self._futures.add(job.future)
        job.future.add_done_callback(partial(self._ended, _nothing))

    def _ended(self, release: Callable[[], None], future: asyncio.Future[Any]) -> None:
        self._futures.discard(future)
        if not future.cancelled():
            future.exception()  # Marks it as seen: nobody is left to be told.
        release()

    async def close(self) -> None:
        """Waits for every stray."""
        for future in list(self._futures):
            await settled(future)
        await asyncio.sleep(0)  # Lets the callbacks of the last ones run.


def _nothing() -> None:
    """A stray that holds nothing."""
