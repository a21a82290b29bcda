"""Growable columns and a hash table of 32-bit row numbers: the index's building blocks.

Layer: store, pure; not thread-safe. A Python object per page would cost several hundred bytes; a
row in typed columns costs its fields. Bulk work goes through numpy arrays, single fields through
memoryviews of the same memory, which answer with plain ints three times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = (1 << 64) - 1
NOTHING = (1 << 32) - 1
_DELETED = NOTHING - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads runs of integers.
_ROWS_MIN = 16
_SLOT_BITS_MIN = 5

Array = npt.NDArray[Any]


class Table:
    """Rows of typed columns. Freed rows are reused; memory grows by a quarter.

    `columns` maps names to numpy types. `arrays[name]` and `views[name]` are valid until the next
    `take` or `take_many`, which may move them.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self._types = columns
        self.arrays = {name: np.zeros(_ROWS_MIN, dtype=kind) for name, kind in columns.items()}
        self.views = {name: array.data for name, array in self.arrays.items()}
        self._free: list[int] = []
        self.used = 0  # Rows ever handed out; rows behind it were never touched.

    @property
    def rows(self) -> int:
        """Rows in use."""
        return self.used - len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + 8 * len(self._free)

    def take(self) -> int:
        """Returns a row whose fields hold whatever its last user left."""
        if self._free:
            return self._free.pop()
        self._reserve(self.used + 1)
        self.used += 1
        return self.used - 1

    def take_many(self, count: int) -> int:
        """Returns the first of `count` fresh rows that follow each other."""
        self._reserve(self.used + count)
        self.used += count
        return self.used - count

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def _reserve(self, rows: int) -> None:
        size = len(next(iter(self.arrays.values())))
        if rows <= size:
            return
        size = max(rows, size + size // 4)
        for name, array in self.arrays.items():
            grown = np.zeros(size, dtype=self._types[name])
            grown[: self.used] = array[: self.used]
            self.arrays[name] = grown
            self.views[name] = grown.data


def mixed(hash64: int) -> int:
    """Spreads a 64-bit value over its upper bits."""
    return (hash64 * _GOLDEN) & U64


class HashTable:
    """Open addressing with linear probing over row numbers; keys live in the caller's columns.

    The caller gives a key's 64-bit hash, whose upper bits choose the slot, and a predicate that
    compares a row with the key. `rehash` returns (rows, hashes) of every live row.
    """

    def __init__(self, rehash: Callable[[], tuple[Array, Array]]) -> None:
        self._rehash = rehash
        self._live = 0
        self._taken = 0  # Slots that are not empty: live and deleted.
        self._allocate(_SLOT_BITS_MIN)

    @property
    def nbytes(self) -> int:
        return int(self._slots.nbytes)

    def _allocate(self, bits: int) -> None:
        self._shift = 64 - bits
        self._mask = (1 << bits) - 1
        self._slots = np.full(1 << bits, NOTHING, dtype=np.uint32)
        self._view = self._slots.data

    def find(self, hash64: int, matches: Callable[[int], bool]) -> int:
        """Returns the row that `matches`, or NOTHING."""
        slots, mask = self._view, self._mask
        slot = hash64 >> self._shift
        while (row := slots[slot]) != NOTHING:
            if row != _DELETED and matches(row):
                return int(row)
            slot = (slot + 1) & mask
        return NOTHING

    def insert(self, hash64: int, row: int) -> None:
        """Adds `row`, whose key must not be present. Its columns must be filled already."""
        if (self._taken + 1) * 3 > (self._mask + 1) * 2:
            self._rebuild()  # Holds `row` too if the caller's columns already show it.
            return
        slots, mask = self._view, self._mask
        slot = hash64 >> self._shift
        while slots[slot] not in (NOTHING, _DELETED):
            slot = (slot + 1) & mask
        self._taken += slots[slot] == NOTHING
        slots[slot] = row
        self._live += 1

    def remove(self, hash64: int, row: int) -> None:
        """Removes `row`, which must be present."""
        slots, mask = self._view, self._mask
        slot = hash64 >> self._shift
        while slots[slot] != row:
            if slots[slot] == NOTHING:
                raise KeyError(row)
            slot = (slot + 1) & mask
        self._live -= 1
        if slots[(slot + 1) & mask] == NOTHING:
            slots[slot] = NOTHING
            self._taken -= 1
        else:
            slots[slot] = _DELETED

    def rebuild(self) -> None:
        """Fills the table anew from the caller's columns."""
        self._rebuild()

    def _rebuild(self) -> None:
        rows, hashes = self._rehash()
        bits = max(_SLOT_BITS_MIN, int(len(rows) * 2).bit_length())
        self._allocate(bits)
        self._live = self._taken = len(rows)
        self._fill(rows.astype(np.uint32), hashes)

    def _fill(self, rows: Array, hashes: Array) -> None:
        """Places all rows at once: each round one row per free slot wins, the others step on."""
        slots = (hashes >> np.uint64(self._shift)).astype(np.int64)
        while len(rows):
            free = self._slots[slots] == NOTHING
            self._slots[slots[free]] = rows[free]
            lost = self._slots[slots] != rows
            rows, slots = rows[lost], (slots[lost] + 1) & self._mask
