"""Memory that starts on a 4 KiB boundary, for O_DIRECT.

Layer: store. Anonymous mappings are page-aligned by the kernel. A pool keeps a bounded number of
buffers of one size for reuse; beyond that they are made and dropped. Safe from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from racerd.pages import ALIGNMENT_BYTES
from racerd.units import BytesLike, round_up


def aligned_buffer(size: int) -> memoryview:
    """A zeroed, writable view of exactly `size` bytes that starts on a page boundary."""
    return memoryview(mmap.mmap(-1, round_up(max(size, 1), ALIGNMENT_BYTES)))[:size]


def address_of(view: memoryview) -> int:
    """The address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def wipe(view: memoryview) -> None:
    """Zeroes `view`."""
    view[:] = bytes(len(view))


def copy(target: memoryview, source: BytesLike) -> None:
    """Copies `source` to the start of `target` and zeroes what is left of it."""
    target[: len(source)] = source
    wipe(target[len(source) :])


class BufferPool:
    """Aligned buffers of `size` bytes; at most `keep` of them wait for reuse."""

    def __init__(self, size: int, keep: int) -> None:
        self.size = size
        self._keep = keep
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lends a buffer. Its contents are whatever the last borrower left."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = aligned_buffer(self.size)
        try:
            yield buffer
        finally:
            with self._lock:
                if len(self._free) < self._keep:
                    self._free.append(buffer)
