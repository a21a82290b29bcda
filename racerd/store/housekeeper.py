"""A thread of one's own: for what a disk does beside serving.

Layer: store. The thread calls `begin` once, then runs what others ask for and a `tick` now and
then, then `end`. Whoever asks waits a bounded time only, because a disk may hang.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0


class Work(Protocol):
    """What a housekeeper does. All of it runs on the housekeeper's thread."""

    def begin(self) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...


class Keeper(Protocol):
    """Who does a disk's work: a thread, or in tests whoever drives them."""

    @property
    def stopping(self) -> bool: ...

    def start(self) -> None: ...

    def nudge(self) -> None: ...

    def ask(self, call: Callable[[], None], wait_seconds: float) -> bool: ...

    def run_tasks(self) -> None: ...

    def stop(self, wait_seconds: float) -> bool: ...


class _Task:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.done = threading.Event()


class Housekeeper:
    """Runs `work` on a daemon thread called `name`."""

    def __init__(self, name: str, work: Work, *, tick_seconds: float = TICK_SECONDS) -> None:
        self._work = work
        self._tick_seconds = tick_seconds
        self._tasks: deque[_Task] = deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        self._started = True
        self._thread.start()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def nudge(self) -> None:
        """Makes the next tick come now. From any thread."""
        self._wake.set()

    def ask(self, call: Callable[[], None], wait_seconds: float) -> bool:
        """Runs `call` on the thread. Returns whether it ended within `wait_seconds`.

        A call that is not waited for any longer still runs when its turn comes.
        """
        if not self._started or self.stopping:
            return False
        task = _Task(call)
        self._tasks.append(task)
        self._wake.set()
        return task.done.wait(wait_seconds)

    def stop(self, wait_seconds: float) -> bool:
        """Ends the thread after its `end`. Returns whether it ended within `wait_seconds`."""
        self._stopping.set()
        self._wake.set()
        if self._started:
            self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._guarded(self._work.begin)
        while not self.stopping:
            self._wake.wait(self._tick_seconds)
            self._wake.clear()
            self.run_tasks()
            self._guarded(self._work.tick)
        self.run_tasks()
        self._guarded(self._work.end)

    def run_tasks(self) -> None:
        """Runs what was asked for. On the thread only: a long chore calls it between steps."""
        while self._tasks:
            task = self._tasks.popleft()
            self._guarded(task.call)
            task.done.set()

    def _guarded(self, call: Callable[[], None]) -> None:
        """A defect in one chore must not end all others: it is told, with its traceback."""
        try:
            call()
        except Exception:
            log.exception("%s: a chore failed; this is a defect of racerd", self._thread.name)
