"""Address space that is filled piece by piece."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racer import address_space
from racer import window as window_module
from racer.errors import MemoryUnavailable
from racer.window import Window, _Ranges, windows_count

PAGE = 4096
MIB = 1 << 20
SIZE = 40 * PAGE + 123
CONTENT = random.Random(0).randbytes(SIZE)


def memory(content: bytes) -> int:
    fd = os.memfd_create("window", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.ftruncate(fd, -(-len(content) // PAGE) * PAGE)
    return fd


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, SIZE - 1),
    length=st.integers(1, SIZE),
    cuts=st.lists(st.integers(1, 40), unique=True, max_size=6),
    shared=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_any_mixture_of_pieces(
    start: int, length: int, cuts: list[int], shared: list[bool]
) -> None:
    """Pieces that end between pages, shared or private, make up one array."""
    stop = min(SIZE, start + length)
    window = Window(start, stop)
    view = window.view()
    ends = [*sorted(cut * PAGE for cut in cuts), SIZE]
    begin = 0
    for end, is_shared in zip(ends, shared, strict=False):
        if is_shared:
            fd = memory(CONTENT[begin:end])
            window.map_shared(fd, begin, begin, end)
            os.close(fd)
        elif max(begin, start) < min(end, stop):
            low, high = max(begin, start), min(end, stop)
            window.make_private(low, high)
            view[low - start : high - start] = CONTENT[low:high]
        begin = end
    assert bytes(view) == CONTENT[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(5 * MIB + 100, 15 * MIB - 5), (PAGE, 16 * MIB)])
def test_a_large_window_takes_whole_huge_pages_and_leaves_its_neighbours(
    start: int, stop: int
) -> None:
    """What is mapped beyond its ends is not in its way: another piece of it stays as it was."""
    content = random.Random(1).randbytes(16 * MIB)
    fd = memory(content)
    window = Window(start, stop)
    middle = 9 * MIB + 3 * PAGE  # Pieces need not end with a huge page.
    with window.view() as view:
        window.make_private(start, middle)
        view[: middle - start] = bytes(middle - start)
        window.map_shared(fd, 0, middle, stop)
        assert not any(view[: middle - start])
        assert bytes(view[middle - start :]) == content[middle:stop]
    window = Window(start, stop)
    window.map_shared(fd, 0, 0, 16 * MIB)
    with window.view() as view:
        assert bytes(view) == content[start:stop]
        assert view[-1] == content[stop - 1]
    os.close(fd)


def test_nothing_is_mapped_behind_the_end_of_the_memory() -> None:
    """Touching it would end the process."""
    nbytes = 9 * MIB + PAGE
    fd = memory(random.Random(2).randbytes(nbytes))
    window = Window(0, nbytes)
    window.map_shared(fd, 0, 0, nbytes)
    lines = [x for x in Path("/proc/self/maps").read_text().splitlines() if "memfd:window" in x]
    ends = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    assert sum(stop - start for start, stop in ends) == nbytes
    os.close(fd)


def test_a_view_outlives_its_window_and_nothing_outlives_the_view() -> None:
    fd = memory(CONTENT)
    window = Window(0, SIZE)
    window.map_shared(fd, 0, 0, SIZE)
    os.close(fd)
    part = window.view()[100:200]
    del window
    gc.collect()
    assert bytes(part) == CONTENT[100:200]
    assert "memfd:window" in Path("/proc/self/maps").read_text()
    del part
    gc.collect()
    assert "memfd:window" not in Path("/proc/self/maps").read_text()


def test_a_window_without_a_view_gives_its_addresses_back() -> None:
    fd = memory(CONTENT)
    window = Window(0, SIZE)
    window.map_shared(fd, 0, 0, SIZE)
    os.close(fd)
    del window
    assert "memfd:window" not in Path("/proc/self/maps").read_text()


def test_writing_is_private() -> None:
    fd = memory(CONTENT)
    window = Window(0, SIZE)
    window.map_shared(fd, 0, 0, SIZE)
    window.view()[:] = bytes(SIZE)
    assert os.pread(fd, SIZE, 0) == CONTENT
    os.close(fd)


def test_what_was_not_put_there_ends_the_process_instead_of_being_zeros() -> None:
    window = Window(0, SIZE)
    address = window._space.address
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    (rights,) = (
        rights
        for bounds, rights, *_ in lines
        if int(bounds.split("-")[0], 16) <= address < int(bounds.split("-")[1], 16)
    )
    assert rights == "---p"


def test_addresses_agree_with_offsets_to_a_huge_page() -> None:
    """Else a huge page could not be mapped as one."""
    huge = 2 << 20
    window = Window(5 * huge + PAGE, 7 * huge)
    assert window._address_of(6 * huge) % huge == 0


def test_more_than_there_are_addresses() -> None:
    with pytest.raises(MemoryUnavailable, match="does not map"):
        Window(0, 1 << 60)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_ranges_say_what_is_new(added: list[tuple[int, int]]) -> None:
    ranges, seen = _Ranges(), set()
    for start, length in added:
        missing = ranges.missing(start, start + length)
        new = {at for begin, end in missing for at in range(begin, end)}
        assert new == set(range(start, start + length)) - seen
        for gap in missing:
            ranges.add(*gap)
        seen |= new


def test_there_are_not_more_windows_than_mappings_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L49: the kernel limits mappings; who asks is told, and others in the process are spared."""
    gc.collect()
    monkeypatch.setattr(window_module, "WINDOWS_MAX", windows_count() + 2)
    kept = [Window(0, SIZE), Window(0, SIZE)]
    with pytest.raises(MemoryUnavailable, match="windows"):
        Window(0, SIZE)
    kept.pop()
    kept.append(Window(0, SIZE))


def test_addresses_that_may_be_anothers_are_never_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mapping that failed may have left a hole, and another thread's memory may lie there."""
    window = Window(0, SIZE)
    monkeypatch.setattr(window_module, "map_over", lambda *arguments: False)
    with pytest.raises(MemoryUnavailable):
        window.make_private(0, SIZE)
    assert window._private.missing(0, SIZE) == [(0, SIZE)], "nothing was put there"
    address = window._space.address
    del window
    gc.collect()
    reserved = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    assert any(start <= address < stop for start, stop in reserved)
    address_space._abandoned.clear()
