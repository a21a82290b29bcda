"""Locks and waits that Ctrl-C cannot leave locked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon
from clients.python.racer.tests.patterns import MIB, pattern
from racer.deadline import Deadline
from racer.errors import DeadlineExceeded
from racer.loading import load
from racer.turns import Flag, Turns
from tests.support.safetensors_bytes import model_file


def test_whoever_waits_gets_what_changes() -> None:
    turns, stock, got = Turns(), [0], []

    def take() -> int | None:
        return stock.pop() if stock else None

    assert turns.until(take, Deadline.after(60)) == 0
    threads = [
        threading.Thread(target=lambda: got.append(turns.until(take, Deadline.after(60))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for number in range(4):
        with turns.lock:
            stock.append(number)
            turns.changed()
    for thread in threads:
        thread.join()
    assert sorted(got) == [0, 1, 2, 3]


def test_waiting_ends_with_the_deadline_and_with_errors() -> None:
    turns = Turns()
    with pytest.raises(DeadlineExceeded):
        turns.until(lambda: None, Deadline.after(0.01))

    def fails() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        turns.until(fails, Deadline.after(60))
    assert not turns.lock.locked()


def test_a_wake_up_that_never_came() -> None:
    """An interrupt hit the one who had changed something, before it could say so."""
    turns, there, looks = Turns(), [False], []
    looked = threading.Event()

    def look() -> bool | None:
        looks.append(1)
        looked.set()
        return True if there[0] else None

    thread = threading.Thread(target=turns.until, args=(look, Deadline.after(60)))
    thread.start()
    looked.wait()
    there[0] = True
    thread.join()
    assert len(looks) > 1


def test_a_flag_wakes_all_who_wait_and_stays_set() -> None:
    flag = Flag()
    assert not flag.wait(0.001) and not flag.wait(0.0)
    told: list[bool] = []
    threads = [threading.Thread(target=lambda: told.append(flag.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    flag.set()
    flag.set()
    for thread in threads:
        thread.join()
    assert told == [True] * 3
    assert flag.wait(60) and flag.is_set()


@pytest.fixture
def conditions_entered() -> Iterator[list[str]]:
    """The functions of `threading` that take a lock for their caller, as this thread calls them.

    An interrupt as they return leaves the lock taken, for a block that never begins.
    """
    entered: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == threading.__file__ and code.co_name in ("__enter__", "acquire"):
            entered.append(code.co_qualname)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield entered
    finally:
        sys.settrace(before)


def test_what_the_user_s_thread_calls_takes_locks_in_one_step(
    daemon: FakeDaemon, conditions_entered: list[str]
) -> None:
    """R36: Ctrl-C in the middle of a read or a load never keeps `close` from returning."""
    daemon.put("llama", "w", pattern(3 * MIB))
    daemon.put("llama", "m/m.safetensors", model_file({"a": ("U8", [3 * MIB])})[0])
    with racer.Client(socket=daemon.path) as client:
        assert client.read("racer://local/llama/w") == pattern(3 * MIB)
        with client.landing(MIB) as landing:
            landing.read("racer://local/llama/w", 0, 10)
    for share in ("auto", "off"):
        stream = load(
            "racer://local/llama/m",
            framework="numpy",
            socket=daemon.path,
            share=share,  # type: ignore[arg-type]
        )
        assert len(dict(stream)["a"]) == 3 * MIB
    assert conditions_entered == []
