"""The one door to mmap(2) at addresses of our own choice, which Python's mmap has not.

Layer: bottom; thread-safe, like the calls themselves. Addresses are numbers here: who uses some
holds their reservation.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_PAGE_BYTES = 2 << 20

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1

MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Reservation:
    """Addresses of our own, without memory behind them; `map_over` puts something there.

    To the limit of a process's data (RLIMIT_DATA) they count until then, or until `forbid`.

    Given back, with what was mapped over them, when nobody refers to this any more. They belong to
    an object from their first moment: an interrupt between any two steps loses none.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there are none left, OverflowError where there never were."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._owner = mmap.mmap(-1, nbytes, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._owner))

    def leave(self) -> None:
        """Never gives the addresses back: others may have them by now."""
        _abandoned.append(self._owner)


_abandoned: list[mmap.mmap] = []


def map_over(address: int, nbytes: int, flags: int, descriptor: int = -1, offset: int = 0) -> bool:
    """Maps readable and writable memory over reserved addresses.

    After False there may be a hole where others' memory lies by now: none of the reservation must
    be given back then.
    """
    got = _mmap(
        address, nbytes, _READ_WRITE, flags | _MAP_FIXED | MAP_NORESERVE, descriptor, offset
    )
    return bool(got == address)


def forbid(address: int, nbytes: int) -> None:
    """Makes any use of it end the process, until something is mapped there."""
    _mprotect(address, nbytes, _NO_ACCESS)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice."""
    return bool(_madvise(address, nbytes, advice) == 0)


def last_errno() -> int:
    """What the last call of this thread that failed said."""
    return ctypes.get_errno()
