"""Lets obstore's runtime put away what it was told to drop.

A dropped connection is closed by the runtime's thread that looked after it, when that thread next
has something to do; on a busy machine the last one may wait for that. One at most, ever: no leak,
but a descriptor too many for a test that counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator

import obstore
from obstore.store import MemoryStore

_SECONDS_MAX = 5.0


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@contextlib.contextmanager
def no_sockets_left() -> Iterator[None]:
    """Keeps obstore's threads busy until the sockets of the block are closed, or gives up."""
    before = _sockets()
    yield
    deadline = time.monotonic() + _SECONDS_MAX
    while _sockets() > before and time.monotonic() < deadline:
        gc.collect()  # A caught exception's frames may hold a store.
        asyncio.run(_work())


async def _work() -> None:
    store = MemoryStore()
    await asyncio.gather(*(obstore.put_async(store, f"{i}", b"x") for i in range(50)))
