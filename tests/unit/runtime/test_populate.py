"""Memory touched ahead of its use: really there, never more than asked for, never fatal."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from racerd.runtime.arena import FrameArena
from racerd.runtime.memory_map import MemoryMap
from racerd.runtime.populate import PopulateAhead
from racerd.units import KIB, MIB


def touched_bytes(descriptor: int) -> int:
    """What the kernel has allocated of a memfd."""
    return os.fstat(descriptor).st_blocks * 512


def test_an_arena_that_is_not_used_is_not_touched() -> None:
    """The memory tier costs what was used of it, and a little ahead."""
    with FrameArena(256 * KIB, 1024 * MIB) as arena:
        arena.take(1)
    with FrameArena(256 * KIB, 1024 * MIB) as arena:
        assert touched_bytes(arena.fd) < 512 * MIB


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 64 * MIB)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def mapping(descriptor: int) -> Iterator[MemoryMap]:
    mapping = MemoryMap(descriptor, 0, 64 * MIB)
    yield mapping
    mapping.close()


def test_a_refusal_ends_the_thread_and_nothing_else(
    mapping: MemoryMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(_: MemoryMap, start: int, __: int) -> int:
        asked.append(start)
        return 22

    monkeypatch.setattr(MemoryMap, "collapse", lambda *_: False)
    monkeypatch.setattr(MemoryMap, "populate", refuse)
    with PopulateAhead(mapping, ahead_bytes=MIB, name="ahead") as ahead:
        ahead._thread.join(30)
        assert not ahead._thread.is_alive()
        ahead.need(32 * MIB)
    assert asked == [0]


def test_it_goes_as_far_as_needed_and_no_further(
    mapping: MemoryMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    enough = threading.Event()

    def note(_: MemoryMap, start: int, stop: int) -> int:
        done.append((start, stop))
        if stop >= 24 * MIB:
            enough.set()
        return 0

    monkeypatch.setattr(MemoryMap, "collapse", lambda *_: False)
    monkeypatch.setattr(MemoryMap, "populate", note)
    ahead = PopulateAhead(mapping, ahead_bytes=8 * MIB, name="ahead")
    ahead.need(16 * MIB)
    ahead.need(MIB)  # What was asked for before still holds.
    with ahead:
        assert enough.wait(30)
    assert done == [(0, 8 * MIB), (8 * MIB, 16 * MIB), (16 * MIB, 24 * MIB)]


def test_huge_pages_are_asked_for_until_there_are_none(
    mapping: MemoryMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    enough = threading.Event()

    def populate(_: MemoryMap, __: int, stop: int) -> int:
        if stop == mapping.nbytes:
            enough.set()
        return 0

    def collapse(_: MemoryMap, start: int, __: int) -> bool:
        asked.append(start)
        return start == 0

    monkeypatch.setattr(MemoryMap, "collapse", collapse)
    monkeypatch.setattr(MemoryMap, "populate", populate)
    with PopulateAhead(mapping, ahead_bytes=64 * MIB, name="ahead") as ahead:
        assert enough.wait(30)
        assert ahead.huge_bytes == 8 * MIB
    assert asked == [0, 8 * MIB]
