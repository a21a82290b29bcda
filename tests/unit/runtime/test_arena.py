"""The arena: a hard limit, alignment, and slots that are never two pages'."""

from __future__ import annotations

import mmap
import os
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from racerd.pages import ALIGNMENT_BYTES, TAG_BYTES
from racerd.runtime import arena as arena_module
from racerd.runtime.arena import FrameArena
from racerd.units import KIB, MIB

SLOT = 8 * KIB  # A frame of 4 KiB and room for its tag.


def test_the_budget_is_a_hard_limit() -> None:
    """F10, F19: slots count with their padding, and `take` says no rather than grow."""
    with FrameArena(4 * KIB, 10 * SLOT + SLOT - 1) as arena:
        assert arena.slot_count == arena.free_slots == 10
        assert os.fstat(arena.fd).st_size == 10 * SLOT <= 10 * SLOT + SLOT - 1
        taken = arena.take(10)
        assert taken is not None
        assert sorted(taken) == list(range(10))
        assert arena.take(1) is None
        arena.give_back(taken[:3])
        assert arena.take(4) is None  # All or nothing.
        assert arena.free_slots == 3
        assert arena.take(0) == []


def test_an_arena_without_room_for_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for one frame"):
        FrameArena(4 * KIB, SLOT - 1)


@given(st.integers(0, 12).map(lambda power: 4096 << power), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_frames_are_aligned_apart_and_writable_to_the_last_byte(
    frame_bytes: int, count: int
) -> None:
    """F33: O_DIRECT fills a frame from its start; the tag fits behind the ciphertext."""
    with FrameArena(frame_bytes, count * (frame_bytes + ALIGNMENT_BYTES)) as arena:
        assert arena.slot_count == count
        edges = []
        for slot in (0, count - 1):
            frame = arena.frame(slot, frame_bytes)
            assert len(frame) == frame_bytes + TAG_BYTES
            frame[0] = frame[-1] = 1 + slot % 255
            edges.append(slot * arena.slot_bytes)
            assert slot * arena.slot_bytes % ALIGNMENT_BYTES == 0
            frame.release()
        for low, high in pairwise(sorted(set(edges))):
            assert high - low >= frame_bytes + TAG_BYTES
        short = arena.frame(0, 1)
        assert len(short) == 1 + TAG_BYTES
        short.release()


def test_slots_do_not_overlap() -> None:
    with FrameArena(4 * KIB, 4 * SLOT) as arena:
        for slot in range(4):
            frame = arena.frame(slot, 4 * KIB)
            frame[:] = bytes([slot + 1]) * len(frame)
            frame.release()
        for slot in range(4):
            frame = arena.frame(slot, 4 * KIB)
            assert bytes(frame) == bytes([slot + 1]) * (4 * KIB + TAG_BYTES)
            frame.release()


@pytest.mark.parametrize(("slot", "length"), [(-1, 1), (4, 1), (0, 4 * KIB + 1), (0, -1)])
def test_frames_outside_the_arena_are_refused(slot: int, length: int) -> None:
    with FrameArena(4 * KIB, 4 * SLOT) as arena, pytest.raises(ValueError, match="no frame"):
        arena.frame(slot, length)


def test_a_slot_given_back_twice_is_refused() -> None:
    """Else two pages would share it: each the other's rot."""
    with FrameArena(4 * KIB, 4 * SLOT) as arena:
        taken = arena.take(2)
        assert taken is not None
        with pytest.raises(RuntimeError, match="twice"):
            arena.give_back([taken[0], taken[0]])
        arena.give_back(taken)
        with pytest.raises(RuntimeError, match="twice"):
            arena.give_back([taken[0]])
        assert arena.free_slots == 4
        with pytest.raises(ValueError, match="-1 slots"):
            arena.take(-1)


def test_touched_memory_is_reused_before_fresh_memory() -> None:
    """A fresh page of memory costs several times a touched one."""
    with FrameArena(4 * KIB, 1000 * SLOT) as arena:
        first = arena.take(3)
        assert first == [0, 1, 2]
        arena.give_back(first)
        assert arena.take(3) == first


def test_the_arena_can_be_mapped_by_another_and_is_not_inherited() -> None:
    """A GPU worker maps the same memfd later; no child gets it by accident."""
    with FrameArena(4 * KIB, 4 * SLOT) as arena:
        assert not os.get_inheritable(arena.fd)
        frame = arena.frame(1, 4)
        frame[:4] = b"page"
        frame.release()
        with mmap.mmap(arena.fd, 4 * SLOT) as other:
            assert other[SLOT : SLOT + 4] == b"page"


def test_a_frame_that_outlives_the_arena_is_a_loud_defect_and_leaks_no_descriptor() -> None:
    arena = FrameArena(4 * KIB, 4 * SLOT)
    arena.__enter__()
    frame = arena.frame(0, 16)
    with pytest.raises(BufferError):
        arena.__exit__(None, None, None)
    assert arena.fd == -1
    frame.release()


def test_an_arena_that_cannot_be_mapped_leaks_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module, "MemoryMap", fail)
    with pytest.raises(OSError, match="allocate"), FrameArena(4 * KIB, MIB):
        pass  # The fixture that counts descriptors is the assertion.


def test_threads_never_hold_the_same_slot() -> None:
    with FrameArena(4 * KIB, 32 * SLOT) as arena:
        held: set[int] = set()
        clashes: list[int] = []
        start = threading.Barrier(6)

        def work() -> None:
            start.wait()
            for _ in range(400):
                slots = arena.take(5)
                if slots is None:
                    continue
                clashes.extend(slot for slot in slots if slot in held)
                held.update(slots)
                held.difference_update(slots)
                arena.give_back(slots)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not clashes
        assert arena.free_slots == 32


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a plain set of free slots."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = FrameArena(4 * KIB, 12 * SLOT).__enter__()
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free = 12 - sum(map(len, self.held))
        taken = self.arena.take(count)
        assert (taken is None) == (count > free)
        if taken is not None:
            assert len(set(taken)) == count
            self.held.append(taken)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            self.arena.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_slot_is_free_or_held_once(self) -> None:
        all_held = [slot for slots in self.held for slot in slots]
        assert len(set(all_held)) == len(all_held)
        assert self.arena.free_slots == 12 - len(all_held)

    def teardown(self) -> None:
        self.arena.__exit__(None, None, None)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, deadline=None)
