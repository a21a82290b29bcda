"""What every test gets: nothing may be left when it ends.

After each test the process has the descriptors, threads, child processes and shared-memory
mappings it had before; the fixture is autouse, so a leak fails the test that made it.
"""

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

import obstore
import pytest
import uvloop
from obstore.store import MemoryStore

_SETTLE_SECONDS = 5.0


def _descriptors() -> Counter[str]:
    """Open descriptors by what they refer to, numbers left out."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
    return found


def _kinds(descriptors: Counter[str]) -> Counter[str]:
    """Sockets, pipes and anonymous inodes have a number in their name: compare their kind."""
    kinds: Counter[str] = Counter()
    for name, count in descriptors.items():
        kinds[name.partition(":[")[0] if ":[" in name else name] += count
    return kinds


def _threads() -> set[str]:
    return {f"{t.name} ({t.ident})" for t in threading.enumerate() if t.is_alive()}


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return found


def _shared_mappings() -> Counter[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.partition("memfd:")[2] for line in maps if "memfd:" in line)


def _left(before: tuple[object, ...], after: tuple[object, ...]) -> list[str]:
    names = ("descriptor", "thread", "child process", "shared mapping")
    left = []
    for name, old, new in zip(names, before, after, strict=True):
        extra = new - old  # type: ignore[operator]
        left += [f"{name} left behind: {item}" for item in extra]
    return left


def _snapshot() -> tuple[object, ...]:
    return (_kinds(_descriptors()), _threads(), _children(), _shared_mappings())


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """A shell that starts this in the background has it ignore SIGINT, and all its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _warm_runtimes() -> None:
    """Starts the process-wide runtimes once: their descriptors are nobody's leak."""
    uvloop.run(asyncio.sleep(0))
    obstore.put(MemoryStore(), "warm", b"x")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a descriptor, thread, child or shared mapping (R5, R7)."""
    before = _snapshot()
    yield
    # What is being torn down by another thread or by the kernel gets a moment to go.
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (left := _left(before, _snapshot())) and time.monotonic() < deadline:
        gc.collect()  # Costs tens of milliseconds: only where something seems to be left.
        time.sleep(0.01)
    assert not left, "\n".join(left)
