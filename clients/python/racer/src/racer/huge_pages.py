"""Huge pages for fresh shared memory, whatever the system's default for it is.

Layer: bottom. `shmem_enabled` is `never` on most systems, and advice does not change that;
MADV_COLLAPSE (Linux 6.1) does: it puts a huge page where at least one small page is, at once. The
first touch, which large reads otherwise wait for, costs a fraction then, and decryption into such
memory runs faster. Where the kernel cannot, nothing is lost but speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def back_with_huge_pages(fd: int, size: int) -> bool:
    """Gives a memfd of `size` bytes huge pages, as far as whole ones go.

    False where there is no whole one, or where the kernel gives none. Blocks for about 0.1 ms a
    MiB, without the interpreter lock.
    """
    whole = size // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if not whole:
        return False
    # Its own mapping, at an aligned address, for as long as it takes: no view of it leaves here.
    room = whole + _HUGE_PAGE_BYTES
    space = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if space is None or space == _FAILED:
        return False
    try:
        base = -(-space // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(base, whole, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != base:
            # The kernel may have left a hole, where another thread's memory may lie by now: the
            # addresses are not ours to give back any more.
            space = None
            return False
        for at in range(0, whole, _HUGE_PAGE_BYTES):
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
        return bool(_madvise(base, whole, _MADV_COLLAPSE) == 0)
    except OSError:
        return False  # No memory: whoever wants all of it is told next.
    finally:
        if space is not None:
            _munmap(space, room)
