"""What became of pages that are not on a disk: for people, who ask why a page is fetched again.

Layer: store; thread-safe, no I/O. A table of fixed size: each slot remembers the last page that
fell into it, by 32 bits of its hash, so that an answer may be missing and is wrong once in four
thousand million times. Nothing is decided by it. Restarts begin with an empty one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from racerd.ids import PageId
from racerd.store.columns import Array
from racerd.store.index import hash_of

_SLOT_BITS = 16
_TAG_MASK = 0xFFFFFFFF
_TEXTS_MAX = 255

EVICTED_FOR_SPACE = "evicted to make room for newer pages"
EVICTED_FOR_QUOTA = "evicted because its cache reached its quota"
EVICTED_ON_REQUEST = "evicted on request"
UNREADABLE = "given up: the disk failed twice to read it"

# By the result that `racer_store_writes_total` counts. Those that are missing are no refusals.
_REFUSALS = {
    "down": "not kept: no disk took writes",
    "recovering": "not kept: recovery was not over yet",
    "not_admitted": "not kept: another node's page, seen for the first time",
    "write_budget": "not kept: what may be written to the disk in a day is spent",
    "quota": "not kept: its cache is at its quota",
    "disk_full": "not kept: the medium is full, and an eviction did not help",
    "no_space": "not kept: every segment is in use or pinned",
    "dropped_meanwhile": "evicted on request while it was written",
    "io_error": "not kept: the disk failed to write it",
    "busy": "not kept: the disk was too busy making room",
    "identity_too_long": "not kept: its names do not fit a record's header",
}
_KEY_REMOVED = "dropped: the key that it was sealed with was removed"


def refusal(result: str) -> str | None:
    """The sentence for a write that was not kept; None for a result that needs none."""
    return _REFUSALS.get(result)


def damage(reason: str) -> str:
    """The sentence for a copy that was dropped; `reason` is the metric's."""
    if reason == "key_retired":
        return _KEY_REMOVED
    return f"dropped: its copy was damaged ({reason})"


class Fates:
    """Of one disk. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._texts: list[str] = [""]  # Number 0: nothing was noted here.
        slots = 1 << _SLOT_BITS
        self._tags = np.zeros(slots, dtype=np.uint32)
        self._kinds = np.zeros(slots, dtype=np.uint8)
        self._times = np.zeros(slots, dtype=np.float64)

    def note(self, page: PageId, text: str) -> None:
        """`page` is not here (any more). `text` is one of a few sentences of the code."""
        self.note_all(np.array([hash_of(page)], dtype=np.uint64), text)

    def note_all(self, hashes: Array, text: str) -> None:
        """As `note`, for pages by their hashes."""
        slots = (hashes >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)
        tags = (hashes >> np.uint64(16)).astype(np.uint32)
        with self._lock:
            self._tags[slots] = tags
            self._kinds[slots] = self._number(text)
            self._times[slots] = self._clock()

    def _number(self, text: str) -> int:
        if text not in self._texts:
            if len(self._texts) > _TEXTS_MAX:
                return 0
            self._texts.append(text)
        return self._texts.index(text)

    def find(self, page: PageId) -> tuple[str, float] | None:
        """What became of `page`, and how many seconds ago; None where that is not known."""
        hash64 = hash_of(page)
        slot = hash64 >> (64 - _SLOT_BITS)
        with self._lock:
            kind = int(self._kinds[slot])
            if not kind or int(self._tags[slot]) != hash64 >> 16 & _TAG_MASK:
                return None
            return self._texts[kind], max(0.0, self._clock() - float(self._times[slot]))
