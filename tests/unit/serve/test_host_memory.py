"""Memory that clients send: what is mapped, and what could hurt the daemon and is refused (R8)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from racerd.errors import RequestError
from racerd.serve import host_memory
from racerd.serve.host_memory import HostMemory
from tests.support.socket_rig import SEALS, Memory

PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MFD_HUGETLB = 4
libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    assert libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) == 0


def refusal(fd: int, offset: int = 0, length: int | None = None) -> str:
    memory = HostMemory(fd, offset, length)
    with pytest.raises(RequestError) as caught, memory:
        pass
    assert caught.value.hint
    return caught.value.code


@pytest.mark.parametrize("seals", [SEALS, fcntl.F_SEAL_SHRINK])
def test_a_sealed_and_allocated_memfd_is_mapped(seals: int) -> None:
    """R1, R8: shared with the client, in both directions."""
    with Memory(SIZE, seals=seals) as client, HostMemory(client.fd) as memory:
        assert memory.length == SIZE
        with memory.view(3, 4) as view:
            view[:] = b"abcd"
        assert client.read(0, 8) == b"\0\0\0abcd\0"


def test_a_part_is_mapped_wherever_it_lies() -> None:
    """A one-shot read maps only what it writes, though it starts in the middle of a page."""
    with Memory(SIZE) as client, HostMemory(client.fd, PAGE + 100, 2 * PAGE) as memory:
        with memory.view(0, 2 * PAGE) as view:
            view[:] = b"\xee" * (2 * PAGE)
        text = client.read()
    assert text == bytes(PAGE + 100) + b"\xee" * (2 * PAGE) + bytes(SIZE - 3 * PAGE - 100)


def test_written_memory_is_allocated() -> None:
    with Memory(SIZE, allocated=0) as client:
        os.pwrite(client.fd, b"x" * SIZE, 0)
        with HostMemory(client.fd) as memory:
            assert memory.length == SIZE


def test_the_clients_file_offset_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shared with the descriptor that the client keeps."""
    for old_kernel in (False, True):
        with Memory(SIZE, allocated=0) as client:
            os.write(client.fd, b"x" * SIZE)
            os.lseek(client.fd, 123, os.SEEK_SET)
            if old_kernel:
                monkeypatch.setattr(host_memory, "_allocated_pages", lambda *_: None)
            with HostMemory(client.fd):
                pass
            assert os.lseek(client.fd, 0, os.SEEK_CUR) == 123


def test_memory_that_can_shrink_is_refused() -> None:
    """R8, F71, F73: without the seal a store could meet no page, which is SIGBUS."""
    with Memory(SIZE, seals=0) as client:
        assert refusal(client.fd) == "target_unsealed"
    with Memory(SIZE, seals=fcntl.F_SEAL_GROW) as client:
        assert refusal(client.fd) == "target_unsealed"
    with Memory(SIZE, seals=0, flags=os.MFD_CLOEXEC) as client:
        assert refusal(client.fd) == "target_unsealed"


def test_a_sealed_memfd_cannot_be_cut_under_the_mapping() -> None:
    """F71: what the seal is for."""
    with Memory(SIZE) as client, HostMemory(client.fd) as memory:
        with pytest.raises(PermissionError):
            os.ftruncate(client.fd, 0)
        with memory.view(SIZE - 1, 1) as view:
            view[0] = 1


def test_growing_memory_is_harmless() -> None:
    """F73: what is mapped keeps its size; what was added later is not part of the target."""
    with Memory(SIZE, seals=fcntl.F_SEAL_SHRINK) as client, HostMemory(client.fd) as memory:
        os.ftruncate(client.fd, 2 * SIZE)
        with pytest.raises(RequestError, match="do not fit"):
            memory.view(0, SIZE + 1)


@pytest.mark.parametrize("allocated", [0, SIZE - PAGE, PAGE])
def test_memory_without_pages_is_refused(allocated: int) -> None:
    """R8, F74: writing it would charge the daemon, and could fail."""
    with Memory(SIZE, allocated=allocated) as client:
        assert refusal(client.fd) == "target_sparse"


def test_pages_past_the_end_do_not_count() -> None:
    """R8: st_blocks counts them; the range has holes all the same."""
    with Memory(SIZE, seals=0, allocated=0) as client:
        fallocate(client.fd, FALLOC_FL_KEEP_SIZE, SIZE, SIZE)
        assert os.fstat(client.fd).st_blocks * 512 >= SIZE
        fcntl.fcntl(client.fd, fcntl.F_ADD_SEALS, SEALS)
        assert refusal(client.fd) == "target_sparse"


