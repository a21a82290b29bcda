"""Another attempt, or not: few, jittered, within the deadline, counted by reason.

Layer: origin. Runs on origin threads; a pause ends at once when the call is cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from racerd.origin.call import Call
from racerd.origin.failures import Transient
from racerd.runtime.threads import without_frames
from racerd.telemetry import Metrics

T = TypeVar("T")

_PAUSE_SECONDS_FIRST = 0.1
_PAUSE_SECONDS_MAX = 5.0
_WAIT_SECONDS_MAX = 15.0  # A thread waits no longer for an origin that says "later".
_ATTEMPTS_MAX = 64  # Of one call, however much each of them brings.


class Retries:
    """The policy of one cache's origin: at most `limit` failures in a row without progress."""

    def __init__(self, cache: str, metrics: Metrics, limit: int) -> None:
        self._cache = cache
        self._metrics = metrics
        self._limit = limit

    def run(
        self, attempt: Callable[[], T], call: Call, progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Calls `attempt` until it returns, or fails other than with Transient.

        `progress` tells how many bytes are safe so far: an attempt that brought some starts the
        count of failures anew, so that a transfer which breaks often still ends. Raises the
        Transient's `final` when attempts or time are used up.
        """
        failures, safe = 0, progress()
        for _ in range(_ATTEMPTS_MAX):
            call.check()
            try:
                return attempt()
            except Transient as transient:
                failures = 1 if progress() > safe else failures + 1
                safe = progress()
                last = transient
                without_frames(last)  # They hold this frame, and views of the caller's memory.
            if failures > self._limit or not self._pause(last, failures, call):
                break
        raise last.final from last.__cause__

    def _pause(self, transient: Transient, failures: int, call: Call) -> bool:
        """Waits before the next attempt; returns False where that would take too long."""
        call.check()
        longest = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_FIRST * 2.0 ** (failures - 1))
        seconds = random.uniform(longest / 4, longest)
        if transient.retry_after_seconds is not None:
            seconds += transient.retry_after_seconds
        if seconds >= min(call.deadline.remaining_seconds(), _WAIT_SECONDS_MAX):
            return False
        self._metrics.origin_retries.labels(self._cache, transient.reason).inc()
        call.cancel.wait(seconds)
        return True
