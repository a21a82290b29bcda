"""Memory touched ahead of its use: really there, never more than asked for, never fatal."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from racerd.runtime import populate as module
from racerd.runtime.arena import FrameArena
from racerd.runtime.populate import PopulateAhead, populate
from racerd.units import KIB, MIB


def touched_bytes(descriptor: int) -> int:
    """What the kernel has allocated of a memfd."""
    return os.fstat(descriptor).st_blocks * 512


@pytest.fixture
def supported() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        if populate(mapping, 0, mmap.PAGESIZE) != 0:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")


@pytest.mark.usefixtures("supported")
def test_exactly_the_range_is_touched_and_its_bytes_are_kept() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 8 * MIB)
    with mmap.mmap(descriptor, 8 * MIB) as mapping:
        mapping[2 * MIB : 2 * MIB + 4] = b"kept"
        assert populate(mapping, 2 * MIB, 3 * MIB) == 0
        assert MIB <= touched_bytes(descriptor) <= 3 * MIB  # A huge page may be 2 MiB.
        assert mapping[2 * MIB : 2 * MIB + 4] == b"kept"
    os.close(descriptor)


def test_what_the_kernel_refuses_is_an_errno_not_a_signal() -> None:
    """L49: memory that cannot be had is never a fault in the daemon."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        assert populate(mapping, 1, mmap.PAGESIZE) != 0  # Not on a page.


@pytest.mark.usefixtures("supported")
def test_an_arena_that_is_not_used_is_not_touched() -> None:
    """The memory tier costs what was used of it, and a little ahead."""
    with FrameArena(256 * KIB, 1024 * MIB) as arena:
        arena.take(1)
    with FrameArena(256 * KIB, 1024 * MIB) as arena:
        assert touched_bytes(arena.fd) < 512 * MIB


def test_a_refusal_ends_the_thread_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(_: mmap.mmap, start: int, __: int) -> int:
        asked.append(start)
        return 22

    monkeypatch.setattr(module, "populate", refuse)
    with mmap.mmap(-1, 32 * MIB) as mapping:
        with PopulateAhead(mapping, ahead_bytes=MIB, name="ahead") as ahead:
            ahead._thread.join(30)
            assert not ahead._thread.is_alive()
            ahead.need(32 * MIB)
        assert asked == [0]


def test_it_goes_as_far_as_needed_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    enough = threading.Event()

    def note(_: mmap.mmap, start: int, stop: int) -> int:
        done.append((start, stop))
        if stop >= 24 * MIB:
            enough.set()
        return 0

    monkeypatch.setattr(module, "populate", note)
    with mmap.mmap(-1, 64 * MIB) as mapping:
        ahead = PopulateAhead(mapping, ahead_bytes=8 * MIB, name="ahead")
        ahead.need(16 * MIB)
        ahead.need(MIB)  # What was asked for before still holds.
        with ahead:
            assert enough.wait(30)
        assert done == [(0, 8 * MIB), (8 * MIB, 16 * MIB), (16 * MIB, 24 * MIB)]
