"""Memory that a fetch fills.

Layer: origin.
"""

from __future__ import annotations

import contextlib
import mmap

from racerd.units import KIB

_MAPPED_BYTES_MIN = 256 * KIB


def fresh_buffer(length: int) -> memoryview:
    """Returns writable zeroed memory of `length` bytes that lives as long as the view.

    Large ones are mappings of huge pages where the system has them: the kernel zeroes pages when
    they are filled, outside the interpreter lock; a bytearray would be cleared here, under it.
    Touching 4 KiB pages one by one takes half of the time of a fetch, and threads that do it get in
    each other's way.
    """
    if length < _MAPPED_BYTES_MIN:
        return memoryview(bytearray(length))
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without huge pages: slower, and that is all.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
