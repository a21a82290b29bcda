"""Memory that the daemon writes into: sealed, allocated memfds.

Layer: bottom; safe from any thread. `allocate` makes a memfd whose pages are all there and whose
size can never change (seals SHRINK, GROW and SEAL): writing to it can neither fault nor charge the
daemon. What the system cannot give is an error here, at once, not a SIGBUS at the first touch.

Ownership: a `SharedMemory` owns its descriptor and its mapping. `close` gives up both; views that
somebody still holds keep the pages alive and readable until the last one is gone, so that nothing
can dangle. Memory that the daemon may still be writing to is closed and never used again.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from io import FileIO
from typing import Literal

from racer.descriptors import owned
from racer.errors import Closed, MemoryUnavailable

PageKind = Literal["transparent", "base"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module of Python 3.11.
# mmap.madvise keeps the interpreter lock: populating goes in pieces of a few milliseconds.
_POPULATE_STEP_BYTES = 16 << 20
_SHMEM_HUGE_SETTING = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def _read_or_empty(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""  # A kernel without huge pages.


def _transparent_huge_pages() -> bool:
    """Whether the kernel backs shared memory with huge pages where it is advised to."""
    setting = _read_or_empty(_SHMEM_HUGE_SETTING)
    return not any(word in setting for word in ("[never]", "[deny]")) and setting != ""


def _unavailable(size: int, error: OSError) -> MemoryUnavailable:
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return MemoryUnavailable(
            f"the system has no room for {size:,} bytes of shared memory ({error.strerror})",
            hint="free memory, raise the container's memory limit, or read a smaller range",
        )
    return MemoryUnavailable(
        f"shared memory cannot be made: {error.strerror} (errno {error.errno})",
        hint="check the process's descriptor limit and its seccomp profile (memfd_create, fcntl)",
    )


class SharedMemory:
    """`size` bytes of sealed shared memory; `fd` is for the daemon, `view` for us.

    `page_kind` says what backs it: `transparent` (huge pages, but for a rest of less than 2 MiB) or
    `base` (4 KiB pages). Reserved huge pages (MFD_HUGETLB) are not used:
    they can be punched out, which no seal prevents, so that a daemon has to refuse them.
    `touched` says that every page was written already, and not only allocated.
    """

    def __init__(self, file: FileIO, size: int, mapping: mmap.mmap, page_kind: PageKind) -> None:
        self._file: FileIO | None = file
        self.size = size
        self.page_kind = page_kind
        self.touched = False
        self.target_bytes = len(mapping)
        self._view: memoryview | None = memoryview(mapping)[:size]
        self._mapping: mmap.mmap | None = mapping  # The last: from here on there is what to close.

    @classmethod
    def allocate(cls, size: int, *, populate: bool = False) -> SharedMemory:
        """Makes `size` bytes, all zero, every page allocated.

        With `populate` they are also touched, so that nobody pays for it later: for memory that is
        used again and again. Raises MemoryUnavailable; leaves nothing behind then.
        """
        if size <= 0:
            raise ValueError(f"shared memory of {size} bytes")
        try:
            return cls._make(size, populate=populate)
        except OSError as error:
            raise _unavailable(size, error) from error

    @classmethod
    def _make(cls, size: int, *, populate: bool) -> SharedMemory:
        from racer.huge_pages import back_with_huge_pages  # Not at the top: it brings in ctypes.

        rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        # Descriptor and mapping belong to objects of the interpreter's own: they go also where an
        # interrupt comes in between, or hits `close` or a destructor.
        file = owned(os.memfd_create, "racer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        mapping: mmap.mmap | None = None
        try:
            fd = file.fileno()
            os.ftruncate(fd, rounded)
            mapping = mmap.mmap(fd, rounded)
            kind: PageKind = "base"
            if back_with_huge_pages(fd, rounded):
                kind = "transparent"
            elif _transparent_huge_pages() and _advise_huge(mapping):
                # Under `advise` only a fault through an advised mapping gives huge pages;
                # fallocate knows no mapping and would fill the file with small ones.
                kind, populate = "transparent", True
            if populate:
                _populate(mapping, fd)
            # ftruncate promises nothing: this is where a full system says so (ENOSPC).
            os.posix_fallocate(fd, 0, rounded)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
        except BaseException:
            if mapping is not None:
                mapping.close()
            file.close()
            raise
        memory = cls(file, size, mapping, kind)
        memory.touched = populate
        return memory

    def touch(self) -> None:
        """Writes every page, which loses nothing only as long as nobody else writes to them.

        For daemons on kernels that cannot tell allocated pages from holes. Raises
        MemoryUnavailable.
        """
        if self.touched:
            return
        assert self._mapping is not None
        try:
            _populate(self._mapping, self.fd)
        except OSError as error:
            raise _unavailable(self.size, error) from error
        self.touched = True

    @property
    def fd(self) -> int:
        """-1 after `close`."""
        return -1 if self._file is None else self._file.fileno()

    @property
    def closed(self) -> bool:
        return self._mapping is None

    @property
    def view(self) -> memoryview:
        """All of it, writable. Raises Closed after `close`."""
        if self._view is None:
            raise Closed("this memory was closed")
        return self._view

    def close(self) -> None:
        """Gives up descriptor and mapping; done twice it does nothing.

        Where somebody still holds a view, the mapping lives exactly as long as that view.
        """
        if self._mapping is None:
            return
        view, mapping, file = self._view, self._mapping, self._file
        self._view = self._mapping = self._file = None
        assert view is not None and file is not None
        file.close()
        try:
            view.release()
            mapping.close()
        except BufferError:
            return  # The views that are left own the mapping now; it goes with the last of them.

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            self.close()


def _advise_huge(mapping: mmap.mmap) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True


def _populate(mapping: mmap.mmap, fd: int) -> None:
    """Touches every page. Raises OSError where a page cannot be had, instead of SIGBUS."""
    size = len(mapping)
    for start in range(0, size, _POPULATE_STEP_BYTES):
        step = min(_POPULATE_STEP_BYTES, size - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _rewrite(fd, start, step)  # A kernel before 5.14.


def _rewrite(fd: int, start: int, size: int) -> None:
    """Writes what is there once more: through the kernel, which says ENOSPC."""
    for offset in range(start, start + size, mmap.PAGESIZE):
        os.pwrite(fd, os.pread(fd, 1, offset), offset)
