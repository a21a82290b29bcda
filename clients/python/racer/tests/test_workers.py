"""Threads that certainly end: `WorkerGroup` under interrupts and a system without threads."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from racer.workers import WorkerGroup


@pytest.fixture
def interrupted() -> Iterator[SimpleQueue[int]]:
    """Ctrl-C raises as always, and tells other threads that it was raised."""
    raised: SimpleQueue[int] = SimpleQueue()

    def handler(number: int, frame: Any) -> None:
        raised.put(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield raised
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_work_that_ends_by_itself() -> None:
    """R36: `wait` returns when all have; `end` has nothing to stop then."""
    done: list[int] = []
    stops: list[int] = []
    group = WorkerGroup("group", 3, lambda: done.append(1), lambda: stops.append(1))
    group.start()
    group.wait()
    group.end()
    group.end()
    assert (done, stops) == ([1, 1, 1], [])


def test_the_rest_is_started_when_it_is_wanted() -> None:
    """`one_first`: one thread, until that one or another asks for more."""
    count = threading.Semaphore(0)
    go = threading.Event()

    def work() -> None:
        count.release()
        assert go.wait(60)

    group = WorkerGroup("group", 3, work, go.set, one_first=True)
    group.start()
    assert count.acquire(timeout=60)
    assert sum(t.name.startswith("group-") for t in threading.enumerate()) == 2  # And the keeper.
    group.start_rest()
    group.start_rest()
    for _ in range(2):
        assert count.acquire(timeout=60)
    group.end()
    assert not count.acquire(blocking=False)


def test_as_many_of_the_rest_as_there_is_work_for() -> None:
    count = threading.Semaphore(0)
    go = threading.Event()

    def work() -> None:
        count.release()
        assert go.wait(60)

    group = WorkerGroup("group", 8, work, go.set, one_first=True)
    group.start()
    group.start_rest(3)
    for _ in range(3):
        assert count.acquire(timeout=60)
    group.end()
    assert not count.acquire(blocking=False)


def test_a_rest_that_is_never_wanted_is_never_started() -> None:
    done: list[int] = []
    group = WorkerGroup("group", 3, lambda: done.append(1), lambda: None, one_first=True)
    group.start()
    group.wait()
    group.start_rest()  # Too late to mean anything.
    group.end()
    assert done == [1]
    nothing = WorkerGroup("group", 0, lambda: done.append(1), lambda: None, one_first=True)
    nothing.start()
    nothing.end()
    assert done == [1]


def test_end_stops_what_runs() -> None:
    """R36: `stop` is called once, and `end` waits for what it stops."""
    go = threading.Event()
    stops: list[int] = []

    def stop() -> None:
        stops.append(1)
        go.set()

    group = WorkerGroup("group", 2, go.wait, stop)
    group.start()
    group.end()
    group.end()
    assert stops == [1]


def test_the_end_of_the_owner_is_the_end_of_the_group() -> None:
    """R36: threads do not outlive what they work for, be its destructor interrupted."""

    class Owner:
        pass

    owner = Owner()
    go = threading.Event()
    group = WorkerGroup("group", 2, go.wait, go.set, owner=owner)
    group.start()
    del owner
    group.wait()
    assert go.is_set()
    group.end()


def test_an_interrupt_waits_for_the_threads(interrupted: SimpleQueue[int]) -> None:
    """R36: an interrupt while threads are being ended comes out after the last has ended."""
    returned: list[int] = []
    go = threading.Event()

    def work() -> None:
        go.wait()
        returned.append(1)

    def stop() -> None:
        for _ in range(2):
            interrupt()
            interrupted.get(timeout=30)
        go.set()

    group = WorkerGroup("group", 1, work, stop)
    group.start()
    with pytest.raises(KeyboardInterrupt):
        group.end()
    assert returned == [1]
    group.end()


def test_an_interrupt_ends_a_wait_at_once(interrupted: SimpleQueue[int]) -> None:
    """R36: waiting for work can be interrupted, so that it can be cancelled."""
    go = threading.Event()

    def work() -> None:
        interrupt()
        go.wait()

    group = WorkerGroup("group", 1, work, go.set)

    def start_and_wait() -> None:
        group.start()
        group.wait()

    with pytest.raises(KeyboardInterrupt):
        start_and_wait()
    group.end()


def refuse_after(count: int, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [count]

    def start(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return real(*arguments)

    return start


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_a_system_that_gives_no_thread(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """R36: whichever thread cannot be started, those that run are stopped, and it is told."""
    go = threading.Event()
    group = WorkerGroup("group", 3, go.wait, go.set)
    refusing = refuse_after(threads, _thread.start_new_thread)
    monkeypatch.setattr(_thread, "start_new_thread", refusing)
    monkeypatch.setattr(threading, "_start_new_thread", refusing)

    def start_and_wait() -> None:
        group.start()
        group.wait()

    with pytest.raises(RuntimeError, match="can't start"):
        start_and_wait()
    group.end()
    assert go.is_set() == (threads > 0)
