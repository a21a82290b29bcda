"""The engine of one slab: where the next page goes, and what is given up for it.

Layer: store, pure: no I/O, no clock, no thread. Its driver (`writer`, `reader`, `recovery`) holds a
lock around every call and does the I/O that the engine asks for: `reserve` answers with a place to
write to, or with what has to be done first. The engine is the one door to what a slab holds: a
`Ledger` knows where records are and who is charged, an `Eviction` what is given up first.

Space is taken when it is reserved, before anything is written, so that the slab cannot outgrow its
capacity. Eviction needs room for copies, so it starts as long as there is still room for half a
segment, what is lost at the ends of segments not counted; a slab that grows gets its next segment
as early. When a new version of an object arrives, what its older versions were read for no longer
counts.

Whatever is dropped stays dropped: `Dropped` asks the driver for a tombstone, a reservation that is
dropped while it is being written is refused at `commit`, and an emptied segment gets a new
generation before it is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from racerd.ids import ObjectId, PageId
from racerd.store.claims import Dropped, Evict, Found, Prepare, Refused, Reservation, Victim
from racerd.store.columns import NOTHING
from racerd.store.eviction import Eviction
from racerd.store.fates import EVICTED_FOR_QUOTA, EVICTED_FOR_SPACE, EVICTED_ON_REQUEST, Fates
from racerd.store.geometry import SEGMENT_HEADER_BYTES, SlabGeometry
from racerd.store.index import FORMAT_V1 as ROW_V1
from racerd.store.index import HITS_MAX, SUSPECT, UNPROVEN, PageIndex
from racerd.store.ledger import Ledger
from racerd.store.notes import Selector
from racerd.store.record import FORMAT_V1, RecordHeader
from racerd.store.segments import SegmentState

# Of one step of dropping many: a millisecond or two.
_STEP_VERSIONS = 2048
_STEP_PAGES = 128
_TRIM_SHARE = 1 / 64  # Of a quota: what is dropped at once when it is reached.


class Engine:
    """See the module. `fates` is told what was evicted, and why."""

    def __init__(self, geometry: SlabGeometry, *, fates: Fates | None = None) -> None:
        self.geometry = geometry
        self.next_sequence = 1
        self.next_generation = 1
        self.growing = True  # False while the medium has no space for segments never used.
        self.retrying = True  # False while a bad segment is not worth another try.
        self._ledger = Ledger(geometry)
        self.segments = self._ledger.segments
        self._eviction = Eviction(self._ledger)
        self._fates = fates
        self._pending: dict[tuple[bytes, int], Reservation] = {}
        self._writing: set[Reservation] = set()  # Pending ones, cancelled ones, moves.

    # What it holds

    @property
    def index(self) -> PageIndex:
        return self._ledger.index

    @property
    def live_bytes(self) -> int:
        return self._ledger.live_bytes

    @property
    def cache_bytes(self) -> list[int]:
        """By the catalog's cache number."""
        return self._ledger.cache_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._ledger.pinned_bytes

    @property
    def pinned_bytes_max(self) -> int:
        """Slab bytes up to which pins are honoured; beyond, pinned pages go like others."""
        return self._ledger.pinned_bytes_max

    @property
    def capacity_bytes(self) -> int:
        """Bytes that records may take."""
        return sum(
            self.geometry.segment_size(segment) - SEGMENT_HEADER_BYTES
            for segment, state in enumerate(self.segments.states)
            if state is not SegmentState.BAD
        )

    @property
    def quotas(self) -> Mapping[str, int]:
        """Slab bytes that a cache may take here."""
        return self._ledger.quotas

    @quotas.setter
    def quotas(self, quotas: Mapping[str, int]) -> None:
        self._ledger.quotas = dict(quotas)

    def mark_pinned(self, pins: Iterable[Selector]) -> None:
        """From now on exactly what `pins` select is pinned, here already or yet to come."""
        self._ledger.mark_pinned(pins)

    def held(self, selectors: Iterable[Selector]) -> tuple[int, int]:
        """Pages that any of `selectors` names, and the slab bytes that they take."""
        return self._ledger.held(selectors)

    # Reading

    def contains(self, page: PageId) -> bool:
        return self._ledger.index.find(page) != NOTHING

    def is_v1(self, page: PageId) -> bool:
        return self._ledger.flagged(page, ROW_V1)

    def start_read(self, page: PageId) -> Found | None:
        """Finds `page`, counts the hit and pins its segment."""
        row = self.index.find(page)
        if row == NOTHING:
            return None
        hits = self.index.table.views["hits"]
        if hits[row] < HITS_MAX:
            hits[row] += 1
        return self._ledger.hold(row, page)

    def start_check(self, page: PageId) -> Found | None:
        """As `start_read`, without counting a hit."""
        row = self.index.find(page)
        return None if row == NOTHING else self._ledger.hold(row, page)

    def unproven(self, page: PageId) -> bool:
        """Whether only a checkpoint of before the start says that `page` is here."""
        return self._ledger.flagged(page, UNPROVEN)

    def prove(self, found: Found) -> None:
        """The header of `found` was read, and is the right one."""
        row = self._ledger.row_of(found)
        if row != NOTHING:
            self.index.table.views["flags"][row] &= ~UNPROVEN

    def next_to_check(self, row: int) -> tuple[int, Found] | None:
        """The first record from `row` on, pinned, without counting a hit; None behind the last."""
        flags = self.index.table.arrays["flags"][row : self.index.table.used]
        here = flags > 0
        if not here.any():
            return None
        first = row + int(here.argmax())  # Fast, because after many were dropped it may be far.
        return first, self._ledger.hold(first, self.index.page(first))

    def end_read(self, found: Found) -> None:
        self.segments.unpin(found.segment)

    def suspect(self, found: Found) -> bool:
        """Notes that a read failed; returns whether one had failed before."""
        row = self._ledger.row_of(found)
        if row == NOTHING:
            return False
        flags = self.index.table.views["flags"]
        before = bool(flags[row] & SUSPECT)
        flags[row] |= SUSPECT
        return before

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
        if evict and not self._eviction.has_room(left):
            # Also while the slab grows: whatever stops that, its first victim's copies have room.
            if growable:
                return self._prepare(segments.fresh[0], allocate=True)
            if segments.queue:
                return Evict()
        return None

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
            return Dropped.of(done)
        if self.index.catalog.find(done.page.version) == NOTHING:
            self._cool(done.page.version.object_id)
        self._ledger.add(
            done.page, segment=done.segment, offset=done.offset, length=done.length,
            size=done.record_bytes,
        )  # fmt: skip
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
            return Dropped.of(failed)
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

    # Eviction

    def next_victim(self) -> Victim | None:
        """Chooses the segment to evict; None if every one is in use or holds pinned pages."""
        return self._eviction.next_victim()

    def start_move(self, found: Found) -> Reservation | None:
        """Charges room for a copy of `found`; None if there is none or it was dropped."""
        if self._ledger.row_of(found) == NOTHING or found.v1:
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
        row = self._ledger.row_of(done.moves)
        if row == NOTHING:
            return Dropped.of(done)
        self._ledger.move(row, segment=done.segment, offset=done.offset)
        self.segments.unpin(done.segment)
        return None

    def evicted(self, victim: Victim) -> tuple[Prepare, int]:
        """Drops what is left in the victim. Returns the header to write and the pages dropped."""
        for found in victim.moves:
            self.end_read(found)
        rows = list(self.index.rows_of_segment(victim.segment))
        self._tell(rows, EVICTED_FOR_SPACE)
        for row in rows:
            self._ledger.forget(row)
        self.segments.empty(victim.segment)
        return self._prepare(victim.segment, allocate=False), len(rows)

    @property
    def can_spare_segment(self) -> bool:
        """Whether there is a free segment that the copies of the next victim do not need."""
        segments = self.segments
        left = 0 if segments.open is None else segments.room(segments.open)
        return bool(segments.free) and self._eviction.has_room(left, spared=1)

    def give_up_free_segment(self) -> int | None:
        """A free segment whose space is to be given back; it counts as never used from now on."""
        if not self.segments.free:
            return None
        return self.segments.give_up()

    def _tell(self, rows: list[int], fate: str) -> None:
        if self._fates is not None and rows:
            self._fates.note_all(self.index.hashes_of(np.array(rows)), fate)

    # Dropping

    def drop(self, page: PageId) -> Dropped | None:
        """Forgets `page`, also one that is being written. Returns what needs a tombstone."""
        pending = self._pending.pop(page.key, None)
        if pending is not None:
            pending.cancelled = True
        row = self.index.find(page)
        return None if row == NOTHING else self._ledger.drop(row)

    def drop_found(self, found: Found) -> Dropped | None:
        """Forgets this very record, not one that replaced it."""
        row = self._ledger.row_of(found)
        return None if row == NOTHING else self._ledger.drop(row)

    def drop_some(self, selector: Selector, cursor: int) -> tuple[list[Dropped], int | None]:
        """Forgets part of what `selector` names: a bounded amount of work from `cursor` on.

        Returns where to go on; None when all is done. Start with `cancel`, then 0.
        """
        stop = min(cursor + _STEP_VERSIONS, self.index.catalog.table.used)
        versions = self._ledger.versions_of(selector, cursor, stop)
        rows = self.index.rows_of_versions(versions) if versions else []
        self._tell(rows[:_STEP_PAGES], EVICTED_ON_REQUEST)
        dropped = [self._ledger.drop(row) for row in rows[:_STEP_PAGES]]
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
        for row in self._eviction.oldest_of(cache):
            if excess <= 0:
                break
            excess -= self._ledger.record_bytes(row)
            self._tell([row], EVICTED_FOR_QUOTA)
            dropped.append(self._ledger.drop(row))
        return dropped

    def over_quota(self, cache: str, size: int) -> int:
        """By how many bytes `cache` would be over its quota with `size` more.

        What is being written counts.
        """
        if cache not in self._ledger.quotas:
            return 0
        writing = sum(
            each.record_bytes
            for each in self._writing
            if each.moves is None and each.page.version.object_id.cache == cache
        )
        return self._ledger.over_quota(cache, writing + size)

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
        ledger, flags = self._ledger, self.index.table.views["flags"]
        loser = None
        row = self.index.find(page)
        if row != NOTHING and ledger.offset(row) == place.offset:
            flags[row] &= ~UNPROVEN
            return None
        if row != NOTHING and (flags[row] & UNPROVEN or self._is_older(row, header)):
            loser = ledger.drop(row)
        elif row != NOTHING or page.key in self._pending:
            return self.reject_recovered(segment, header)
        ledger.add(
            page, segment=segment, offset=place.offset, length=header.seal.length,
            size=header.record_bytes, flags=ROW_V1 if header.version == FORMAT_V1 else 0,
            sequence=header.sequence,
        )  # fmt: skip
        return loser

    def _is_older(self, row: int, header: RecordHeader) -> bool:
        """Whether the record of `row` is older than one that was scanned; written since, it is
        younger than any."""
        known = self._ledger.sequence_of(row)
        return known is not None and known < header.sequence

    def reject_recovered(self, segment: int, header: RecordHeader) -> Dropped:
        """A record that was found but is not wanted; it gets a tombstone."""
        self.segments.pin(segment)
        place = header.place
        return Dropped(segment, place.offset, place.generation, header.record_bytes)

    def adopt(self, index: PageIndex) -> None:
        """Takes over the index of a checkpoint. The engine's own must be empty."""
        self._ledger.adopt(index)

    def recovered(self) -> None:
        """Recovery is complete: from now on the age of segments counts."""
        self._ledger.forget_sequences()
        self.segments.recovered()
