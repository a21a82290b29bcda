"""Memory mapped at aligned addresses: the right bytes, lifetimes, and what the kernel refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.runtime import memory_map
from racerd.runtime.memory_map import HUGE_PAGE_BYTES, MemoryMap
from racerd.units import KIB, MIB

SIZE = 6 * MIB


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:mapped" in line]


@given(st.integers(0, SIZE - 1), st.data())
def test_it_is_exactly_what_was_asked_for(offset: int, data: st.DataObject) -> None:
    """At any offset and of any length, and at an address that agrees with the offset to 2 MiB."""
    nbytes = data.draw(st.integers(1, SIZE - offset))
    fd = os.memfd_create("mapped")
    try:
        os.ftruncate(fd, SIZE)
        mapping = MemoryMap(fd, offset, nbytes)
        with mapping.view() as view:
            assert len(view) == nbytes
            view[0] = 1
            view[-1] = 2
        assert os.pread(fd, 1, offset + nbytes - 1) == b"\x02"
        assert os.pread(fd, 1, offset) == (b"\x01" if nbytes > 1 else b"\x02")
        start = int(mappings()[0].partition("-")[0], 16)
        assert (start - offset + offset % 4096) % HUGE_PAGE_BYTES == 0
        mapping.close()
    finally:
        os.close(fd)
    assert not mappings()


def test_it_is_one_mapping(fd: int) -> None:
    """The kernel limits a process's mappings: what was reserved around it is given back."""
    before = _reserved()
    mapping = MemoryMap(fd, 4096, MIB)
    assert (len(mappings()), _reserved()) == (1, before)
    mapping.close()


def test_a_view_keeps_it_and_close_says_so(fd: int) -> None:
    mapping = MemoryMap(fd, 0, MIB)
    view = mapping.view()[10:20]
    with pytest.raises(BufferError, match="held"):
        mapping.close()
    view[:] = b"0123456789"
    assert mappings()
    view.release()
    assert not mappings()
    mapping.close()
    with pytest.raises(ValueError, match="not mapped"):
        mapping.view()


def test_dropping_it_unmaps(fd: int) -> None:
    mapping = MemoryMap(fd, 0, MIB)
    del mapping
    assert not mappings()


def test_it_is_left_out_of_core_dumps_and_of_children(fd: int) -> None:
    mapping = MemoryMap(fd, 0, MIB)
    _, _, after = Path("/proc/self/smaps").read_text().partition("memfd:mapped")
    flags = after.partition("VmFlags:")[2].splitlines()[0].split()
    assert {"dd", "dc"} <= set(flags)
    mapping.close()


def test_what_cannot_be_mapped_is_an_error_that_leaves_nothing(fd: int) -> None:
    """Also where it is refused again and again, as a client can bring about: no address is lost."""
    unwritable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = _reserved()
    for _ in range(100):
        with pytest.raises(PermissionError):
            MemoryMap(unwritable, 0, MIB)
    with pytest.raises(OSError, match="Cannot allocate"):
        MemoryMap(fd, 0, 1 << 60)
    assert _reserved() == before
    os.close(unwritable)


def _reserved() -> int:
    return sum("---p" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_addresses_that_others_took_meanwhile_stay_theirs(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding free addresses and taking them, another thread may map there."""
    theirs = MemoryMap(fd, 0, MIB)
    with theirs.view() as view:
        view[:4] = b"kept"
        taken = int(mappings()[0].partition("-")[0], 16)
        monkeypatch.setattr(memory_map, "_free_address", lambda *_: taken)
        ours = MemoryMap(fd, MIB, MIB)
        with ours.view() as other:
            other[:4] = b"ours"
        assert view[:4] == b"kept"
    ours.close()
    theirs.close()


def test_exactly_the_range_is_touched_and_its_bytes_are_kept(fd: int) -> None:
    mapping = MemoryMap(fd, 0, SIZE)
    os.pwrite(fd, b"kept", 2 * MIB)
    if mapping.populate(2 * MIB, 3 * MIB) != 0:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert MIB <= allocated_bytes(fd) <= 3 * MIB  # A huge page may be 2 MiB.
    assert os.pread(fd, 4, 2 * MIB) == b"kept"
    mapping.close()


def test_what_the_kernel_refuses_is_an_errno_not_a_signal(fd: int) -> None:
    """L49: memory that cannot be had is never a fault in the daemon."""
    mapping = MemoryMap(fd, 0, SIZE + 4 * KIB)  # There is nothing behind the file's end.
    assert mapping.populate(0, SIZE + 4 * KIB) != 0
    mapping.close()


def test_huge_pages_hold_what_was_there() -> None:
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, 3 * HUGE_PAGE_BYTES)
    os.pwrite(fd, b"kept", HUGE_PAGE_BYTES)
    os.pwrite(fd, b"kept", 2 * HUGE_PAGE_BYTES + 5000)
    mapping = MemoryMap(fd, 0, 3 * HUGE_PAGE_BYTES)
    if mapping.collapse(fd, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES) == 0:
        assert allocated_bytes(fd) == 2 * HUGE_PAGE_BYTES, "and not the first"
    with mapping.view() as view:
        held = bytes(view)
    assert held[HUGE_PAGE_BYTES:][:4] == held[2 * HUGE_PAGE_BYTES + 5000 :][:4] == b"kept"
    assert held.count(0) == len(held) - 8
    mapping.close()
    os.close(fd)


def test_huge_pages_where_nothing_is_yet() -> None:
    """The kernel puts none where there is nothing; a kernel that can do it at all does it here."""
    length = 3 * HUGE_PAGE_BYTES
    refusals = []
    for touched in (True, False):
        fd = os.memfd_create("mapped")
        os.ftruncate(fd, length)
        mapping = MemoryMap(fd, 0, length)
        if touched:
            assert mapping.populate(0, length) == 0
        refusals.append(mapping.collapse(fd, 0, length))
        mapping.close()
        os.close(fd)
    assert refusals[1] == refusals[0]


def test_a_kernel_without_huge_pages_costs_speed_only(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_map, "_MADV_COLLAPSE", 9999)  # As on kernels before 6.1.
    mapping = MemoryMap(fd, 0, SIZE)
    assert mapping.collapse(fd, 0, SIZE) == errno.EINVAL
    assert mapping.populate(0, SIZE) == 0
    mapping.close()
