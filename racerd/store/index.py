"""The index of one slab: which page lies where. All of it is in memory.

Layer: store, pure; not thread-safe: the ledger owns it, under the lock of the engine's driver. A
page costs about 40 bytes; the names of its version are the catalog's. What is found here is
compared once more with the header of the record, when that is read.

Rows of a segment are chained, because a segment is evicted as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from racerd.ids import PageId
from racerd.store.catalog import Catalog, halves
from racerd.store.columns import NOTHING, U64, Array, HashTable, Table, mixed

HITS_MAX = 3
LIVE = 1  # Bits of the column `flags`.
FORMAT_V1 = 2
SUSPECT = 4  # A read of it failed once.
UNPROVEN = 8  # From a checkpoint: its record may have been dropped since. Never saved.

_PAGE_COLUMNS = {
    "version": "u4",  # Row of the catalog.
    "page": "u4",
    "segment": "u4",
    "block": "u4",  # Start of the record in its segment, in blocks of 4 KiB.
    "length": "u4",  # Plaintext bytes.
    "next": "u4",
    "previous": "u4",
    "flags": "u1",
    "hits": "u1",
}


def hash_of(page: PageId) -> int:
    """The 64-bit hash of a page, spread over its upper bits."""
    first, _ = halves(page.version.digest)
    return mixed(first + page.index & U64)


class PageIndex:
    """Pages by (version, page), with a chain per segment."""

    def __init__(self, segment_count: int) -> None:
        self.catalog = Catalog()
        self.table = Table(_PAGE_COLUMNS)
        self._heads = np.full(segment_count, NOTHING, dtype=np.uint32)
        self._hashes = HashTable(self._rehash)

    def __len__(self) -> int:
        return self.table.rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        own = self.table.nbytes + self._hashes.nbytes + int(self._heads.nbytes)
        return own + self.catalog.nbytes

    def find(self, page: PageId) -> int:
        """Returns the row of `page`, or NOTHING."""
        number, version = page.index, page.version
        versions, pages = self.table.views["version"], self.table.views["page"]
        is_of = self.catalog.is_of
        return self._hashes.find(
            hash_of(page),
            lambda row: pages[row] == number and is_of(versions[row], version),
        )

    def add(
        self, page: PageId, *, segment: int, block: int, length: int, flags: int, pinned: bool
    ) -> int:
        """Adds `page`, which must not be here yet; `pinned` counts if its version is new."""
        catalog = self.catalog
        version = catalog.find(page.version)
        if version == NOTHING:
            version = catalog.add(page.version, pinned=pinned)
        catalog.table.views["pages"][version] += 1
        row = self.table.take()
        views = self.table.views
        views["version"][row] = version
        views["page"][row] = page.index
        views["segment"][row] = segment
        views["block"][row] = block
        views["length"][row] = length
        views["flags"][row] = flags | LIVE
        views["hits"][row] = 0
        self._link(row, segment)
        self._hashes.insert(self._hash(row), row)
        return row

    def remove(self, row: int) -> None:
        views = self.table.views
        self._hashes.remove(self._hash(row), row)
        self._unlink(row)
        views["flags"][row] = 0
        self.table.give_back(row)
        version = views["version"][row]
        pages = self.catalog.table.views["pages"]
        pages[version] -= 1
        if pages[version] == 0:
            self.catalog.remove(version)

    def move(self, row: int, *, segment: int, block: int) -> None:
        """The record of `row` was copied to another place."""
        views = self.table.views
        self._unlink(row)
        views["segment"][row] = segment
        views["block"][row] = block
        self._link(row, segment)

    def rows_of_segment(self, segment: int) -> Iterator[int]:
        """Rows in `segment`, latest first. The one just given may be removed meanwhile."""
        row = int(self._heads[segment])
        while row != NOTHING:
            following = self.table.views["next"][row]
            yield row
            row = following

    def rows_of_versions(self, versions: list[int]) -> list[int]:
        arrays, used = self.table.arrays, self.table.used
        alive = (arrays["flags"][:used] & LIVE).astype(bool)
        chosen = np.isin(arrays["version"][:used], np.array(versions, dtype=np.uint32))
        return [int(row) for row in np.flatnonzero(alive & chosen)]

    def page(self, row: int) -> PageId:
        return PageId(
            self.catalog.version(self.table.views["version"][row]), self.table.views["page"][row]
        )

    def live_rows(self) -> Array:
        return np.flatnonzero(self.table.arrays["flags"][: self.table.used] & LIVE)

    def load(self, arrays: dict[str, Array]) -> None:
        """Takes over saved rows. The index must be empty, its catalog loaded already."""
        count = len(arrays["page"])
        first = self.table.take_many(count)
        ours = self.table.arrays
        for name, values in arrays.items():
            ours[name][first : first + count] = values
        self._chain_all(first, count)
        pages = np.bincount(arrays["version"], minlength=self.catalog.table.used)
        self.catalog.table.arrays["pages"][: len(pages)] = pages
        self._hashes.rebuild()

    def _chain_all(self, first: int, count: int) -> None:
        ours = self.table.arrays
        segment = ours["segment"][first : first + count]
        order = np.argsort(segment, kind="stable")
        rows = (order + first).astype(np.uint32)
        same = segment[order][1:] == segment[order][:-1]
        following = np.full(count, NOTHING, dtype=np.uint32)
        previous = np.full(count, NOTHING, dtype=np.uint32)
        following[:-1][same] = rows[1:][same]
        previous[1:][same] = rows[:-1][same]
        ours["next"][rows] = following
        ours["previous"][rows] = previous
        heads = previous == NOTHING
        self._heads[segment[order][heads]] = rows[heads]

    def _link(self, row: int, segment: int) -> None:
        head = int(self._heads[segment])
        self.table.views["next"][row] = head
        self.table.views["previous"][row] = NOTHING
        if head != NOTHING:
            self.table.views["previous"][head] = row
        self._heads[segment] = row

    def _unlink(self, row: int) -> None:
        views = self.table.views
        following, previous = views["next"][row], views["previous"][row]
        if following != NOTHING:
            views["previous"][following] = previous
        if previous != NOTHING:
            views["next"][previous] = following
        else:
            self._heads[views["segment"][row]] = following

    def _hash(self, row: int) -> int:
        digest = self.catalog.table.views["digest0"][self.table.views["version"][row]]
        return mixed(digest + self.table.views["page"][row] & U64)

    def hashes_of(self, rows: Array) -> Array:
        """`hash_of` the pages of `rows`."""
        ours = self.table.arrays
        digests = self.catalog.table.arrays["digest0"][ours["version"][rows]]
        hashes: Array = (digests + ours["page"][rows]) * np.uint64(mixed(1))
        return hashes

    def _rehash(self) -> tuple[Array, Array]:
        rows = self.live_rows()
        return rows, self.hashes_of(rows)
