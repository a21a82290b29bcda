"""Memory that is written once, sealed, and then given to any number of readers.

Layer: bottom; any thread, one at a time. A memfd with every page allocated: `view` is writable
until `seal`, which takes the writing away from everybody, this process included, for good
(F_SEAL_WRITE, and against growing, shrinking and further seals). From then on the one descriptor
kept here is read-only, and each `reader` is a read-only descriptor of its own.

Who still uses it is the kernel's knowledge, not ours to count: a reader's descriptor, in its table,
in a socket on the way to it, or behind a mapping that outlives both, all keep the file open. A
write lease is granted only to whoever has a file open alone; asking for one tells (`in_use`).
What it does not tell of is a descriptor that was opened with O_PATH: whoever makes one on purpose
can keep the memory when we think that it is gone. It can be read by nobody who could not read it
before.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from enum import Enum

from racerd.runtime.memory_map import HUGE_PAGE_BYTES, MemoryMap
from racerd.units import round_up

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class PageKind(Enum):
    HUGE = "huge"
    BASE = "base"


class SharedMemory:
    """`nbytes` of it. Owns its descriptor, and until `seal` a writable mapping.

    `allocated_bytes` is what it takes: a multiple of 2 MiB. The rest behind `nbytes` is zero.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocates every page; blocks for about 0.1 ms a MiB. Raises OSError, leaving nothing."""
        self.nbytes = nbytes
        self.allocated_bytes = round_up(nbytes, HUGE_PAGE_BYTES)
        self._fd = os.memfd_create("racerd-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._map: MemoryMap | None = None
        self._sealed = False
        try:
            os.ftruncate(self._fd, self.allocated_bytes)
            self._map = MemoryMap(self._fd, 0, self.allocated_bytes)
            huge = self._map.collapse(0, self.allocated_bytes)
            self.page_kind = PageKind.HUGE if huge else PageKind.BASE
            # What is not there yet, with an errno (never SIGBUS) where memory is out.
            os.posix_fallocate(self._fd, 0, self.allocated_bytes)
            self._map.populate(0, self.allocated_bytes)
        except BaseException:
            self.close()
            raise

    def view(self) -> memoryview:
        """The `nbytes`, writable, until `seal`. The caller releases the view before that."""
        assert self._map is not None, "sealed memory is not written to"
        return self._map.view()[: self.nbytes]

    def seal(self) -> None:
        """Ends writing. Raises OSError, and BufferError where a view is still held."""
        assert self._map is not None, "memory is sealed once"
        self._map.close()
        self._map = None
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        writable, self._fd = self._fd, self._open_again()
        os.close(writable)
        self._sealed = True

    def reader(self) -> int:
        """A read-only descriptor that the caller owns. Raises OSError."""
        assert self._sealed, "only sealed memory is given out"
        return self._open_again()

    def in_use(self) -> bool:
        """Whether anybody else has this memory open or mapped, as far as can be told.

        Two system calls. Where the kernel does not answer, it is used.
        """
        if not self._sealed:
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return True
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """Gives it up; done twice it does nothing. Readers keep what they have."""
        mapping, self._map = self._map, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                # The traceback of a failed read holds a view that nobody will use: unmapping is
                # left to the last of them.
                del mapping
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_again(self) -> int:
        """A description of its own, so that a lease can tell it from ours."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)


def sharing_trouble() -> str | None:
    """Why memory cannot be shared in this process, or None: tried out on a small piece."""
    try:
        memory = SharedMemory(mmap.PAGESIZE)
        try:
            memory.seal()
            if memory.in_use():
                return "the kernel takes memory for used that nobody uses"
            reader = memory.reader()
            try:
                if not memory.in_use():
                    return "the kernel does not tell memory that is used from memory that is not"
            finally:
                os.close(reader)
        finally:
            memory.close()
    except OSError as error:
        return f"{error.strerror} (memfd_create, F_ADD_SEALS, /proc/self/fd or F_SETLEASE)"
    return None
