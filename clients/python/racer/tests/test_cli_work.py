"""Jobs of a command side by side: `for_each` under errors and Ctrl-C."""

from __future__ import annotations

import signal
import threading

import pytest

from racer.cli.work import for_each


def test_each_item_once() -> None:
    done: list[int] = []
    for_each(range(10), done.append, 3, lambda: None)
    assert sorted(done) == list(range(10))


def test_the_first_error_ends_all() -> None:
    """What waits is aborted, what has not begun is not begun, and the error is raised."""
    aborted = threading.Event()
    waiting = threading.Barrier(2)
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        waiting.wait(60)
        if item == 0:
            raise LookupError("no such thing")
        assert aborted.wait(60)

    with pytest.raises(LookupError, match="no such thing"):
        for_each(range(10), work, 2, aborted.set)
    assert sorted(begun) == [0, 1]


def test_ctrl_c_waits_for_what_jobs_undo() -> None:
    """R36: an interrupt ends `for_each` only when every job has ended: nothing half-written is
    left behind by a job that was still removing it."""
    aborted, left = threading.Event(), threading.Event()
    waiting = threading.Barrier(2)
    undone_before_the_end: list[bool] = []

    def work(_item: int) -> None:
        waiting.wait(60)
        assert aborted.wait(60)
        undone_before_the_end.append(not left.wait(0.2))

    def interrupt() -> None:
        waiting.wait(60)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for_each(range(10), work, 1, aborted.set)
        left.set()
    finally:
        signal.signal(signal.SIGINT, before)
        interrupter.join()
    assert undone_before_the_end == [True]
