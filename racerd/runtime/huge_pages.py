"""Huge pages for a fresh memfd, whatever the system's default for shared memory is.

Layer: bottom. Shared memory gets 4 KiB pages on most systems (`shmem_enabled` is `never`), and
nothing that a mapping is advised changes that. MADV_COLLAPSE (Linux 6.1) does: it puts a huge page
where at least one small page is, at once. That costs a fraction of touching as many small pages,
and whoever maps the memory at an aligned address later maps 2 MiB with each entry: a GiB in well
under a millisecond. Where the kernel cannot, nothing is lost but speed.
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


def back_with_huge_pages(fd: int, size: int) -> bool:
    """Gives the first `size` bytes of a memfd that nobody has written to huge pages.

    `size` is a multiple of HUGE_PAGE_BYTES, and the file as long. Returns False where the kernel
    would not, for want of support or of memory that hangs together; some pages may be there then,
    all of them zero. Blocks for about 0.1 ms a MiB, without the interpreter lock.
    """
    # Its own mapping, at an aligned address, for as long as it takes: no view of it leaves here.
    space = _libc.mmap(
        None, size + HUGE_PAGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if space == _FAILED:
        return False
    try:
        start = -(-space // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(start, size, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != start:
            return False
        if not _touch_one_page_of_each(fd, size):
            return False
        return bool(_libc.madvise(start, size, _MADV_COLLAPSE) == 0)
    finally:
        _libc.munmap(space, size + HUGE_PAGE_BYTES)


def _touch_one_page_of_each(fd: int, size: int) -> bool:
    """Through the kernel, which says so where there is no memory left, instead of SIGBUS."""
    try:
        for at in range(0, size, HUGE_PAGE_BYTES):
            os.pwrite(fd, b"\0", at)
    except OSError:
        return False
    return True
