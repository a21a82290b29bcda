"""Locks and waits that Ctrl-C cannot leave locked."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import racer
import racer.turns as turns_module
from clients.python.racer.tests.fake_daemon import FakeDaemon
from clients.python.racer.tests.patterns import MIB, pattern
from racer.deadline import Deadline
from racer.errors import DeadlineExceeded
from racer.lent import Lent
from racer.loading import load
from racer.turns import Flag, Turns
from tests.support.safetensors_bytes import model_file


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is woken, or waits until its deadline."""
    monkeypatch.setattr(turns_module, "_LOOK_SECONDS", 1e6)


def eventually(true: Callable[[], bool]) -> None:
    """Waits for what other threads do. Bounded; the wait is not what is tested."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_whoever_waits_gets_what_changes(no_second_look: None) -> None:
    """The one who has waited longest is woken, and nobody else."""
    turns = Turns()
    stock, got, attempts = [-1], list[int](), [0]

    def take() -> int | None:
        attempts[0] += 1
        return stock.pop() if stock else None

    assert turns.until(take, Deadline.after(60)) == -1
    threads = []
    for number in range(4):
        thread = threading.Thread(
            target=lambda number=number: got.append(
                10 * number + turns.until(take, Deadline.after(60))
            )
        )
        thread.start()
        threads.append(thread)
        eventually(lambda number=number: len(turns._waiting) == number + 1)
    attempts[0] = 0
    for number in range(4):
        with turns.lock:
            stock.append(number)
            turns.wake()
        eventually(lambda number=number: len(got) == number + 1)
    for thread in threads:
        thread.join()
    assert got == [0, 11, 22, 33]
    assert attempts[0] == 4
    assert not turns._waiting


def test_a_turn_that_is_not_taken_is_the_next_one_s(
    no_second_look: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is woken and goes without, for its deadline or an interrupt, wakes another."""
    turns, woken = Turns(), list[str]()

    def first() -> int | None:
        if "first" in woken:
            raise KeyboardInterrupt
        return None

    def second() -> int | None:
        return 1 if "second" in woken else None

    def wait_first() -> None:
        with pytest.raises(KeyboardInterrupt):
            turns.until(first, Deadline.after(60))

    threads = [
        threading.Thread(target=wait_first),
        threading.Thread(target=lambda: turns.until(second, Deadline.after(60))),
    ]
    for number, thread in enumerate(threads):
        thread.start()
        eventually(lambda number=number: len(turns._waiting) == number + 1)
    with turns.lock:
        woken += ["first", "second"]
        turns.wake()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


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
    turns, there, got = Turns(), list[int](), list[int]()
    looked = threading.Event()

    def look() -> int | None:
        looked.set()
        return there[0] if there else None

    thread = threading.Thread(
        target=lambda: got.append(turns.until(look, Deadline.after(600))), daemon=True
    )
    thread.start()
    looked.wait()
    there.append(1)
    eventually(lambda: got == [1])
    thread.join()
    assert not turns._waiting


def test_a_flag_wakes_all_who_wait_and_stays_set(no_second_look: None) -> None:
    flag = Flag()
    assert not flag.wait(0.001) and not flag.wait(0.0)
    assert not flag._turns._waiting, "who waited in vain leaves nothing"
    told: list[bool] = []
    threads = [threading.Thread(target=lambda: told.append(flag.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(flag._turns._waiting) == 3)
    flag.set()
    flag.set()
    for thread in threads:
        thread.join(30)
    assert told == [True] * 3
    assert flag.wait(60) and flag.is_set()


def test_what_is_lent_is_counted_as_long_as_somebody_has_it() -> None:
    class Thing:
        pass

    lent: Lent[Thing] = Lent()
    first, second = Thing(), Thing()
    lent.add(first)
    lent.add(second)
    assert lent.reached(2) and not lent.reached(3) and len(lent) == 2
    del second  # Its holder lost it.
    assert not lent.reached(2) and list(lent) == [first]
    assert lent.remove(first) and not lent.remove(first)
    assert not lent.reached(1)


def test_who_waits_for_a_connection_or_a_slot_gets_the_next_one(
    daemon: FakeDaemon, no_second_look: None
) -> None:
    daemon.put("llama", "w", pattern(3 * MIB))
    with racer.Client(socket=daemon.path, connections_max=1) as client:
        pool, ring, got = client._endpoint("local").pool, client._ring, list[object]()
        with pool.lease(Deadline.after(60)):
            thread = threading.Thread(target=lambda: got.append(pool.take(Deadline.after(60))))
            thread.start()
            eventually(lambda: len(pool._turns._waiting) == 1)
        thread.join(30)
        assert not thread.is_alive()
        pool.give_back(got.pop())  # type: ignore[arg-type]
        holds = [ring.enter(Deadline.after(60)) for _ in range(ring._slots)]
        thread = threading.Thread(target=lambda: got.append(ring.enter(Deadline.after(60))))
        thread.start()
        eventually(lambda: len(ring._turns._waiting) == 1)
        with holds.pop():
            pass
        thread.join(30)
        assert not thread.is_alive()
        # Those that are lost (an interrupt came before their holder had them) are made anew.
        holds.clear()
        got.clear()
        gc.collect()
        assert client.read("racer://local/llama/w") == pattern(3 * MIB)
        waiting = [ring.enter(Deadline.after(5)) for _ in range(ring._slots)]
        assert ring.take_nowait() is None
        for hold in waiting:
            hold.__exit__()


def test_closing_wakes_all_who_wait(daemon: FakeDaemon, no_second_look: None) -> None:
    client = racer.Client(socket=daemon.path, connections_max=1)
    pool, ring, told = client._endpoint("local").pool, client._ring, list[BaseException]()

    def waiting(take: Callable[[Deadline], object]) -> None:
        try:
            take(Deadline.after(600))
        except racer.Closed as error:
            told.append(error)

    holds = [ring.enter(Deadline.after(60)) for _ in range(ring._slots)]
    connection = pool.take(Deadline.after(60))
    threads = [
        threading.Thread(target=waiting, args=(take,), daemon=True)
        for take in (pool.take, pool.take, ring.enter, ring.enter)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(pool._turns._waiting) == len(ring._turns._waiting) == 2)
    client.close()
    eventually(lambda: len(told) == 4)
    for thread in threads:
        thread.join()
    pool.give_back(connection)
    for hold in holds:
        hold.__exit__()


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
