"""The page cache of given files: warmed, dropped, and asked what of it is there.

Only these files are touched: what other programs have in the cache stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_STEP_BYTES = 8 << 20


def warm(paths: Sequence[Path]) -> None:
    """Reads every byte."""
    buffer = bytearray(_STEP_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Sequence[Path]) -> None:
    """Writes back what is dirty, and gives every page of the files up that nobody maps."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(paths: Sequence[Path]) -> float:
    """The share of the files' pages that the page cache holds, by mincore(2)."""
    found = total = 0
    for path in paths:
        held = _resident_pages(path)
        found, total = found + sum(held), total + len(held)
    return found / total if total else 1.0


def _resident_pages(path: Path) -> bytes:
    """A 1 for each page of the file that is in the cache, a 0 for each that is not."""
    size = path.stat().st_size
    if not size:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        pages = -(-size // mmap.PAGESIZE)
        answer = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(view)
        try:
            code = _LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(size), answer)
        finally:
            del first  # It holds the mapping open.
        if code != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        return bytes(byte & 1 for byte in answer)
