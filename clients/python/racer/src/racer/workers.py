"""Threads that certainly end.

Layer: bottom. An interrupt (Ctrl-C) may be raised between any two steps of the main thread, also in
the middle of starting a thread or of waiting for one: a group knows every thread that ever began,
and `end` returns, or raises the interrupt, only after the last of them has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# How long a thread that was being started when an interrupt came gets to begin. Only one that the
# system never made does not.
_BEGIN_SECONDS = 5.0


class WorkerGroup:
    """`count` threads that run `work`. Ended by `end`, also where `start` raised."""

    def __init__(self, name: str, count: int, work: Callable[[], None]) -> None:
        self._name = name
        self._count = count
        self._work = work
        self._changed = threading.Condition()
        self._asked = 0
        self._begun: list[threading.Thread] = []

    def start(self) -> None:
        """Starts all. Raises RuntimeError where the system gives no thread."""
        for number in range(self._count):
            # Daemons: a process that ends without closing must not wait for them.
            thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            self._asked += 1
            try:
                thread.start()
            except RuntimeError:
                self._asked -= 1
                raise

    def _run(self) -> None:
        with self._changed:
            self._begun.append(threading.current_thread())
            self._changed.notify_all()
        self._work()

    def wait(self) -> None:
        """Waits until the threads have ended by themselves; an interrupt ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._begun) == self._asked, _BEGIN_SECONDS)
        for thread in self._begun:
            thread.join()

    def end(self, stop: Callable[[], None]) -> None:
        """Calls `stop`, which has the threads end and may be called again, and waits for them all.

        An interrupt meanwhile is raised once they have ended.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                stop()
                self.wait()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