def test_only_the_range_needs_pages() -> None:
    with Memory(SIZE, allocated=4 * PAGE) as client:
        with HostMemory(client.fd, 100, 4 * PAGE - 100) as memory:
            assert memory.length == 4 * PAGE - 100
        assert refusal(client.fd, 100, 4 * PAGE) == "target_sparse"


def test_holes_punched_later_are_found_before_the_next_read() -> None:
    """R8: no seal prevents it."""
    with Memory(SIZE) as client, HostMemory(client.fd) as memory:
        fallocate(client.fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, PAGE, PAGE)
        memory.view(2 * PAGE, PAGE).release()
        with pytest.raises(RequestError) as caught:
            memory.view(0, SIZE)
        assert caught.value.code == "target_sparse"


def test_old_kernels_take_only_written_pages_for_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_allocated_pages", lambda *_: None)
    with Memory(SIZE) as client:
        assert refusal(client.fd) == "target_sparse"
        os.pwrite(client.fd, b"x" * SIZE, 0)
        with HostMemory(client.fd) as memory:
            assert memory.length == SIZE


def test_read_only_memory_is_refused() -> None:
    """R8: opened or sealed so."""
    with Memory(SIZE) as client:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            fd = os.open(f"/proc/self/fd/{client.fd}", flags)
            try:
                assert refusal(fd) == "target_read_only"
            finally:
                os.close(fd)
    for seal in (fcntl.F_SEAL_WRITE, 0x10):
        with Memory(SIZE, seals=fcntl.F_SEAL_SHRINK | seal) as client:
            assert refusal(client.fd) == "target_read_only"


def test_sizes_are_checked() -> None:
    """R8: too small for the range; nothing is mapped."""
    with Memory(SIZE) as client:
        assert refusal(client.fd, 0, SIZE + 1) == "target_too_small"
        assert refusal(client.fd, SIZE, 1) == "target_too_small"
        assert refusal(client.fd, 1 << 62, 1) == "target_too_small"
        assert refusal(client.fd, SIZE) == "target_too_small"
        with HostMemory(client.fd, SIZE, 0) as memory:
            assert len(memory.view(0, 0)) == 0
    with Memory(0) as client:
        assert refusal(client.fd) == "target_too_small"


@contextmanager
def odd_descriptor(kind: str, folder: Path) -> Iterator[int]:
    others: list[int] = []
    if kind == "pipe":
        fd, other = os.pipe()
        others.append(other)
    elif kind == "socket":
        first, second = socket.socketpair()
        fd, other = first.detach(), second.detach()
        others.append(other)
    elif kind == "directory":
        fd = os.open(folder, os.O_RDONLY)
    elif kind == "file of /proc":
        fd = os.open("/proc/self/comm", os.O_RDWR)
    elif kind == "device":
        fd = os.open("/dev/zero", os.O_RDWR)
    elif kind == "disk file":
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, bytes(SIZE), 0)
    elif kind == "epoll":
        poll = __import__("select").epoll()
        fd = os.dup(poll.fileno())
        poll.close()
    else:
        memfd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        others.append(memfd)
        fd = os.open(f"/proc/self/fd/{memfd}", os.O_PATH)
    try:
        yield fd
    finally:
        for number in (fd, *others):
            os.close(number)


@pytest.mark.parametrize(
    "kind",
    ["pipe", "socket", "directory", "file of /proc", "device", "disk file", "epoll", "O_PATH"],
)
def test_what_is_not_memory_is_refused(kind: str, tmp_path: Path) -> None:
    """R8: nothing but a memfd can be a target."""
    with odd_descriptor(kind, tmp_path) as fd:
        assert refusal(fd) == "target_not_memory"


def test_a_file_of_a_memory_filesystem_cannot_be_sealed() -> None:
    """R8: it looks like a memfd but for the seal."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(SIZE))
        file.flush()
        assert refusal(file.fileno()) == "target_unsealed"


def test_hugetlb_memory_is_refused() -> None:
    """R8: its pages can be punched out and taken by others; the next store would be SIGBUS."""
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | MFD_HUGETLB)
    try:
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        assert refusal(fd) == "target_hugetlb"
    finally:
        os.close(fd)


def test_a_view_that_somebody_holds_keeps_the_memory() -> None:
    """R7: closing cannot pull the memory from under a view; the last view lets it go."""
    with Memory(SIZE) as client:
        memory = HostMemory(client.fd)
        memory.open()
        view = memory.view(0, 1)
        memory.close()
        view[0] = 7
        assert client.read(0, 1) == b"\x07"
        view.release()
        with pytest.raises(ValueError, match="not mapped"):
            memory.view(0, 1)
