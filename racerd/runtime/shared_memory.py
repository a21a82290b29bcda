"""Memory that is written once, sealed, and then given to any number of readers.

Layer: bottom; any thread, one at a time. A memfd with every page allocated: `view` is writable
until `seal`, which takes the writing away from everybody, this process included, for good
(F_SEAL_WRITE, and against growing, shrinking and further seals; the kernel refuses it while anybody
could still write). From then on the one descriptor kept here is read-only, and each `reader` is a
read-only descriptor of its own. `settled` shows the same bytes to this process, and may be held
through sealing and beyond `close`.

Who still uses it is the kernel's knowledge, not ours to count: a reader's descriptor, in its table,
in a socket on the way to it, or behind a mapping that outlives both, all keep the file open. A
write lease is granted only to whoever has a file open alone; asking for one tells (`in_use`).
What it does not tell of is a descriptor that was opened with O_PATH: whoever makes one on purpose
can keep the memory when we think that it is gone. It can be read by nobody who could not read it
before.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from enum import Enum

from racerd.runtime.memory_map import HUGE_PAGE_BYTES, MemoryMap
from racerd.units import round_up

_SEAL_TRIES = 5
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
        self._settled: MemoryMap | None = None
        self._sealed = False
        try:
            os.ftruncate(self._fd, self.allocated_bytes)
            self._settled = self._map_settled()
            self._map = MemoryMap(self._fd, 0, self.allocated_bytes)
            refusal = self._map.collapse(self._fd, 0, self.allocated_bytes)
            self.page_kind = PageKind.BASE if refusal else PageKind.HUGE
            # What is not there yet, with an errno (never SIGBUS) where memory is out.
            os.posix_fallocate(self._fd, 0, self.allocated_bytes)
            self._map.populate(0, self.allocated_bytes)
        except BaseException:
            self.close()
            raise

    def view(self) -> memoryview:
        """The `nbytes`, writable, until `seal`. The caller releases the view before that."""
        assert not self._sealed and self._map is not None, "sealed memory is not written to"
        return self._map.view()[: self.nbytes]

    def settled(self) -> memoryview:
        """The same bytes, never writable. Nobody needs to release it; until then it is `in_use`."""
        assert not self._sealed and self._settled is not None
        return self._settled.view()[: self.nbytes]

    def seal(self) -> None:
        """Ends writing. Raises OSError, and BufferError where a writable view is still held."""
        assert not self._sealed and self._map is not None, "memory is sealed once"
        self._map.close()
        self._close_settled()
        _add_seals(self._fd)
        writable, self._fd = self._fd, self._open_again()
        os.close(writable)
        self._sealed = True

    def reader(self) -> int:
        """A read-only descriptor that the caller owns. Raises OSError."""
        assert self._sealed, "only sealed memory is given out"
        return self._open_again()

    def in_use(self) -> bool:
        """Whether anybody else has this memory open or mapped, as far as can be told.

        Two system calls. Where the kernel does not answer, it is used. After `close`: whether a
        view of ours is left, which keeps all of the memory.
        """
        if self._fd < 0:
            return any(m is not None and m.mapped for m in (self._map, self._settled))
        if not self._sealed:
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return True
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        """Gives it up; done twice it does nothing. Readers keep what they have, and so does a
        thread that still writes where nobody will read: see `in_use`."""
        if self._map is not None:
            with suppress(BufferError):  # Unmapping is left to the last view.
                self._map.close()
        self._close_settled()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _map_settled(self) -> MemoryMap:
        reader = self._open_again()
        try:
            return MemoryMap(reader, 0, self.allocated_bytes, writable=False)
        finally:
            os.close(reader)

    def _close_settled(self) -> None:
        if self._settled is not None:
            with suppress(BufferError):  # As above.
                self._settled.close()

    def _open_again(self) -> int:
        """A description of its own, so that a lease can tell it from ours."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)


def _add_seals(fd: int) -> None:
    """The kernel says EBUSY, after having waited for a moment, where it holds one of the pages
    itself: to see whether it is used, say. That passes."""
    for left in reversed(range(_SEAL_TRIES)):
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise


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
