"""The doorkeeper: has each socket let its newcomers in when the door is open, in turn.

Layer: serve, loop thread; one for all caches of a daemon, as they share the loop. Drives the pure
`Door` with the clock, one timer, and a stopwatch for what newcomers take.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from racerd.serve.door import CALM_SECONDS, PRICE_SECONDS, Door
from racerd.telemetry import Metrics

T = TypeVar("T")

# uvloop counts milliseconds: less would turn the loop in a circle. And whoever kept the door shut
# may have nothing to do any more before the time that was foreseen.
_TIMER_SECONDS_MIN = 0.001
_TIMER_SECONDS_MAX = CALM_SECONDS


class Doorkeeper:
    """Calls turns one by one. `door` is shared with the connections, which say when they work."""

    def __init__(self, metrics: Metrics) -> None:
        self.door = Door()
        self._taken = metrics.newcomer_loop_seconds
        self._turns: deque[Callable[[], None]] = deque()
        self._next: asyncio.Handle | None = None

    def offer(self, turn: Callable[[], None]) -> bool:
        """Calls `turn` now if the door is open and nobody waits, else once when it is its turn.

        Returns whether it was called now. A turn that waits is not to be offered again.
        """
        if not self._turns and not self.door.wait_seconds(time.perf_counter()):
            self._call(turn)
            return True
        self.wait(turn)
        return False

    def wait(self, turn: Callable[[], None]) -> None:
        """Calls `turn` once: in another turn of the loop, when the door is open."""
        self._turns.append(turn)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._look)

    def forget(self, turn: Callable[[], None]) -> None:
        """`turn` is not called any more, if it waits."""
        if turn in self._turns:
            self._turns.remove(turn)
        if not self._turns and self._next is not None:
            self._next.cancel()
            self._next = None

    def _look(self) -> None:
        self._next = None
        seconds = self.door.wait_seconds(time.perf_counter())
        if not seconds:
            self._call(self._turns.popleft())
        if self._turns and self._next is None:
            loop = asyncio.get_running_loop()
            if seconds:
                pause = min(max(seconds, _TIMER_SECONDS_MIN), _TIMER_SECONDS_MAX)
                self._next = loop.call_later(pause, self._look)
            else:
                self._next = loop.call_soon(self._look)

    def _call(self, turn: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            turn()
        finally:
            self.took(time.perf_counter() - began)

    def entered(self) -> None:
        """A newcomer was let in."""
        self.door.entered(time.perf_counter())

    def took(self, seconds: float) -> None:
        """Newcomers have had `seconds` of the loop."""
        if self.door.took(seconds, time.perf_counter()):
            self._taken.inc(seconds)

    def describe(self) -> str:
        """For people: open or shut, and why."""
        return self.door.describe(time.perf_counter())


class Newcomer:
    """What one connection has had of the loop since it was let in, put to the door's account.

    `established` once that is the price. A connection asks between two exchanges, and has nothing
    timed any more from then on: being established costs nothing.
    """

    __slots__ = ("_keeper", "_taken_seconds")

    def __init__(self, keeper: Doorkeeper) -> None:
        self._keeper = keeper
        self._taken_seconds = 0.0

    @property
    def established(self) -> bool:
        return self._taken_seconds >= PRICE_SECONDS

    def timing(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback`, with the time that it takes counted."""

        def timed() -> None:
            began = time.perf_counter()
            try:
                callback()
            finally:
                self._took(time.perf_counter() - began)

        return timed

    @types.coroutine
    def timed(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Awaits `work`, with the time of its steps counted: not what it waits."""
        step: Callable[[Any], Any] = work.send
        sent: Any = None
        try:
            while True:
                began = time.perf_counter()
                try:
                    awaited = step(sent)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self._took(time.perf_counter() - began)
                try:
                    step, sent = work.send, (yield awaited)
                except BaseException as error:  # noqa: BLE001  for `work`, as if it were awaited
                    step, sent = work.throw, error
        finally:
            work.close()

    def _took(self, seconds: float) -> None:
        self._taken_seconds += seconds
        self._keeper.took(seconds)
