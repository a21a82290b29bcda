"""Descriptors that a daemon must not write to, each with the answer that it must give.

What this kernel does not make, or does not let pass through a socket, is an OSError; the campaign
says which those were.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_HUGETLB = 4
_SYS_IO_URING_SETUP = 425  # These are of every architecture.
_SYS_MEMFD_SECRET = 447
_IO_URING_PARAMS_BYTES = 120
_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def memory(
    size: int, *, seals: int = SEALS, allocated: bool = True, flags: int = _FLAGS
) -> Iterator[int]:
    """A memfd: a good target by default."""
    fd = os.memfd_create("hostile", flags)
    try:
        os.ftruncate(fd, size)
        if allocated and size:
            os.posix_fallocate(fd, 0, size)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _reopened(size: int, flags: int) -> Iterator[int]:
    with memory(size) as fd, opened(f"/proc/self/fd/{fd}", flags) as other:
        yield other


@contextmanager
def _pipe(end: int) -> Iterator[int]:
    ends = os.pipe()
    try:
        yield ends[end]
    finally:
        for fd in ends:
            os.close(fd)


@contextmanager
def _file(size: int) -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(size)
        yield file.fileno()


@contextmanager
def _socket(_: int) -> Iterator[int]:
    one, other = socket.socketpair()
    with one, other:
        yield one.fileno()


@contextmanager
def _epoll() -> Iterator[int]:
    with select.epoll() as poll:
        yield poll.fileno()


@contextmanager
def _closing(make: Callable[[], int]) -> Iterator[int]:
    fd = make()
    try:
        yield fd
    finally:
        os.close(fd)


def _io_uring() -> int:
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = int(_libc.syscall(_SYS_IO_URING_SETUP, 4, parameters))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _secret(size: int) -> int:
    fd = int(_libc.syscall(_SYS_MEMFD_SECRET, os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, size)
    return fd


_NOT_MEMORY = "422 target_not_memory"

# name: how to make it for a target of `size` bytes, and what the daemon must say.
BAD_TARGETS: Mapping[str, tuple[Callable[[int], AbstractContextManager[int]], str]] = {
    "unsealed": (lambda n: memory(n, seals=0), "422 target_unsealed"),
    "only sealed against growing": (
        lambda n: memory(n, seals=fcntl.F_SEAL_GROW), "422 target_unsealed"),
    "sealed against writing": (
        lambda n: memory(n, seals=SEALS | fcntl.F_SEAL_WRITE), "422 target_read_only"),
    "sealed against future writing": (
        lambda n: memory(n, seals=SEALS | 0x10), "422 target_read_only"),
    "not sealable": (lambda n: memory(n, seals=0, flags=os.MFD_CLOEXEC), "422 target_unsealed"),
    "sparse": (lambda n: memory(n, allocated=False), "422 target_sparse"),
    "empty": (lambda n: memory(0), "422 target_too_small"),
    "huge pages": (
        lambda n: memory(2 << 20, allocated=False, flags=_FLAGS | _MFD_HUGETLB),
        "422 target_hugetlb"),
    "read-only": (lambda n: _reopened(n, os.O_RDONLY), "422 target_read_only"),
    "write-only": (lambda n: _reopened(n, os.O_WRONLY), "422 target_read_only"),
    "O_PATH of a memfd": (lambda n: _reopened(n, os.O_PATH), _NOT_MEMORY),
    "O_PATH of a file": (lambda n: opened("/etc/hostname", os.O_PATH), _NOT_MEMORY),
    "a pipe's reading end": (lambda n: _pipe(0), _NOT_MEMORY),
    "a pipe's writing end": (lambda n: _pipe(1), _NOT_MEMORY),
    "a socket": (_socket, _NOT_MEMORY),
    "a folder": (lambda n: opened("/", os.O_RDONLY | os.O_DIRECTORY), _NOT_MEMORY),
    "a file on disk": (_file, _NOT_MEMORY),
    "/dev/null": (lambda n: opened("/dev/null", os.O_RDWR), _NOT_MEMORY),
    "/dev/zero": (lambda n: opened("/dev/zero", os.O_RDWR), _NOT_MEMORY),
    "/proc/self/mem": (lambda n: opened("/proc/self/mem", os.O_RDWR), _NOT_MEMORY),
    "/proc/self/maps": (lambda n: opened("/proc/self/maps", os.O_RDONLY), _NOT_MEMORY),
    "/proc/self/oom_score_adj": (
        lambda n: opened("/proc/self/oom_score_adj", os.O_RDWR), _NOT_MEMORY),
    "an eventfd": (lambda n: _closing(lambda: os.eventfd(0)), _NOT_MEMORY),
    "an epoll": (lambda n: _epoll(), _NOT_MEMORY),
    "a pidfd": (lambda n: _closing(lambda: os.pidfd_open(os.getpid())), _NOT_MEMORY),
    "secret memory": (lambda n: _closing(lambda: _secret(n)), _NOT_MEMORY),
    "an io_uring": (lambda n: _closing(_io_uring), _NOT_MEMORY),
}  # fmt: skip
