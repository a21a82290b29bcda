"""Huge pages for fresh shared memory, whatever the system's default for it is.

Layer: bottom. `shmem_enabled` is `never` on most systems, and advice does not change that;
MADV_COLLAPSE (Linux 6.1) does: it puts a huge page where at least one small page is, at once. The
first touch, which large reads otherwise wait for, costs a fraction then, and decryption into such
memory runs faster. Where the kernel cannot, nothing is lost but speed.
"""

from __future__ import annotations

import mmap
import os

from racer.address_space import (
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    Reservation,
    advise,
    map_over,
)


def back_with_huge_pages(fd: int, size: int) -> bool:
    """Gives a memfd of `size` bytes huge pages, as far as whole ones go.

    False where there is no whole one, or where the kernel gives none. Blocks for about 0.1 ms a
    MiB, without the interpreter lock.
    """
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole:
        return False
    # A mapping of its own, at an aligned address, for as long as it takes: no view of it leaves.
    try:
        space = Reservation(whole + HUGE_PAGE_BYTES)
    except (OSError, OverflowError):
        return False
    base = -(-space.address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if not map_over(base, whole, mmap.MAP_SHARED, fd):
        space.leave()
        return False
    try:
        for at in range(0, whole, HUGE_PAGE_BYTES):
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
    except OSError:
        return False  # No memory: whoever wants all of it is told next.
    return advise(base, whole, MADV_COLLAPSE)
