"""Sealed shared memory: what the daemon relies on, and lifetimes."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import resource

import pytest

import racer
from clients.python.racer.tests.patterns import MIB
from racer import memory as memory_module
from racer.memory import SharedMemory

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1, 5 * MIB + 3])
@pytest.mark.parametrize("populate", [False, True])
def test_memory_is_sealed_and_allocated(size: int, populate: bool) -> None:
    """F71, F73: it can neither shrink nor grow, and every page of it is there."""
    memory = SharedMemory.allocate(size, populate=populate)
    try:
        status = os.fstat(memory.fd)
        assert status.st_size == memory.target_bytes >= size
        assert status.st_blocks * 512 >= status.st_size
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) == seals
        for other in (0, size - 1, status.st_size + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, other)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(memory.fd)
        assert len(memory.view) == size
        assert bytes(memory.view) == bytes(size)
        os.pwrite(memory.fd, b"x", size - 1)
        assert memory.view[-1] == ord("x")
    finally:
        memory.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EPERM, errno.EMFILE])
def test_memory_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """F74: an error that says what to do, when it is asked for, and nothing is left behind."""

    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(racer.MemoryUnavailable) as caught:
        SharedMemory.allocate(MIB)
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)


def test_descriptors_that_ran_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(racer.MemoryUnavailable, match="Too many open files"):
            SharedMemory.allocate(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_closing_with_views_defers() -> None:
    """The mapping lives exactly as long as somebody can look at it."""
    memory = SharedMemory.allocate(3 * PAGE)
    memory.view[PAGE : PAGE + 4] = b"abcd"
    piece = memory.view[PAGE : PAGE + 4]
    numbers = memoryview(memory.view).cast("I")
    memory.close()
    memory.close()
    with pytest.raises(racer.Closed):
        _ = memory.view
    assert bytes(piece) == b"abcd"
    assert numbers[PAGE // 4] == array.array("I", b"abcd")[0]
    assert _mappings() == 1
    piece.release()
    numbers.release()
    del memory, piece, numbers
    assert _mappings() == 0


def _mappings() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memfd:racer" in line for line in maps)


def test_nothing_is_no_memory() -> None:
    with pytest.raises(ValueError):
        SharedMemory.allocate(0)


def test_transparent_huge_pages_are_faulted_in_through_an_advised_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fallocate first would fill the file with small pages."""
    monkeypatch.setattr(memory_module, "_transparent_huge_pages", lambda: True)
    memory = SharedMemory.allocate(2 * MIB)
    assert memory.page_kind == "transparent"
    assert os.fstat(memory.fd).st_blocks * 512 >= 2 * MIB
    memory.close()


def first_hole(fd: int) -> int:
    """For SEEK_HOLE a page that was allocated but never written is a hole."""
    return os.lseek(fd, 0, os.SEEK_HOLE)


@pytest.mark.parametrize("advice", [memory_module._MADV_POPULATE_WRITE, 9999])
def test_touching_loses_nothing(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    """Also on kernels that cannot populate (the advice of a later kernel stands for those)."""
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", advice)
    memory = SharedMemory.allocate(3 * PAGE)
    memory.view[PAGE : PAGE + 3] = b"abc"
    memory.touched = False
    memory.touch()
    assert memory.touched
    assert first_hole(memory.fd) == 3 * PAGE
    assert bytes(memory.view) == bytes(PAGE) + b"abc" + bytes(2 * PAGE - 3)
    memory.close()
    memory = SharedMemory.allocate(MIB, populate=True)
    assert first_hole(memory.fd) == MIB
    memory.close()
