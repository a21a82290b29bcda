"""The engine of one slab: where pages are, where the next goes, what is given up for it.

Layer: store, pure: no I/O, no clock, no thread. Its driver (`disk`) holds a lock around every call
and does the I/O that the engine asks for: `reserve` answers with a place to write to, or with what
has to be done first. Space is charged when it is reserved, before anything is written, so that the
slab cannot outgrow its capacity.

Eviction takes whole segments, oldest first. A segment of which more than half was read since it
was last looked at gets a second chance; of any other the records that were read are copied to the
open segment, the rest is dropped. When a new version of an object arrives, what its older versions
were read for no longer counts. Copies need room, so eviction starts as long as there is still
room for half a segment.

Whatever is dropped stays dropped: `Dropped` asks the driver for a tombstone, a reservation that is
dropped while it is being written is refused at `commit`, and an emptied segment gets a new
generation before it is used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from racerd.ids import ObjectId, PageId
from racerd.store.columns import NOTHING
from racerd.store.fates import EVICTED_FOR_QUOTA, EVICTED_FOR_SPACE, EVICTED_ON_REQUEST, Fates
from racerd.store.geometry import BLOCK_BYTES, SEGMENT_HEADER_BYTES, SlabGeometry
from racerd.store.index import FORMAT_V1 as ROW_V1
from racerd.store.index import HITS_MAX, SUSPECT, UNPROVEN, PageIndex
from racerd.store.notes import Selector
from racerd.store.record import FORMAT_V1, RecordHeader
from racerd.store.record_v1 import v1_record_bytes
from racerd.store.segments import Segments, SegmentState

MOVE_SHARE = 0.5
# Pins beyond this share of the slab are not honoured, so that eviction always finds a victim.
PINNED_SHARE_MAX = 0.5
# Of one step of dropping many: a millisecond or two.
_STEP_VERSIONS = 2048
_STEP_PAGES = 128
_TRIM_SHARE = 1 / 64  # Of a quota: what is dropped at once when it is reached,
_TRIM_PAGES = 256  # but no more pages than these.


@dataclass(frozen=True, slots=True)
class Found:
    """A record, pinned for reading until `end_read`. `offset` is in the slab.

    `proven`: its header was seen, or written, since the slab was opened.
    """

    page: PageId
    segment: int
    offset: int
    generation: int
    length: int
    record_bytes: int
    v1: bool
    proven: bool


@dataclass(slots=True, eq=False)
class Reservation:
    """Space for one record, charged and pinned until `commit` or `abort`."""

    page: PageId
    segment: int
    offset: int
    generation: int
    sequence: int
    length: int
    record_bytes: int
    moves: Found | None = None
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """Write a header of `generation` to `segment`, then call `prepared` or `not_prepared`.

    `allocate`: the segment was never used; the medium must be asked for its space first.
    """

    segment: int
    generation: int
    allocate: bool


class Evict:
    """Call `next_victim`, copy what it says, call `evicted`, then ask again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no place, and nothing that could be done for one. `reason` goes into metrics."""

    reason: str


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to be evicted and the records in it that are worth a copy, pinned each."""

    segment: int
    moves: list[Found] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record that left the index. Its segment is pinned until `tombstone_done`."""

    segment: int
    offset: int
    generation: int
    record_bytes: int


class Engine:
    """See the module. `pinned` tells whether pages of an object are to be spared by eviction;
    `fates` is told what was evicted, and why."""

    def __init__(
        self, geometry: SlabGeometry, *, pinned: Callable[[ObjectId], bool] = lambda _: False,
        fates: Fates | None = None,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.index = PageIndex(geometry.segment_count)
        self.segments = Segments(geometry)
        self.live_bytes = 0
        self.cache_bytes: list[int] = []  # By the catalog's cache number.
        self.next_sequence = 1
        self.next_generation = 1
        self.growing = True  # False while the medium has no space for segments never used.
        self.retrying = True  # False while a bad segment is not worth another try.
        self.quotas: dict[str, int] = {}  # Slab bytes that a cache may take here.
        self.pinned_bytes = 0
        self._pinned_bytes_max = int(geometry.segments_stop * PINNED_SHARE_MAX)
        self._move_bytes_largest = int(geometry.segment_bytes * MOVE_SHARE)
        self._is_pinned = pinned
        self._fates = fates
        self._scanned = array("Q")  # During recovery, by row: the sequences of scanned records.
        self._pending: dict[tuple[bytes, int], Reservation] = {}
        self._writing: set[Reservation] = set()  # Pending ones, cancelled ones, moves.

    # Reading

    def contains(self, page: PageId) -> bool:
        return self.index.find(page) != NOTHING

    def is_v1(self, page: PageId) -> bool:
        row = self.index.find(page)
        return row != NOTHING and bool(self.index.table.views["flags"][row] & ROW_V1)

    def start_read(self, page: PageId) -> Found | None:
        """Finds `page`, counts the hit and pins its segment."""
        row = self.index.find(page)
        if row == NOTHING:
            return None
        hits = self.index.table.views["hits"]
        if hits[row] < HITS_MAX:
            hits[row] += 1
        return self._found(row, page)

    def start_check(self, page: PageId) -> Found | None:
        """As `start_read`, without counting a hit."""
        row = self.index.find(page)
        return None if row == NOTHING else self._found(row, page)

    def unproven(self, page: PageId) -> bool:
        """Whether only a checkpoint of before the start says that `page` is here."""
        row = self.index.find(page)
        return row != NOTHING and bool(self.index.table.views["flags"][row] & UNPROVEN)

    def prove(self, found: Found) -> None:
        """The header of `found` was read, and is the right one."""
        row = self._row_of(found)
        if row != NOTHING:
            self.index.table.views["flags"][row] &= ~UNPROVEN

    def next_to_check(self, row: int) -> tuple[int, Found] | None:
        """The first record from `row` on, pinned, without counting a hit; None behind the last."""
        flags = self.index.table.views["flags"]
        for candidate in range(row, self.index.table.used):
            if flags[candidate]:
                return candidate, self._found(candidate, self.index.page(candidate))
        return None

    def end_read(self, found: Found) -> None:
        self.segments.unpin(found.segment)

    def suspect(self, found: Found) -> bool:
        """Notes that a read failed; returns whether one had failed before."""
        row = self._row_of(found)
        if row == NOTHING:
            return False
        flags = self.index.table.views["flags"]
        before = bool(flags[row] & SUSPECT)
        flags[row] |= SUSPECT
        return before

    def _found(self, row: int, page: PageId) -> Found:
        views = self.index.table.views
        segment = views["segment"][row]
        self.segments.pin(segment)
        return Found(
            page,
            segment,
            self._offset(row),
            self.segments.generations[segment],
            views["length"][row],
            self._record_bytes(row),
            bool(views["flags"][row] & ROW_V1),
            not views["flags"][row] & UNPROVEN,
        )

    def _offset(self, row: int) -> int:
        views = self.index.table.views
        start = self.geometry.segment_offset(views["segment"][row])
        return int(start + views["block"][row] * BLOCK_BYTES)

    def _record_bytes(self, row: int) -> int:
        views = self.index.table.views
        length = views["length"][row]
        if views["flags"][row] & ROW_V1:
            identity = self.index.catalog.table.views["identity"][views["version"][row]]
            return v1_record_bytes(identity, length)
        return self.geometry.record_bytes(length)

    def _row_of(self, found: Found) -> int:
        """The row of `found` if the index still means this very record, else NOTHING."""
        row = self.index.find(found.page)
        if row == NOTHING or self._offset(row) != found.offset:
            return NOTHING
        if self.segments.generations[found.segment] != found.generation:
            return NOTHING
        return row

    # Writing

    def reserve(
        self, page: PageId, length: int, *, evict: bool = True
    ) -> Reservation | Prepare | Evict | Refused:
        """Charges space for a record of `page`, or says what must happen first.

        `evict=False` takes what room is left: for when no victim was found.
        """
        if page.key in self._pending:
            return Refused("in_flight")
        if self.contains(page):
            return Refused("present")
        size = self.geometry.record_bytes(length)
        if self.over_quota(page.version.object_id.cache, size) > 0:
            return Refused("quota")
        todo = self._make_room(size, evict=evict)
        if todo is not None:
            return todo
        reservation = self._append(page, length, size)
        self._pending[page.key] = reservation
        return reservation

    def _make_room(self, size: int, *, evict: bool) -> Prepare | Evict | Refused | None:
        segments = self.segments
        if segments.open is not None and segments.room(segments.open) < size:
            segments.seal_open()
        if segments.open is None and segments.free:
            segments.open_next()
        growable = bool(segments.fresh) and self.growing
        if segments.open is None:
            if growable:
                return self._prepare(segments.fresh[0], allocate=True)
            if segments.bad and self.retrying:
                return self._prepare(segments.bad[0], allocate=True)
            return Evict() if evict and segments.queue else Refused("no_space")
        left = segments.room(segments.open) - size
        if left < 0:
            return Refused("too_large")
        spare = left + sum(segments.room(segment) for segment in segments.free)
        if evict and not growable and segments.queue and spare < self._move_bytes_largest:
            return Evict()
        return None

    def _move_bytes_max(self, segment: int) -> int:
        return int(self.geometry.segment_size(segment) * MOVE_SHARE)

    def _prepare(self, segment: int, *, allocate: bool) -> Prepare:
        generation = self.next_generation
        self.next_generation += 1
        return Prepare(segment, generation, allocate)

    def _append(self, page: PageId, length: int, size: int) -> Reservation:
        segment = self.segments.open
        assert segment is not None
        offset = self.segments.append(segment, size)
        self.segments.pin(segment)
        sequence = self.next_sequence
        self.next_sequence += 1
        generation = self.segments.generations[segment]
        made = Reservation(page, segment, offset, generation, sequence, length, size)
        self._writing.add(made)
        return made

    def unwritten(self) -> dict[int, int]:
        """For segments that are being written to: where the first such record starts in them."""
        starts: dict[int, int] = {}
        for reservation in self._writing:
            segment = reservation.segment
            start = reservation.offset - self.geometry.segment_offset(segment)
            starts[segment] = min(start, starts.get(segment, start))
        return starts

    def prepared(self, done: Prepare) -> None:
        self.segments.prepared(done.segment, done.generation)

    def not_prepared(self, failed: Prepare, *, no_space: bool) -> None:
        """The header of a segment could not be written, or its space not be allocated."""
        if no_space:
            self.growing = self.retrying = False
            return
        self.retrying = False
        self.segments.spoil(failed.segment)

    def commit(self, done: Reservation) -> Dropped | None:
        """The record is written: it can be found from now on.

        Returns what needs a tombstone: the record itself if the page was dropped meanwhile.
        """
        self._settle_pending(done)
        if done.cancelled:
            return self._dropped(done)
        if self.index.catalog.find(done.page.version) == NOTHING:
            self._cool(done.page.version.object_id)
        self._add(done.page, done.segment, done.offset, done.length, done.record_bytes, flags=0)
        self.segments.unpin(done.segment)
        return None

    def _cool(self, object_id: ObjectId) -> None:
        """A new version of an object arrives: its older ones will hardly be read any more."""
        versions = self.index.catalog.rows_of_object(object_id)
        hits = self.index.table.views["hits"]
        for row in self.index.rows_of_versions(versions) if versions else ():
            hits[row] = 0

    def abort(self, failed: Reservation, *, written: bool) -> Dropped | None:
        """The record was not written. `written`: part of it may have been; a tombstone follows."""
        self._settle_pending(failed)
        if written:
            return self._dropped(failed)
        segment = failed.segment
        start = self.geometry.segment_offset(segment)
        if start + self.segments.used[segment] == failed.offset + failed.record_bytes:
            self.segments.used[segment] -= failed.record_bytes  # Nothing came behind it.
        self.segments.unpin(segment)
        return None

    def _settle_pending(self, reservation: Reservation) -> None:
        self._writing.discard(reservation)
        if self._pending.get(reservation.page.key) is reservation:
            del self._pending[reservation.page.key]

    def _dropped(self, record: Reservation | Found) -> Dropped:
        return Dropped(record.segment, record.offset, record.generation, record.record_bytes)

    def _add(
        self, page: PageId, segment: int, offset: int, length: int, size: int, *, flags: int
    ) -> int:
        block = (offset - self.geometry.segment_offset(segment)) // BLOCK_BYTES
        row = self.index.add(
            page, segment=segment, block=block, length=length, flags=flags,
            pinned=self._is_pinned(page.version.object_id),
        )  # fmt: skip
        if row < len(self._scanned):
            self._scanned[row] = 0
        self._charge(row, segment, size)
        return row

    def _charge(self, row: int, segment: int, size: int) -> None:
        """Accounts a record of `size` bytes, which is negative when it leaves."""
        self.live_bytes += size
        self.segments.live_bytes[segment] += size
        if self._flagged_pinned(row):
            self.pinned_bytes += size
        cache = self._cache_of(row)
        if cache >= len(self.cache_bytes):
            self.cache_bytes.extend([0] * (cache + 1 - len(self.cache_bytes)))
        self.cache_bytes[cache] += size

    def _cache_of(self, row: int) -> int:
        version = self.index.table.views["version"][row]
        return int(self.index.catalog.table.views["cache"][version])

    # Eviction

    def next_victim(self) -> Victim | None:
        """Chooses the segment to evict; None if every one is in use or holds pinned pages."""
        segments = self.segments
        for segment in segments.queue:
            if segments.live_bytes[segment] == 0 and segments.pins[segment] == 0:
                return Victim(segment)
        for _ in range((HITS_MAX + 1) * len(segments.queue)):
            segment = segments.queue[0]
            if segments.pins[segment] == 0:
                moves = self._worth_moving(segment)
                if moves is not None:
                    return Victim(segment, moves)
            segments.queue.rotate(-1)
        return None

    def _worth_moving(self, segment: int) -> list[Found] | None:
        """Records to copy; None if they are so many that the segment gets a second chance."""
        hits = self.index.table.views["hits"]
        rows = list(self.index.rows_of_segment(segment))
        worth = [row for row in rows if hits[row] or self._pinned_row(row)]
        size = sum(self._record_bytes(row) for row in worth)
        for row in worth:
            hits[row] -= hits[row] > 0
        if size > self._move_bytes_max(segment):
            return None
        return [self._found(row, self.index.page(row)) for row in reversed(worth)]

    def _flagged_pinned(self, row: int) -> bool:
        version = self.index.table.views["version"][row]
        return bool(self.index.catalog.table.views["pinned"][version])

    def _pinned_row(self, row: int) -> bool:
        return self._flagged_pinned(row) and self.pinned_bytes <= self._pinned_bytes_max

    def start_move(self, found: Found) -> Reservation | None:
        """Charges room for a copy of `found`; None if there is none or it was dropped."""
        if self._row_of(found) == NOTHING or found.v1:
            return None
        segments = self.segments
        if segments.open is not None and segments.room(segments.open) < found.record_bytes:
            if not segments.free:
                return None
            segments.seal_open()
        if segments.open is None:
            if not segments.free:
                return None
            segments.open_next()
        copy = self._append(found.page, found.length, found.record_bytes)
        copy.moves = found
        return copy

    def commit_move(self, done: Reservation) -> Dropped | None:
        """The copy is written: it is the record from now on, unless the page was dropped."""
        assert done.moves is not None
        self._settle_pending(done)
        row = self._row_of(done.moves)
        if row == NOTHING:
            return self._dropped(done)
        block = (done.offset - self.geometry.segment_offset(done.segment)) // BLOCK_BYTES
        self._charge(row, done.moves.segment, -done.record_bytes)
        self.index.move(row, segment=done.segment, block=block)
        self._charge(row, done.segment, done.record_bytes)
        self.segments.unpin(done.segment)
        return None

    def evicted(self, victim: Victim) -> tuple[Prepare, int]:
        """Drops what is left in the victim. Returns the header to write and the pages dropped."""
        for found in victim.moves:
            self.end_read(found)
        rows = list(self.index.rows_of_segment(victim.segment))
        self._tell(rows, EVICTED_FOR_SPACE)
        for row in rows:
            self._forget(row)
        self.segments.empty(victim.segment)
        return self._prepare(victim.segment, allocate=False), len(rows)

    def give_up_free_segment(self) -> int | None:
        """A free segment whose space is to be given back; it counts as never used from now on."""
        if not self.segments.free:
            return None
        return self.segments.give_up()

    def _tell(self, rows: list[int], fate: str) -> None:
        if self._fates is not None and rows:
            self._fates.note_all(self.index.hashes_of(np.array(rows)), fate)

    def _forget(self, row: int) -> None:
        segment = self.index.table.views["segment"][row]
        self._charge(row, segment, -self._record_bytes(row))
        self.index.remove(row)

    # Dropping

    def drop(self, page: PageId) -> Dropped | None:
        """Forgets `page`, also one that is being written. Returns what needs a tombstone."""
        pending = self._pending.pop(page.key, None)
        if pending is not None:
            pending.cancelled = True
        row = self.index.find(page)
        return None if row == NOTHING else self._drop_row(row)

    def drop_found(self, found: Found) -> Dropped | None:
        """Forgets this very record, not one that replaced it."""
        row = self._row_of(found)
        return None if row == NOTHING else self._drop_row(row)

    def drop_some(self, selector: Selector, cursor: int) -> tuple[list[Dropped], int | None]:
        """Forgets part of what `selector` names: a bounded amount of work from `cursor` on.

        Returns where to go on; None when all is done. Start with `cancel`, then 0.
        """
        stop = min(cursor + _STEP_VERSIONS, self.index.catalog.table.used)
        versions = self.versions_of(selector, cursor, stop)
        rows = self.index.rows_of_versions(versions) if versions else []
        self._tell(rows[:_STEP_PAGES], EVICTED_ON_REQUEST)
        dropped = [self._drop_row(row) for row in rows[:_STEP_PAGES]]
        if len(rows) > _STEP_PAGES:
            return dropped, cursor
        return dropped, stop if stop < self.index.catalog.table.used else None

    def cancel(self, selector: Selector) -> None:
        """Makes sure that what is being written of `selector` is not kept."""
        for reservation in list(self._pending.values()):
            if selector.matches(reservation.page.version.object_id):
                reservation.cancelled = True
                del self._pending[reservation.page.key]

    def drop_selected(self, selector: Selector) -> list[Dropped]:
        """Forgets all that `selector` names, at once."""
        self.cancel(selector)
        everything: list[Dropped] = []
        cursor: int | None = 0
        while cursor is not None:
            dropped, cursor = self.drop_some(selector, cursor)
            everything += dropped
        return everything

    def trim(self, page: PageId, length: int) -> list[Dropped]:
        """Drops old pages of a cache whose quota would not hold another page of `length`.

        What was not read goes first, then by age; pinned pages stay. `reserve` refuses the page
        if that is not enough.
        """
        cache = page.version.object_id.cache
        excess = self.over_quota(cache, self.geometry.record_bytes(length))
        if excess <= 0 or self.contains(page):
            return []
        excess = max(excess, int(self.quotas[cache] * _TRIM_SHARE))
        dropped = []
        for row in self._oldest_of(cache):
            if excess <= 0:
                break
            excess -= self._record_bytes(row)
            self._tell([row], EVICTED_FOR_QUOTA)
            dropped.append(self._drop_row(row))
        return dropped

    def _oldest_of(self, cache: str) -> list[int]:
        """Rows of a cache that may go: the unread first, then by age; a few hundred at most."""
        columns, catalog = self.index.table.arrays, self.index.catalog
        rows = self.index.live_rows()
        versions = columns["version"][rows]
        owned = catalog.table.arrays["cache"][versions] == catalog.known_cache_number(cache)
        rows = rows[owned & (catalog.table.arrays["pinned"][versions] == 0)]
        segments = columns["segment"][rows]
        ages = np.argsort(np.argsort(np.array(self.segments.generations)))[segments]
        order = (columns["hits"][rows] > 0).astype(np.int64) << 62 | ages << 32
        order |= columns["block"][rows]
        if len(rows) > _TRIM_PAGES:
            chosen = np.argpartition(order, _TRIM_PAGES)[:_TRIM_PAGES]
            rows, order = rows[chosen], order[chosen]
        return [int(row) for row in rows[np.argsort(order)]]

    def over_quota(self, cache: str, size: int) -> int:
        """By how many bytes `cache` would be over its quota with `size` more."""
        limit = self.quotas.get(cache)
        if limit is None:
            return 0
        number = self.index.catalog.known_cache_number(cache)
        taken = self.cache_bytes[number] if number < len(self.cache_bytes) else 0
        writing = sum(
            each.record_bytes
            for each in self._writing
            if each.moves is None and each.page.version.object_id.cache == cache
        )
        return taken + writing + size - limit

    def _drop_row(self, row: int) -> Dropped:
        views = self.index.table.views
        segment = views["segment"][row]
        self.segments.pin(segment)
        dropped = Dropped(
            segment, self._offset(row), self.segments.generations[segment], self._record_bytes(row)
        )
        self._forget(row)
        return dropped

    def tombstone_done(self, dropped: Dropped) -> None:
        self.segments.unpin(dropped.segment)

    # Recovery

    def settle(self, segment: int, state: SegmentState, generation: int, used: int) -> None:
        """What recovery found out about a segment; its records are added before or after."""
        self.segments.settle(segment, state, generation, used)
        self.next_generation = max(self.next_generation, generation + 1)

    def drop_fenced(self, fences: Iterable[Selector]) -> list[Dropped]:
        """Drops pages of a checkpoint that had been dropped before it could be known."""
        return [dropped for fence in fences for dropped in self.drop_selected(fence)]

    def add_recovered(self, segment: int, header: RecordHeader, page: PageId) -> Dropped | None:
        """Adds a record found on the medium. Returns the loser if the page is here twice.

        Of two records that were both seen the later one wins: a page is written anew only after its
        record was dropped or found to be bad, and a crash may have come before the tombstone. One
        that only the checkpoint tells of loses: it may have its tombstone by now.
        """
        self.next_sequence = max(self.next_sequence, header.sequence + 1)
        place = header.place
        loser = None
        row = self.index.find(page)
        flags = self.index.table.views["flags"]
        if row != NOTHING and self._offset(row) == place.offset:
            flags[row] &= ~UNPROVEN
            return None
        if (row != NOTHING and flags[row] & UNPROVEN) or (
            row != NOTHING and header.sequence > self._sequence_of(row)
        ):
            loser = self._drop_row(row)
        elif row != NOTHING or page.key in self._pending:
            return self.reject_recovered(segment, header)
        kind = ROW_V1 if header.version == FORMAT_V1 else 0
        size = header.record_bytes
        row = self._add(page, segment, place.offset, header.seal.length, size, flags=kind)
        self._scanned.extend(0 for _ in range(len(self._scanned), row + 1))
        self._scanned[row] = header.sequence
        return loser

    def _sequence_of(self, row: int) -> int:
        """The sequence of a row that was scanned; of one written since, more than any."""
        known = self._scanned[row] if row < len(self._scanned) else 0
        return known or self.next_sequence

    def reject_recovered(self, segment: int, header: RecordHeader) -> Dropped:
        """A record that was found but is not wanted; it gets a tombstone."""
        self.segments.pin(segment)
        place = header.place
        return Dropped(segment, place.offset, place.generation, header.record_bytes)

    def adopt(self, index: PageIndex) -> None:
        """Takes over the index of a checkpoint. The engine's own must be empty."""
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

    def mark_pinned(self, pins: Iterable[Selector]) -> None:
        """From now on exactly what `pins` select is pinned."""
        catalog = self.index.catalog
        catalog.table.arrays["pinned"][:] = 0
        for pin in pins:
            for row in self.versions_of(pin):
                catalog.table.views["pinned"][row] = 1
        columns = self.index.table.arrays
        rows = self.index.live_rows()
        rows = rows[catalog.table.arrays["pinned"][columns["version"][rows]] > 0]
        self.pinned_bytes = int(self._sizes(rows).sum())

    def held(self, selectors: Iterable[Selector]) -> tuple[int, int]:
        """Pages that any of `selectors` names, and the slab bytes that they take."""
        versions = {row for selector in selectors for row in self.versions_of(selector)}
        if not versions:
            return 0, 0
        rows = self.index.live_rows()
        rows = rows[np.isin(self.index.table.arrays["version"][rows], list(versions))]
        return len(rows), int(self._sizes(rows).sum())

    @property
    def pinned_bytes_max(self) -> int:
        """Slab bytes up to which pins are honoured; beyond, pinned pages go like others."""
        return self._pinned_bytes_max

    def _sizes(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """What each record takes on the slab."""
        columns = self.index.table.arrays
        blocks = -(-columns["length"][rows].astype(np.int64) // BLOCK_BYTES)
        sizes: npt.NDArray[np.int64] = self.geometry.header_bytes + blocks * BLOCK_BYTES
        for at in np.flatnonzero(columns["flags"][rows] & ROW_V1).tolist():
            sizes[at] = self._record_bytes(int(rows[at]))
        return sizes

    def versions_of(self, selector: Selector, start: int = 0, stop: int | None = None) -> list[int]:
        """Rows of the catalog, of those from `start` to `stop`, that `selector` names."""
        catalog = self.index.catalog
        rows = slice(start, catalog.table.used if stop is None else stop)
        if selector.exact:
            object_id = ObjectId(selector.cache, selector.bucket, selector.key)
            return catalog.rows_of_object(object_id, rows)
        return catalog.rows_of_prefix(selector.cache, selector.bucket, selector.key, rows)

    def recovered(self) -> None:
        """Recovery is complete: from now on the age of segments counts."""
        self._scanned = array("Q")
        self.segments.recovered()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that records may take."""
        return sum(
            self.geometry.segment_size(segment) - SEGMENT_HEADER_BYTES
            for segment, state in enumerate(self.segments.states)
            if state is not SegmentState.BAD
        )
