"""Jobs of a command side by side, that end together.

Layer: cli. The first error, or Ctrl-C, ends all of them: `abort` is called so that what waits for
the daemon stops waiting, and the error is raised once every thread has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def for_each(
    items: Iterable[T], work: Callable[[T], None], jobs: int, abort: Callable[[], None]
) -> None:
    """Calls `work` for every item on `jobs` threads. Raises the first error."""
    pending = iter(items)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def run() -> None:
        while True:
            with lock:
                item = None if failures else _next(pending)
            if item is None:
                return
            try:
                work(item[0])
            except BaseException as error:  # noqa: BLE001 - it is raised again by who waits.
                with lock:
                    failures.append(error)
                abort()
                return

    threads = [threading.Thread(target=run, name=f"racer-job-{n}") for n in range(jobs)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in threads:
            thread.join()
    except BaseException as error:
        with lock:
            failures.insert(0, error)
        abort()
        raise
    finally:
        for thread in started:
            thread.join()
    if failures:
        raise failures[0]


def _next(pending: Iterator[T]) -> tuple[T] | None:
    for item in pending:
        return (item,)
    return None
