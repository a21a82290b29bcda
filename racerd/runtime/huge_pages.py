"""Huge pages for a memfd, whatever the system's default for shared memory is.

Layer: bottom. Shared memory gets 4 KiB pages on most systems (`shmem_enabled` is `never`), and
nothing that a mapping is advised changes that. MADV_COLLAPSE (Linux 6.1) does: it puts a huge page
where at least one small page is, at once. That costs a fraction of touching as many small pages;
AES-GCM runs a quarter faster from and to such memory; and whoever maps it at an aligned address
maps 2 MiB with each entry, a GiB in well under a millisecond. Where the kernel cannot, nothing is
lost but speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_PAGE_BYTES = 2 << 20

_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def back_with_huge_pages(fd: int, start: int, stop: int) -> bool:
    """Gives bytes [start, stop) of a memfd huge pages; what they hold stays.

    Both are multiples of HUGE_PAGE_BYTES, and lie in the file. Returns False where the kernel would
    not, for want of support or of memory that hangs together; some pages may be there then. Blocks
    for about 0.1 ms a MiB, without the interpreter lock.
    """
    # Its own mapping, at an aligned address, for as long as it takes: no view of it leaves here.
    size = stop - start
    space = _libc.mmap(
        None, size + HUGE_PAGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if space == _FAILED:
        return False
    try:
        base = -(-space // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(base, size, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, start) != base:
            # The kernel may have left a hole, where another thread's memory may lie by now: the
            # addresses are not ours to give back any more.
            space = None
            return False
        if not _allocate_one_page_of_each(fd, start, stop):
            return False
        return bool(_libc.madvise(base, size, _MADV_COLLAPSE) == 0)
    finally:
        if space is not None:
            _libc.munmap(space, size + HUGE_PAGE_BYTES)


def _allocate_one_page_of_each(fd: int, start: int, stop: int) -> bool:
    """Through the kernel, which says so where there is no memory left, instead of SIGBUS."""
    try:
        for at in range(start, stop, HUGE_PAGE_BYTES):
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
    except OSError:
        return False
    return True
