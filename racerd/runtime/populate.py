"""Touches memory before it is needed, on a thread of its own.

Layer: bottom. The first touch of a page costs a fault; on virtual machines the fault costs more
than the page. `PopulateAhead` has the kernel do many pages at once, always a little ahead of what
is used, so that memory which is never used is never touched either.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque
from types import TracebackType

from racerd.runtime.memory_map import HUGE_PAGE_BYTES, MemoryMap

_STEP_BYTES = 8 << 20
_RETRY_SECONDS = 0.1
_RETRY_SECONDS_MAX = 60.0
_TRIES_AT_ONE_PACE = 8  # Each may have the kernel move memory around.


class PopulateAhead:
    """Keeps a mapping touched from its start to `ahead_bytes` past what `need` last said.

    `first_bytes` are touched in any case, from the beginning: a process that has just started has
    nothing better to do, whereas one that is busy pays for what it touches ahead.
    The mapping is of all of `fd`, which stays open as long, and gets huge pages. Where the kernel
    has none to give, be it for a disk that reads or writes there right now, it is asked again
    later, a step at a time, `retry_seconds` after the last and twice as much after every few that
    brought nothing.
    A context manager; leaving it waits for the step that runs. Stops for good where no memory is
    given at all.
    """

    def __init__(
        self,
        mapping: MemoryMap,
        fd: int,
        *,
        ahead_bytes: int,
        name: str,
        first_bytes: int = 0,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._mapping = mapping
        self._fd = fd
        self._huge = True
        self.huge_bytes = 0  # How much of what was touched is huge pages.
        self._refused: deque[int] = deque()  # Where steps begin that have small pages.
        self._futile = 0  # How many were asked for since one was given.
        self._retry_seconds = retry_seconds
        self._ahead_bytes = ahead_bytes
        self._wanted = min(first_bytes, mapping.nbytes)
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
        wanted = min(stop + self._ahead_bytes, self._mapping.nbytes)
        if wanted > self._wanted:
            self._wanted = wanted
            self._changed.set()

    def _work(self) -> None:
        done = 0
        while True:
            if not self._changed.wait(self._pause_seconds()):
                self._ask_again()
                continue
            self._changed.clear()
            while done < self._wanted and not self._ended:
                stop = min(done + _STEP_BYTES, self._mapping.nbytes)
                self._ask_for_huge_pages(done, stop)
                if self._mapping.populate(done, stop) != 0:
                    return
                done = stop
            if self._ended:
                return

    # --- huge pages -------------------------------------------------------------------------

    def _ask_for_huge_pages(self, start: int, stop: int) -> bool:
        """Before the small ones are made, or in their place. A step that ends elsewhere is the
        last one, and keeps small ones."""
        if not self._huge or stop % HUGE_PAGE_BYTES:
            return False
        refusal = self._mapping.collapse(self._fd, start, stop)
        if not refusal:
            self.huge_bytes += stop - start
        elif refusal == errno.EINVAL and not self.huge_bytes and not self._refused:
            self._huge = False  # This kernel cannot, and will not learn it.
        else:
            self._refused.append(start)
        return not refusal

    def _pause_seconds(self) -> float | None:
        """How long nothing may happen before `_ask_again`. None where nothing was refused."""
        if not self._refused:
            return None
        doubled = min(self._futile // _TRIES_AT_ONE_PACE, 16)
        return min(self._retry_seconds * 2.0**doubled, _RETRY_SECONDS_MAX)

    def _ask_again(self) -> None:
        start = self._refused.popleft()
        given = self._ask_for_huge_pages(start, min(start + _STEP_BYTES, self._mapping.nbytes))
        self._futile = 0 if given else self._futile + 1


def keep_freed_memory() -> None:
    """Has malloc keep blocks of a page of an object instead of giving each back to the kernel.

    Bodies from origins come in buffers of a page; without this each is mapped, faulted in and
    unmapped again. mallopt(3): M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, glibc only; what is kept is
    bounded by what was in use at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)
        mallopt(-1, 256 << 20)
