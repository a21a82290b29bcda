"""A client's memfd, checked so that it cannot hurt the daemon, and mapped.

Layer: serve. Checking and mapping block for a moment that grows with the size: large ones run on a
worker thread. The rules, and why each is one (R8):

- sealed against shrinking, or a store into the mapping could meet no page and raise SIGBUS;
- every page of the range allocated, or the store would allocate it and charge this process;
- not of hugetlbfs: its pages can be punched out and be gone for good when the pool is empty, which
  no seal prevents, and then the store raises SIGBUS all the same;
- opened for reading and writing, and not sealed against writing.

Pages of a memfd can be punched out later as well; a store then allocates again and is charged
here. `check_allocated` finds that before each read. A client that punches during a read can have
this process charged for the range of that read and no more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from types import TracebackType

from racerd.errors import RequestError, ResourceError, Retry
from racerd.runtime.memory_map import MemoryMap
from racerd.units import round_up

_PAGE_BYTES = mmap.PAGESIZE
_BLOCK_BYTES = 512
_SEALS_AGAINST_WRITING = fcntl.F_SEAL_WRITE | 0x0010  # The latter is F_SEAL_FUTURE_WRITE.
_O_PATH = os.O_PATH

_SYS_CACHESTAT = 451  # Of every architecture: the call is younger than the common table.
_libc = ctypes.CDLL(None, use_errno=True)


class _CacheStatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class HostMemory:
    """`length` bytes at `offset` of a memfd, mapped from `open` to `close`.

    The descriptor stays the caller's, and must stay open as long as this is. `length` None is all
    that there is behind `offset`. Views keep the mapping alive by themselves: what is unmapped
    cannot be touched any more, structurally.
    """

    def __init__(self, fd: int, offset: int = 0, length: int | None = None) -> None:
        self.fd = fd
        self.offset = offset
        self.length = length or 0
        self._whole = length is None
        self._map: MemoryMap | None = None
        self._blocks = 0

    def length_to_map(self) -> int:
        """What `open` will map if it is not refused. Cheap."""
        return os.fstat(self.fd).st_size if self._whole else self.length

    def open(self) -> None:
        """Checks and maps. Blocking. Raises RequestError `target_…`, ResourceError `overloaded`."""
        found = _check_kind(self.fd)
        _check_access(self.fd)
        if self._whole:
            self.length = found.st_size - self.offset
        if self.offset + self.length > found.st_size or (self._whole and self.length <= 0):
            raise _too_small(found.st_size, self.offset, self.length)
        if self.length == 0:
            return
        _check_allocated(self.fd, self.offset, self.length)
        self._blocks = found.st_blocks
        self._map = _map(self.fd, self.offset, self.length)

    def close(self) -> None:
        """Unmaps, at once or, where a view is still held somewhere, with the last view."""
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # A traceback or a generator that is not collected yet holds a view that nobody will
            # use. Dropping our reference leaves the unmapping to the last of them.
            del mapping

    def __enter__(self) -> HostMemory:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def view(self, offset: int, length: int) -> memoryview:
        """A writable view of `length` bytes at `offset` of this memory.

        Raises RequestError `target_too_small`, and `target_sparse` where pages were punched out.
        """
        if offset + length > self.length:
            raise _too_small(self.length, offset, length)
        if length == 0:
            return memoryview(bytearray())
        if self._map is None:
            raise ValueError("the memory is not mapped")
        self._check_still_allocated(offset, length)
        return self._map.view()[offset : offset + length]

    def _check_still_allocated(self, offset: int, length: int) -> None:
        if os.fstat(self.fd).st_blocks < self._blocks:
            _check_allocated(self.fd, self.offset + offset, length)


def _check_kind(fd: int) -> os.stat_result:
    """Returns what fstat says of a sealed memfd, and raises for everything else."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & _O_PATH:
        raise _not_memory("was opened with O_PATH")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _not_memory(f"is {_file_type(found.st_mode)}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise _not_memory("is a file of a filesystem without seals") from error
    if os.fstatvfs(fd).f_bsize != _PAGE_BYTES:
        raise _refusal(
            "target_hugetlb",
            "the target is made of hugetlbfs pages, which can vanish under a write",
            "make it without MFD_HUGETLB and ask for huge pages with madvise(MADV_HUGEPAGE)",
        )
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _refusal(
            "target_unsealed",
            "the target can shrink while it is written to: F_SEAL_SHRINK is missing",
            "make it with MFD_ALLOW_SEALING and add F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL",
        )
    if seals & _SEALS_AGAINST_WRITING:
        raise _read_only("is sealed against writing")
    return found


def _check_access(fd: int) -> None:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise _read_only("is not opened for reading and writing")


def _check_allocated(fd: int, offset: int, length: int) -> None:
    """Raises `target_sparse` unless every page of the range is there.

    `st_blocks` cannot tell (it counts pages past the end, too), and for SEEK_HOLE a page that was
    allocated but never written is a hole. `cachestat` (Linux 6.5) knows; without it, only pages
    that were written are taken for allocated.
    """
    start = offset - offset % _PAGE_BYTES
    stop = round_up(offset + length, _PAGE_BYTES)
    pages = _allocated_pages(fd, start, stop - start)
    if pages is None:
        allocated = _next_hole(fd, start) >= offset + length
    else:
        allocated = pages >= (stop - start) // _PAGE_BYTES
    if not allocated:
        raise _refusal(
            "target_sparse",
            "pages of the target are not allocated; writing them would charge racerd's memory",
            "fallocate or write every page of it first"
            if pages is not None
            else "write every page of it first: this kernel cannot tell allocated pages from holes",
        )


def _allocated_pages(fd: int, offset: int, length: int) -> int | None:
    """Pages of the range that exist, in memory or swapped out; None where the kernel is too old."""
    where, found = _CacheStatRange(offset, length), _CacheStat()
    if _libc.syscall(_SYS_CACHESTAT, fd, ctypes.byref(where), ctypes.byref(found), 0) != 0:
        return None
    return int(found.cached + found.evicted)


def _next_hole(fd: int, offset: int) -> int:
    # A description of our own: the client shares the file offset of the one that it sent.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(own, offset, os.SEEK_HOLE)
    finally:
        os.close(own)


def _map(fd: int, offset: int, length: int) -> MemoryMap:
    try:
        mapping = MemoryMap(fd, offset, length)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _read_only("cannot be mapped for writing") from error
        raise ResourceError(
            "overloaded",
            f"the target cannot be mapped: {os.strerror(error.errno or 0)}",
            hint="racerd holds too many mappings; release targets that are not in use",
            retry=Retry.SAME,
        ) from error
    # The pages are there; this puts them into our page table at once. Where the kernel cannot, the
    # first write to each does it.
    mapping.populate(0, length)
    return mapping


def _file_type(mode: int) -> str:
    for test, name in (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return name
    return "an anonymous descriptor without memory"


def _refusal(code: str, message: str, hint: str) -> RequestError:
    return RequestError(code, message, hint=hint)


def _not_memory(what: str) -> RequestError:
    return _refusal("target_not_memory", f"the target {what}, not a memfd", "send a memfd")


def _read_only(what: str) -> RequestError:
    return _refusal("target_read_only", f"the target {what}", "send a memfd that can be written")


def _too_small(size: int, offset: int, length: int) -> RequestError:
    return _refusal(
        "target_too_small",
        f"the target has {size} bytes, {length} at offset {offset} do not fit",
        "register enough memory, or read a smaller range",
    )
