"""Touches memory before it is needed, many pages at a time and without the interpreter lock.

Layer: bottom. The first touch of a page costs a fault; on virtual machines the fault costs more
than the page. `populate` has the kernel do a range at once (MADV_POPULATE_WRITE, Linux 5.14); where
it cannot, nothing is lost but speed. `PopulateAhead` does it on a thread, always a little ahead of
what is used, so that memory which is never used is never touched either.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from types import TracebackType

from racerd.runtime.huge_pages import HUGE_PAGE_BYTES, back_with_huge_pages

_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(mapping: mmap.mmap, start: int, stop: int) -> int:
    """Touches pages [start, stop) of a writable mapping and returns 0, or the errno.

    `start` lies on a page. Blocks for about 0.1 ms a MiB, in steps; never faults: a page that
    cannot be had is an errno. The caller keeps the mapping open meanwhile.
    """
    exported = (ctypes.c_char * len(mapping)).from_buffer(mapping)
    try:
        base = ctypes.addressof(exported)
        for at in range(start, stop, _STEP_BYTES):
            length = min(_STEP_BYTES, stop - at)
            if _libc.madvise(base + at, length, _MADV_POPULATE_WRITE) != 0:
                return ctypes.get_errno()
        return 0
    finally:
        del exported


class PopulateAhead:
    """Keeps a mapping touched from its start to `ahead_bytes` past what `need` last said.

    `first_bytes` are touched in any case, from the beginning: a process that has just started has
    nothing better to do, whereas one that is busy pays for what it touches ahead.
    `fd` is the memfd behind the mapping, with the same offsets: it gets huge pages for as long as
    the kernel gives any. A context manager; leaving it waits for the step that runs. Stops for good
    at the first refusal of the kernel.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        *,
        ahead_bytes: int,
        name: str,
        first_bytes: int = 0,
        fd: int | None = None,
    ) -> None:
        self._mapping = mapping
        self._fd = fd
        self.huge_bytes = 0  # How much of what was touched is huge pages.
        self._ahead_bytes = ahead_bytes
        self._wanted = min(first_bytes, len(mapping))
        self._changed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> PopulateAhead:
        self.need(0)
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self._changed.set()
        self._thread.join()

    def need(self, stop: int) -> None:
        """Says that bytes up to `stop` are used now. Any thread; costs next to nothing."""
        wanted = min(stop + self._ahead_bytes, len(self._mapping))
        if wanted > self._wanted:
            self._wanted = wanted
            self._changed.set()

    def _work(self) -> None:
        done = 0
        while True:
            self._changed.wait()
            self._changed.clear()
            while done < self._wanted and not self._ended:
                stop = min(done + _STEP_BYTES, len(self._mapping))
                self._ask_for_huge_pages(done, stop)
                if populate(self._mapping, done, stop) != 0:
                    return
                done = stop
            if self._ended:
                return

    def _ask_for_huge_pages(self, start: int, stop: int) -> None:
        """Before the small ones are made. A step that ends elsewhere is the last one."""
        if self._fd is None or stop % HUGE_PAGE_BYTES:
            return
        if back_with_huge_pages(self._fd, start, stop):
            self.huge_bytes += stop - start
        else:
            self._fd = None


def keep_freed_memory() -> None:
    """Has malloc keep blocks of a page of an object instead of giving each back to the kernel.

    Bodies from origins come in buffers of a page; without this each is mapped, faulted in and
    unmapped again. mallopt(3): M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, glibc only; what is kept is
    bounded by what was in use at once.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)
        mallopt(-1, 256 << 20)
