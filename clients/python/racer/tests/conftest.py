"""What every test of the client gets: a daemon, a client, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

import racer
from clients.python.racer.tests.fake_daemon import FakeDaemon

_SETTLE_SECONDS = 5.0


def _held() -> Counter[str]:
    """Descriptors by kind, threads, and shared mappings of this process."""
    held: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            held["fd " + os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
    held.update(f"thread {thread.ident}" for thread in threading.enumerate())
    maps = Path("/proc/self/maps").read_text().splitlines()
    held["shared mapping"] = sum("memfd:" in line for line in maps)
    return held


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """A shell that starts this in the background has it ignore SIGINT, and all its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _warm_loop() -> None:
    """uvloop opens a pipe for the process when it runs first: nobody's leak."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a descriptor, a thread or a shared mapping."""
    before = _held()
    yield
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        gc.collect()
        left = _held() - before
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)  # What another thread or the kernel is taking down gets a moment.
    assert not left


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "run") as running:
        yield running


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[racer.Client]:
    with racer.Client(run_dir=daemon.run_dir, timeout=30) as opened:
        yield opened


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the client makes, which cost no time."""
    made: list[float] = []

    def sleep(seconds: float) -> None:
        if seconds:
            made.append(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    return made
