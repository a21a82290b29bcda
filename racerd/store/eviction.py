"""What is given up first: the policy of eviction.

Layer: store, pure: decides and, but for the hits that it counts down, changes nothing; the engine
carries it out. Whole segments go, oldest first. A segment of which more than half was read since
it was last looked at gets a second chance; of any other the records that were read are worth a
copy, the rest is not. For a quota single pages go: what was not read first, then by age.
Room for the copies is seen to beforehand (`has_room`).
"""

from __future__ import annotations

import numpy as np

from racerd.store.claims import Found, Victim
from racerd.store.geometry import BLOCK_BYTES
from racerd.store.index import HITS_MAX
from racerd.store.ledger import Ledger

MOVE_SHARE = 0.5
_QUOTA_PAGES = 256  # That go at once.


class Eviction:
    """Of the slab whose records `ledger` has."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def has_room(self, left: int, *, spared: int = 0) -> bool:
        """Whether the copies of any victim fit into `left` bytes of the open segment and into the
        free ones, without the last `spared` of these.

        What a segment has left is no room for a record that is longer.
        """
        geometry, segments = self._ledger.geometry, self._ledger.segments
        free = list(segments.free)[: len(segments.free) - spared]
        *ending, last = (left, *(segments.room(segment) for segment in free))
        lost = geometry.full_record_bytes - BLOCK_BYTES
        room = last + sum(max(0, each - lost) for each in ending)
        return room >= int(geometry.segment_bytes * MOVE_SHARE)

    def next_victim(self) -> Victim | None:
        """Chooses the segment to evict; None if every one is in use or holds pinned pages."""
        segments = self._ledger.segments
        for segment in segments.queue:
            if segments.live_bytes[segment] == 0 and segments.pins[segment] == 0:
                return Victim(segment)
        for _ in range((HITS_MAX + 1) * len(segments.queue)):
            segment = segments.queue[0]
            if segments.pins[segment] == 0:
                moves = self._worth_a_copy(segment)
                if moves is not None:
                    return Victim(segment, moves)
            segments.queue.rotate(-1)
        return None

    def _worth_a_copy(self, segment: int) -> list[Found] | None:
        """Records to copy; None if they are so many that the segment gets a second chance."""
        ledger = self._ledger
        hits = ledger.index.table.views["hits"]
        rows = list(ledger.index.rows_of_segment(segment))
        worth = [row for row in rows if hits[row] or ledger.spared(row)]
        size = sum(ledger.record_bytes(row) for row in worth)
        for row in worth:
            hits[row] -= hits[row] > 0
        if size > int(ledger.geometry.segment_size(segment) * MOVE_SHARE):
            return None
        return [ledger.hold(row, ledger.index.page(row)) for row in reversed(worth)]

    def oldest_of(self, cache: str) -> list[int]:
        """Rows of a cache that may go: the unread first, then by age; a few hundred at most."""
        index = self._ledger.index
        columns, versions_table = index.table.arrays, index.catalog.table.arrays
        rows = index.live_rows()
        versions = columns["version"][rows]
        owned = versions_table["cache"][versions] == index.catalog.known_cache_number(cache)
        rows = rows[owned & (versions_table["pinned"][versions] == 0)]
        segments = columns["segment"][rows]
        generations = np.array(self._ledger.segments.generations)
        ages = np.argsort(np.argsort(generations))[segments]
        order = (columns["hits"][rows] > 0).astype(np.int64) << 62 | ages << 32
        order |= columns["block"][rows]
        if len(rows) > _QUOTA_PAGES:
            chosen = np.argpartition(order, _QUOTA_PAGES)[:_QUOTA_PAGES]
            rows, order = rows[chosen], order[chosen]
        return [int(row) for row in rows[np.argsort(order)]]
