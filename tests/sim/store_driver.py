"""Drives a store without threads: its chores run when the test says so."""

from __future__ import annotations

from collections.abc import Callable

from racerd.store.housekeeper import Work


class InlineKeeper:
    """A disk's keeper that does everything at once, on the caller's thread."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.work = work
        self.stopping = False
        self.between_steps: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.work.begin()

    def nudge(self) -> None:
        """Chores wait for the test's next `tick`."""

    def ask(self, call: Callable[[], None], wait_seconds: float) -> bool:
        call()
        return True

    def run_tasks(self) -> None:
        self.between_steps()

    def stop(self, wait_seconds: float) -> bool:
        self.stopping = True
        self.work.end()
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
