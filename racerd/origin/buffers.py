"""Memory that a fetch fills.

Layer: origin.
"""

from __future__ import annotations

import mmap

from racerd.units import KIB

_MAPPED_BYTES_MIN = 256 * KIB


def fresh_buffer(length: int) -> memoryview:
    """Returns writable zeroed memory of `length` bytes that lives as long as the view.

    Large ones are mappings: the kernel zeroes their pages when they are filled, outside the
    interpreter lock; a bytearray would be cleared here and now, under it.
    """
    if length < _MAPPED_BYTES_MIN:
        return memoryview(bytearray(length))
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
