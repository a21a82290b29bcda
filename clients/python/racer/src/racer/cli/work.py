"""Jobs of a command side by side, that end together.

Layer: cli, on `workers`, whose groups end also when Ctrl-C comes at the worst moment. The first
error, or Ctrl-C, ends all jobs: `abort` is called so that what waits for the daemon stops waiting,
and the error is raised once every job has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from racer.turns import Flag
from racer.workers import WorkerGroup

T = TypeVar("T")


def for_each(
    items: Iterable[T], work: Callable[[T], None], jobs: int, abort: Callable[[], None]
) -> None:
    """Calls `work` for every item on `jobs` threads. Raises the first error."""
    pending = iter(items)
    lock = threading.Lock()
    failures: list[BaseException] = []
    stopped = Flag()

    def run() -> None:
        while True:
            with lock:
                item = None if failures or stopped.is_set() else _next(pending)
            if item is None:
                return
            try:
                work(item[0])
            except BaseException as error:  # noqa: BLE001 - it is raised again by who waits.
                with lock:
                    failures.append(error)
                abort()
                return

    def stop() -> None:
        stopped.set()
        abort()

    group = WorkerGroup("racer-job", jobs, run, stop)
    try:
        group.start()
        group.wait()
    finally:
        group.end()
    if failures:
        raise failures[0]


def _next(pending: Iterator[T]) -> tuple[T] | None:
    for item in pending:
        return (item,)
    return None
