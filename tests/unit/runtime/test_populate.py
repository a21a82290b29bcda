"""Memory touched ahead of its use: really there, never more than asked for, never fatal."""

from __future__ import annotations

import errno
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
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(_: MemoryMap, start: int, __: int) -> int:
        asked.append(start)
        return 22

    monkeypatch.setattr(MemoryMap, "collapse", lambda *_: errno.EINVAL)
    monkeypatch.setattr(MemoryMap, "populate", refuse)
    with PopulateAhead(mapping, descriptor, ahead_bytes=MIB, name="ahead") as ahead:
        ahead._thread.join(30)
        assert not ahead._thread.is_alive()
        ahead.need(32 * MIB)
    assert asked == [0]


def test_it_goes_as_far_as_needed_and_no_further(
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    enough = threading.Event()

    def note(_: MemoryMap, start: int, stop: int) -> int:
        done.append((start, stop))
        if stop >= 24 * MIB:
            enough.set()
        return 0

    monkeypatch.setattr(MemoryMap, "collapse", lambda *_: errno.EINVAL)
    monkeypatch.setattr(MemoryMap, "populate", note)
    ahead = PopulateAhead(mapping, descriptor, ahead_bytes=8 * MIB, name="ahead")
    ahead.need(16 * MIB)
    ahead.need(MIB)  # What was asked for before still holds.
    with ahead:
        assert enough.wait(30)
    assert done == [(0, 8 * MIB), (8 * MIB, 16 * MIB), (16 * MIB, 24 * MIB)]


def touched_until(enough: threading.Event, mapping: MemoryMap, descriptor: int) -> PopulateAhead:
    """Touches all of it, and asks for refused huge pages again at once, until `enough` is set."""
    with PopulateAhead(
        mapping, descriptor, ahead_bytes=mapping.nbytes, name="ahead", retry_seconds=0
    ) as ahead:
        assert enough.wait(30)
    return ahead


def test_a_kernel_that_cannot_is_asked_for_huge_pages_once(
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    enough = threading.Event()

    def populate(_: MemoryMap, __: int, stop: int) -> int:
        if stop == mapping.nbytes:
            enough.set()
        return 0

    def collapse(_: MemoryMap, __: int, start: int, ___: int) -> int:
        asked.append(start)
        return errno.EINVAL

    monkeypatch.setattr(MemoryMap, "collapse", collapse)
    monkeypatch.setattr(MemoryMap, "populate", populate)
    assert touched_until(enough, mapping, descriptor).huge_bytes == 0
    assert asked == [0]


def test_huge_pages_that_were_refused_are_asked_for_again(
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that writes from the memory makes the kernel refuse; it will have ended later on."""
    asked: list[int] = []
    enough = threading.Event()

    def collapse(_: MemoryMap, __: int, start: int, ___: int) -> int:
        asked.append(start)
        if start in (16 * MIB, 40 * MIB) and asked.count(start) < 4:
            return errno.EAGAIN
        if asked.count(40 * MIB) == 4:
            enough.set()
        return 0

    monkeypatch.setattr(MemoryMap, "collapse", collapse)
    assert touched_until(enough, mapping, descriptor).huge_bytes == mapping.nbytes
    assert sorted(asked) == sorted([*range(0, 64 * MIB, 8 * MIB), *[16 * MIB, 40 * MIB] * 3])


def test_what_stays_refused_is_asked_for_less_and_less(
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = errno.EAGAIN
    monkeypatch.setattr(MemoryMap, "collapse", lambda *_: answer)
    ahead = PopulateAhead(mapping, descriptor, ahead_bytes=MIB, name="ahead", retry_seconds=1)
    assert ahead._pause_seconds() is None
    for start in (0, 8 * MIB):
        ahead._ask_for_huge_pages(start, start + 8 * MIB)
    pauses = []
    for _ in range(200):
        pauses.append(ahead._pause_seconds())
        ahead._ask_again()
    assert pauses[::8][:4] == [1, 2, 4, 8]
    assert pauses[-1] == 60
    answer = 0
    ahead._ask_again()
    assert ahead._pause_seconds() == 1, "what was given once may be given again"


def test_one_refusal_for_another_reason_is_no_word_on_the_kernel(
    mapping: MemoryMap, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL says many things: after ENOMEM it does not say that there are no huge pages at all."""
    asked: list[int] = []
    enough = threading.Event()

    def collapse(_: MemoryMap, __: int, start: int, ___: int) -> int:
        asked.append(start)
        if len(asked) <= 2:
            return (errno.ENOMEM, errno.EINVAL)[len(asked) - 1]
        if asked.count(0) == asked.count(8 * MIB) == 2:
            enough.set()
        return 0

    monkeypatch.setattr(MemoryMap, "collapse", collapse)
    assert touched_until(enough, mapping, descriptor).huge_bytes == mapping.nbytes
