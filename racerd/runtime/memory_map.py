"""A memfd, mapped where the kernel can map 2 MiB with each entry of the page table.

Layer: bottom. Python's mmap takes no address, and the kernel puts shared memory at any multiple of
4 KiB unless the administrator asked for huge pages of it (`shmem_enabled`). Here the address agrees
with the offset in the file to 2 MiB, and where the file has huge pages, one fault maps all of one.
That is most of what fresh memory costs: making and filling a GiB in 4 KiB steps takes three times
as long.

Huge pages themselves come by MADV_COLLAPSE (Linux 6.1), whatever `shmem_enabled` says: it puts a
huge page where at least one small page is, at once. AES-GCM runs a quarter faster from and to such
memory. Where the kernel cannot, nothing is lost but speed.

Every such mapping holds what others should not see: it is left out of core dumps and of child
processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from racerd.units import round_up

HUGE_PAGE_BYTES = 2 << 20

_PAGE_BYTES = mmap.PAGESIZE
# Each step keeps every other thread from mapping and unmapping, the event loop too.
_STEP_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25
_NO_ACCESS = 0
_READ_ONLY = mmap.PROT_READ
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_SHARED_THERE = mmap.MAP_SHARED | 0x100000  # MAP_FIXED_NOREPLACE; before Linux 4.17 a mere wish.
_TRIES = 8
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryMap:
    """Bytes [offset, offset + nbytes) of a memfd, readable, and writable unless `writable` is off.

    Views keep the mapping alive by themselves: what is unmapped cannot be touched any more,
    structurally. Safe from any thread, as long as `close` is called by one.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, *, writable: bool = True) -> None:
        """Maps at once, for at least one byte. Raises OSError. The descriptor stays the caller's,
        who may close it. A mapping that is not writable never can be made so, if the descriptor is
        read-only."""
        start = offset - offset % _PAGE_BYTES
        self.nbytes = nbytes
        access = _READ_WRITE if writable else _READ_ONLY
        space = _Space(fd, start, round_up(offset + nbytes, _PAGE_BYTES) - start, access)
        self._address = space.address + offset - start
        self._writable = writable
        array = (ctypes.c_char * nbytes).from_address(self._address)
        array.space = space  # type: ignore[attr-defined]  # A view keeps it alive.
        self._array: ctypes.Array[ctypes.c_char] | None = array
        self._mapped = weakref.ref(array)

    @property
    def mapped(self) -> bool:
        """Whether it is mapped still: not closed, or closed while a view was held that still is."""
        return self._mapped() is not None

    def view(self) -> memoryview:
        """All of it."""
        if self._array is None:
            raise ValueError("the memory is not mapped any more")
        view = memoryview(self._array).cast("B")
        return view if self._writable else view.toreadonly()

    def close(self) -> None:
        """Unmaps; done again it does nothing. Raises BufferError as long as a view is held: the
        last of them unmaps then."""
        self._array = None
        if self.mapped:
            raise BufferError("memory cannot be unmapped while a view of it is held")

    def populate(self, start: int, stop: int) -> int:
        """Touches the pages that hold [start, stop) and returns 0, or the errno.

        Blocks for about 0.1 ms a MiB where there are no huge pages, in steps, without the
        interpreter lock; never faults: a page that cannot be had is an errno.
        """
        with self.view():
            begin, end = self._address + start, self._address + stop
            begin -= begin % _PAGE_BYTES
            for at in range(begin, end, _STEP_BYTES):
                length = min(_STEP_BYTES, end - at)
                if _libc.madvise(at, length, _MADV_POPULATE_WRITE) != 0:
                    return ctypes.get_errno()
        return 0

    def collapse(self, fd: int, start: int, stop: int) -> int:
        """Backs [start, stop) of this mapping with huge pages and returns 0, or the errno; what it
        holds stays. `fd` is the file that is mapped, from its start.

        Both are multiples of HUGE_PAGE_BYTES. EINVAL tells of a kernel that cannot, or not there;
        others of memory that is short, torn to pieces, or in use by a device right now. Some huge
        pages may be there then. Blocks for about 0.1 ms a MiB, without the interpreter lock.
        """
        try:
            for at in range(start, stop, HUGE_PAGE_BYTES):
                # Nothing is put where nothing is. A page that is in the file and not mapped yet is
                # moved without a word to the other processors.
                os.posix_fallocate(fd, at, _PAGE_BYTES)
        except OSError as error:
            return error.errno or errno.ENOMEM
        with self.view():
            if _libc.madvise(self._address + start, stop - start, _MADV_COLLAPSE) != 0:
                return ctypes.get_errno()
        return 0


class _Space:
    """The addresses, unmapped when nobody refers to this any more."""

    def __init__(self, fd: int, offset: int, nbytes: int, access: int) -> None:
        """`offset` and `nbytes` are multiples of the page size."""
        self.address = 0
        self.nbytes = nbytes
        self.address = _map(fd, offset, nbytes, access)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
            if _libc.madvise(self.address, nbytes, advice) != 0:
                raise _last_error()

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.nbytes)


def _map(fd: int, offset: int, nbytes: int, access: int) -> int:
    """Returns an address that agrees with `offset` to 2 MiB, if there is one. Raises OSError.

    Free addresses are found by reserving too many, and taken after they were given back: nothing
    of others' is ever mapped over. Where another thread was quicker, that is tried again.
    """
    for _ in range(_TRIES):
        wanted = _free_address(offset % HUGE_PAGE_BYTES, nbytes)
        address = _mmap(wanted, nbytes, access, _SHARED_THERE, fd, offset)
        if address is not None:
            return address
        if ctypes.get_errno() != errno.EEXIST:
            raise _last_error()
    address = _mmap(0, nbytes, access, mmap.MAP_SHARED, fd, offset)
    if address is None:
        raise _last_error()
    return address


def _free_address(within: int, nbytes: int) -> int:
    room = within + nbytes + HUGE_PAGE_BYTES
    reserved = _mmap(0, room, _NO_ACCESS, _RESERVE, -1, 0)
    if reserved is None:
        raise _last_error()
    _libc.munmap(reserved, room)
    return round_up(reserved, HUGE_PAGE_BYTES) + within


def _mmap(address: int, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int | None:
    got = _libc.mmap(address, nbytes, access, flags, fd, offset)
    return None if got is None or got == _FAILED else int(got)


def _last_error() -> OSError:
    number = ctypes.get_errno() or errno.ENOMEM
    return OSError(number, os.strerror(number))
