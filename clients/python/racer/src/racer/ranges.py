"""Offsets and lengths of calls as ranges of objects.

Layer: bottom, pure.
"""

from __future__ import annotations

from racer.errors import RangeNotSatisfiable
from racer.urls import RacerUrl


def stop_of(offset: int, length: int | None) -> int | None:
    """The end of the range, None for the object's. Raises ValueError for what is no range."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"offset {offset} and length {length}: neither may be negative")
    return None if length is None else offset + length


def within(url: RacerUrl, offset: int, stop: int | None, size: int) -> tuple[int, int]:
    """`[start, stop)` cut to an object of `size` bytes.

    Raises RangeNotSatisfiable where it starts at or behind the end; but an empty object may be
    read from 0, and nothing may be read at the very end.
    """
    if offset > size or (offset == size and size > 0 and stop != offset):
        error = RangeNotSatisfiable(
            f"{url} has {size:,} bytes, and byte {offset:,} was asked for",
            hint="`stat` tells the size",
        )
        error.size = size
        raise error
    return offset, size if stop is None else min(stop, size)
