"""How late the event loop runs its timers: the price everybody pays for one slow callback.

Layer: bottom. Runs as a task on the loop it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PERIOD_SECONDS = 0.02


async def watch_loop_lag(report: Callable[[float], None]) -> None:
    """Calls `report(seconds late)` for each timer, for ever. Cancel it to end it."""
    while True:
        due = time.monotonic() + PERIOD_SECONDS
        await asyncio.sleep(PERIOD_SECONDS)
        report(max(0.0, time.monotonic() - due))
