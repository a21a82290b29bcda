"""The records of one slab: where each lies, and to whom its bytes are charged.

Layer: store, pure; not thread-safe: the engine owns it, under its driver's lock. A record is
charged to its segment, to its cache and, where a pin selects its object, to the pins, from `add`
to `forget`: nothing else changes these sums, and each of them equals what the index says.

Pins select by name, so that they also hold for versions that come later. Beyond half of the slab
they are not honoured: eviction has to find a victim.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.store.claims import Dropped, Found
from racerd.store.columns import NOTHING
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.index import FORMAT_V1, UNPROVEN, PageIndex
from racerd.store.notes import Selector
from racerd.store.record_v1 import v1_record_bytes
from racerd.store.segments import Segments

PINNED_SHARE_MAX = 0.5  # Of the slab.


class Ledger:
    """See the module. A row is the index's number of a record; NOTHING is no row.

    `quotas`: slab bytes that a cache may take here. `cache_bytes` goes by the catalog's numbers.
    """

    def __init__(self, geometry: SlabGeometry) -> None:
        self.geometry = geometry
        self.index = PageIndex(geometry.segment_count)
        self.segments = Segments(geometry)
        self.live_bytes = 0
        self.cache_bytes: list[int] = []
        self.quotas: dict[str, int] = {}
        self.pinned_bytes = 0
        self.pinned_bytes_max = int(geometry.segments_stop * PINNED_SHARE_MAX)
        self._pins: tuple[Selector, ...] = ()
        self._sequences = array("Q")  # By row, of scanned records; 0 of others. See `sequence_of`.

    # Finding

    def flagged(self, page: PageId, flag: int) -> bool:
        """Whether `page` is here, and `flag` is set of it."""
        row = self.index.find(page)
        return row != NOTHING and bool(self.index.table.views["flags"][row] & flag)

    def hold(self, row: int, page: PageId) -> Found:
        """The record of `row`, which is `page`, with its segment pinned."""
        views = self.index.table.views
        segment = views["segment"][row]
        self.segments.pin(segment)
        return Found(
            page,
            segment,
            self.offset(row),
            self.segments.generations[segment],
            views["length"][row],
            self.record_bytes(row),
            bool(views["flags"][row] & FORMAT_V1),
            not views["flags"][row] & UNPROVEN,
        )

    def row_of(self, found: Found) -> int:
        """The row of `found` if the index still means this very record, else NOTHING."""
        row = self.index.find(found.page)
        if row == NOTHING or self.offset(row) != found.offset:
            return NOTHING
        if self.segments.generations[found.segment] != found.generation:
            return NOTHING
        return row

    def offset(self, row: int) -> int:
        """Where the record starts in the slab."""
        views = self.index.table.views
        start = self.geometry.segment_offset(views["segment"][row])
        return int(start + views["block"][row] * BLOCK_BYTES)

    def record_bytes(self, row: int) -> int:
        """What the record takes on the slab."""
        views = self.index.table.views
        length = views["length"][row]
        if views["flags"][row] & FORMAT_V1:
            identity = self.index.catalog.table.views["identity"][views["version"][row]]
            return v1_record_bytes(identity, length)
        return self.geometry.record_bytes(length)

    def _sizes(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """As `record_bytes`, of many."""
        columns = self.index.table.arrays
        blocks = -(-columns["length"][rows].astype(np.int64) // BLOCK_BYTES)
        sizes: npt.NDArray[np.int64] = self.geometry.header_bytes + blocks * BLOCK_BYTES
        for at in np.flatnonzero(columns["flags"][rows] & FORMAT_V1).tolist():
            sizes[at] = self.record_bytes(int(rows[at]))
        return sizes

    def versions_of(self, selector: Selector, start: int = 0, stop: int | None = None) -> list[int]:
        """Rows of the catalog, of those from `start` to `stop`, that `selector` names."""
        catalog = self.index.catalog
        rows = slice(start, catalog.table.used if stop is None else stop)
        if selector.exact:
            object_id = ObjectId(selector.cache, selector.bucket, selector.key)
            return catalog.rows_of_object(object_id, rows)
        return catalog.rows_of_prefix(selector.cache, selector.bucket, selector.key, rows)

    def held(self, selectors: Iterable[Selector]) -> tuple[int, int]:
        """Pages that any of `selectors` names, and the slab bytes that they take."""
        versions = {row for selector in selectors for row in self.versions_of(selector)}
        if not versions:
            return 0, 0
        rows = self.index.live_rows()
        rows = rows[np.isin(self.index.table.arrays["version"][rows], list(versions))]
        return len(rows), int(self._sizes(rows).sum())

    # Charging

    def add(
        self, page: PageId, *, segment: int, offset: int, length: int, size: int, flags: int = 0,
        sequence: int = 0,
    ) -> None:  # fmt: skip
        """Charges the record of `page`, of `size` bytes at `offset` of the slab.

        `sequence`, where the record was found on the medium, is kept until `forget_sequences`.
        """
        row = self.index.add(
            page, segment=segment, block=self._block(segment, offset), length=length, flags=flags,
            pinned=self._pins_anew(page.version),
        )  # fmt: skip
        if sequence:
            self._sequences.extend(0 for _ in range(len(self._sequences), row + 1))
        if row < len(self._sequences):
            self._sequences[row] = sequence
        self._charge(row, size)

    def _pins_anew(self, version: ObjectVersion) -> bool:
        """Whether a pin selects `version`, of which nothing is here yet."""
        if not self._pins or self.index.catalog.find(version) != NOTHING:
            return False
        return any(pin.matches(version.object_id) for pin in self._pins)

    def move(self, row: int, *, segment: int, offset: int) -> None:
        """A copy of the record, as long as it is, takes its place."""
        size = self.record_bytes(row)
        self._charge(row, -size)
        self.index.move(row, segment=segment, block=self._block(segment, offset))
        self._charge(row, size)

    def forget(self, row: int) -> None:
        self._charge(row, -self.record_bytes(row))
        self.index.remove(row)

    def drop(self, row: int) -> Dropped:
        """Forgets a record; its segment stays pinned for the tombstone."""
        segment = self.index.table.views["segment"][row]
        self.segments.pin(segment)
        generation = self.segments.generations[segment]
        dropped = Dropped(segment, self.offset(row), generation, self.record_bytes(row))
        self.forget(row)
        return dropped

    def _block(self, segment: int, offset: int) -> int:
        return (offset - self.geometry.segment_offset(segment)) // BLOCK_BYTES

    def _charge(self, row: int, size: int) -> None:
        """Accounts `size` bytes more, or less, to whom the record is charged."""
        views, catalog = self.index.table.views, self.index.catalog.table.views
        version = views["version"][row]
        self.live_bytes += size
        self.segments.live_bytes[views["segment"][row]] += size
        if catalog["pinned"][version]:
            self.pinned_bytes += size
        cache = catalog["cache"][version]
        if cache >= len(self.cache_bytes):
            self.cache_bytes.extend([0] * (cache + 1 - len(self.cache_bytes)))
        self.cache_bytes[cache] += size

    # Quotas and pins

    def over_quota(self, cache: str, size: int) -> int:
        """By how many bytes `cache` would be over its quota with `size` more; 0 without a quota."""
        limit = self.quotas.get(cache)
        if limit is None:
            return 0
        number = self.index.catalog.known_cache_number(cache)
        taken = self.cache_bytes[number] if number < len(self.cache_bytes) else 0
        return taken + size - limit

    def spared(self, row: int) -> bool:
        """Whether a pin keeps the record: its object has one, and pins are honoured."""
        version = self.index.table.views["version"][row]
        pinned = bool(self.index.catalog.table.views["pinned"][version])
        return pinned and self.pinned_bytes <= self.pinned_bytes_max

    def mark_pinned(self, pins: Iterable[Selector]) -> None:
        """From now on exactly what `pins` select is pinned, here already or yet to come."""
        self._pins = tuple(pins)
        catalog = self.index.catalog
        catalog.table.arrays["pinned"][:] = 0
        for pin in self._pins:
            for row in self.versions_of(pin):
                catalog.table.views["pinned"][row] = 1
        columns = self.index.table.arrays
        rows = self.index.live_rows()
        rows = rows[catalog.table.arrays["pinned"][columns["version"][rows]] > 0]
        self.pinned_bytes = int(self._sizes(rows).sum())

    # Recovery

    def adopt(self, index: PageIndex) -> None:
        """Takes over the index of a checkpoint, all of it unproven. Nothing may be here yet."""
        assert len(self.index) == 0
        self.index = index
        rows, columns = index.live_rows(), index.table.arrays
        columns["flags"][rows] |= UNPROVEN
        sizes = self._sizes(rows)
        segments = np.bincount(columns["segment"][rows], sizes, len(self.segments))
        self.segments.live_bytes = array("Q", segments.astype(np.uint64).tobytes())
        owners = index.catalog.table.arrays["cache"][columns["version"][rows]]
        totals = np.bincount(owners, sizes, len(index.catalog.caches))
        self.cache_bytes = totals.astype(np.int64).tolist()
        self.live_bytes = int(sizes.sum())
        self.mark_pinned(self._pins)  # A checkpoint tells what was pinned when it was written.

    def sequence_of(self, row: int) -> int | None:
        """The sequence of a record that was found on the medium, until `forget_sequences`."""
        known = self._sequences[row] if row < len(self._sequences) else 0
        return known or None

    def forget_sequences(self) -> None:
        """Which of two records of a page is the younger one does not matter any more."""
        self._sequences = array("Q")
