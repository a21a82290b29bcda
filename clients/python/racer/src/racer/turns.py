"""A lock, and waiting for what it guards, that Ctrl-C cannot leave locked.

Layer: bottom; any thread. An interrupt is raised in the main thread between almost any two steps of
Python: also inside `Condition.__enter__`, when the lock is taken and the `with` block has not
begun. Such a lock stays locked, and closing the client waits for it for ever. A plain lock is taken
together with the beginning of its block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from racer.deadline import Deadline
from racer.errors import DeadlineExceeded

T = TypeVar("T")

# An interrupt may also hit who wakes the others, before it did: they look again after so long.
_LOOK_SECONDS = 0.5


class Turns:
    """`lock` guards something; `until` waits for it to change, `wake` says that it did."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: list[
            threading.Lock
        ] = []  # One for each who waits, locked; the oldest first.

    def until(self, attempt: Callable[[], T | None], deadline: Deadline) -> T:
        """What `attempt` returns as soon as that is not None; it is called with the lock held.

        Raises what `attempt` raises, and DeadlineExceeded.
        """
        with self.lock:
            got = attempt()
            if got is not None:
                return got
        turn = threading.Lock()
        turn.acquire()
        served = False
        try:
            while True:
                with self.lock:
                    got = attempt()
                    if got is not None:
                        served = True
                        return got
                    if turn not in self._waiting:
                        self._waiting.append(turn)
                turn.acquire(timeout=min(deadline.check(), _LOOK_SECONDS))
        finally:
            with self.lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif not served:
                    self.wake()  # It was this one's turn, and it goes without.

    def wake(self) -> None:
        """With the lock held: who has waited longest tries again."""
        if self._waiting:
            self._waiting.pop(0).release()

    def wake_all(self) -> None:
        """With the lock held."""
        while self._waiting:
            self.wake()


class Flag:
    """Set once, and for good; whoever waits returns early then."""

    def __init__(self) -> None:
        self._set = False
        self._turns = Turns()

    def set(self) -> None:
        self._set = True
        with self._turns.lock:
            self._turns.wake_all()

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        """Waits so long at most; whether it is set."""
        if seconds > 0:
            with contextlib.suppress(DeadlineExceeded):
                self._turns.until(lambda: self._set or None, Deadline.after(seconds))
        return self._set
