"""The store against a dictionary: random operations, faults and crashes.

After every step each page reads right or misses. Without faults a page that was kept is found as
long as nothing was evicted, also after a kill at any point and, if it was flushed, after a power
loss; and what was dropped for good stays away. Accounting equals the medium at all times.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from racerd.errors import ResourceError
from racerd.ids import ObjectVersion, PageId
from racerd.store import Store
from racerd.store.geometry import SEGMENT_HEADER_BYTES
from racerd.store.notes import Selector
from racerd.store.segments import SegmentState
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.sim.faulty_device import SECTOR, Crash, Faults, FaultyDevice, Medium
from tests.sim.store_driver import Clock, InlineKeeper
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, version
from tests.support.store_pages import settings as store_settings

CAPACITY = 5 * MIB // 4  # Less than all pages need: eviction is at work.
PATH = Path("/faulty/slab")
VERSIONS = [
    version(b"hot/a", size=5 * 64 * KIB),
    version(b"hot/a", size=5 * 64 * KIB, etag='"two"', token="7"),
    version(b"hot/b", size=3 * 64 * KIB - 777),
    version(b"cold/c", size=9 * 64 * KIB),
    version(b"hot/a", size=5 * 64 * KIB, cache="other"),
    version(b"tiny", size=100),
]
PAGES = [
    PageId(each, index) for each in VERSIONS for index in range(GEOMETRY.page_count(each.size))
]

pages = st.sampled_from(PAGES)
versions = st.sampled_from(VERSIONS)
FAULTS = {
    "read_errors": st.sampled_from([0.1, 0.5, 1.0]),
    "write_errors": st.sampled_from([0.1, 0.5, 1.0]),
    "short_reads": st.just(0.3),
    "lost_writes": st.just(0.3),
    "misdirected_writes": st.just(0.3),
    "rot": st.just(0.3),
    "latency_seconds": st.just(0.5),
    "no_space": st.just(True),
    "read_only": st.just(True),
    "vanished": st.just(True),
}
# Faults that the disk does not confess: what it was told to forget may be there afterwards.
SILENT = {"lost_writes", "misdirected_writes", "rot"}


class HealthyStore(RuleBasedStateMachine):
    """No fault but crashes.

    `kept` maps each page that must be found to the writes before it was kept; `gone` must miss.
    """

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        logging.disable()
        self.medium = Medium(CAPACITY, seed)
        self.clock = Clock()
        self.faults = Faults()
        self.kept: dict[PageId, int] = {}
        self.gone: set[PageId] = set()
        self.evictions = 0.0
        self.lied = False
        self.looked: Counter[str] = Counter()  # What the checks found: for campaigns.
        self.open()

    def open(self) -> None:
        self.metrics = Metrics()
        self.evictions = 0.0
        self.store = Store(
            store_settings(PATH, capacity=CAPACITY), GEOMETRY, self.metrics,
            open_device=lambda disk: FaultyDevice(
                self.medium, self.faults, path=disk.path, sleep=self.clock.sleep
            ),
            clock=self.clock, make_keeper=InlineKeeper,
        )  # fmt: skip
        self.store.__enter__()

    @property
    def disk(self):
        return self.store.disks[0]

    def forget_promises(self) -> None:
        """Faults were at work: pages may be lost, but never wrong."""
        self.kept.clear()
        self.gone.clear()

    def after(self) -> None:
        """Pages that made room for others need not be found."""
        evicted = counted(self.metrics, "racer_store_evicted_pages_total", reason="capacity")
        if evicted != self.evictions:
            self.evictions = evicted
            self.kept.clear()
        if self.faults.any:
            self.forget_promises()

    # Operations

    @rule(page=pages)
    def write(self, page: PageId) -> None:
        known = self.store.contains(page)
        if self.store.write(sealed(page)):
            self.gone.discard(page)
            if not known:
                self.kept[page] = self.medium.writes
        elif not self.faults.any and self.disk.watch.writable:
            reasons = counted(self.metrics, "racer_store_writes_total")
            assert reasons, "a write was refused without a reason"
        self.after()

    @rule(page=pages)
    def read(self, page: PageId) -> None:
        self.check(page)

    def check(self, page: PageId) -> None:
        """A read of `page` keeps every promise that was made."""
        found = read_back(self.store, page)
        self.looked["right" if found else "missed"] += 1
        self.looked["promised"] += page in self.kept
        self.after()
        if self.disk.watch.readable:
            assert found or page not in self.kept, f"{page.text} was kept and is not found"
        assert not (found and page in self.gone), f"{page.text} was dropped and came back"

    @rule(page=pages, data=st.data())
    def read_some_frames(self, page: PageId, data: st.DataObject) -> None:
        count = GEOMETRY.frame_count(GEOMETRY.page_length(page.version.size, page.index))
        first = data.draw(st.integers(0, count - 1))
        read_back(self.store, page, first=first, count=data.draw(st.integers(1, count - first)))
        self.after()

    @rule(page=pages)
    def drop(self, page: PageId) -> None:
        self.store.drop(page, "test")
        self.kept.pop(page, None)
        assert not self.store.contains(page)

    @rule(of=versions)
    def evict_object(self, of: ObjectVersion) -> None:
        self.store.evict_object(of.object_id)
        for page in PAGES:
            if page.version.object_id == of.object_id:
                self.dropped_for_good(page)
        self.after()

    @rule(prefix=st.sampled_from([b"", b"hot/", b"cold/c"]))
    def evict_prefix(self, prefix: bytes) -> None:
        self.store.evict_prefix("models", "bucket", prefix)
        for page in PAGES:
            name = page.version.object_id
            if name.cache == "models" and name.key.startswith(prefix):
                self.dropped_for_good(page)
        self.after()

    def dropped_for_good(self, page: PageId) -> None:
        assert not self.store.contains(page)
        self.kept.pop(page, None)
        if self.disk.opened and not self.lied:
            self.gone.add(page)

    @rule(prefix=st.sampled_from([b"", b"hot/", b"cold/c"]), pinned=st.booleans())
    def pin(self, prefix: bytes, pinned: bool) -> None:
        """Also of what is not there yet; a disk that cannot note it makes an error of it."""
        selector = Selector("models", "bucket", prefix, exact=False)
        with contextlib.suppress(ResourceError):
            self.store.pin(selector) if pinned else self.store.unpin(selector)
        self.after()

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint()
        self.after()

    @rule(seconds=st.sampled_from([0.0, 1.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.disk.upkeep.tick()
        self.after()

    @rule(rate=st.just(1))
    def scrub_a_record(self, rate: int) -> None:
        self.disk.scrub_next()
        self.after()

    # Ways of stopping

    def reopen(self) -> None:
        """Starts anew on what is left, and looks at every page.

        Once the medium has lied, what tells where records are may be damaged too.
        """
        if self.lied:
            self.kept.clear()
        self.open()
        self.after()
        for page in PAGES:
            self.check(page)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.after()
        self.reopen()

    @rule()
    def kill(self) -> None:
        self.medium.injected["kills"] += 1
        self.reopen()

    @rule()
    def lose_power(self) -> None:
        durable = self.medium.flushed_writes
        self.medium.lose_power()
        self.kept = {page: at for page, at in self.kept.items() if at <= durable}
        self.reopen()

    @precondition(lambda self: not self.faults.any)
    @rule(
        page=pages,
        sectors=st.integers(0, 700),
        power=st.booleans(),
        of=versions,
        what=st.sampled_from(["write", "evict", "checkpoint", "close"]),
    )
    def crash_during(
        self, page: PageId, sectors: int, power: bool, of: ObjectVersion, what: str
    ) -> None:  # fmt: skip
        """F37: the process is killed, or the power fails, in the middle of something."""
        durable = self.medium.flushed_writes
        self.faults.crash_after_sectors = sectors
        try:
            if what == "write" and self.store.write(sealed(page)):
                self.gone.discard(page)
            elif what == "evict":
                self.kept = {p: at for p, at in self.kept.items()
                             if p.version.object_id != of.object_id}  # fmt: skip
                self.store.evict_object(of.object_id)
            elif what == "checkpoint":
                self.store.checkpoint()
            elif what == "close":
                self.store.close()
        except Crash:
            self.gone.discard(page)
        self.faults.crash_after_sectors = None
        if counted(self.metrics, "racer_store_evicted_pages_total", reason="capacity"):
            self.kept.clear()
        if power:
            self.medium.lose_power()
            self.kept = {p: at for p, at in self.kept.items() if at <= durable}
        self.reopen()

    # What always holds

    @invariant()
    def every_page_reads_right_or_misses(self) -> None:
        if hasattr(self, "store"):
            for page in PAGES[::5]:
                self.check(page)

    @invariant()
    def accounting_equals_the_index(self) -> None:
        live = getattr(getattr(self, "store", None), "disks", [None])[0]
        if live is None or not live.opened:
            return
        live = live._live
        engine, geometry = live.engine, live.slab.geometry
        rows = engine.index.live_rows().tolist()
        ledger = engine._ledger
        taken = sorted((ledger.offset(row), ledger.record_bytes(row)) for row in rows)
        assert engine.live_bytes == sum(size for _, size in taken)
        assert engine.live_bytes == sum(engine.segments.live_bytes)
        assert engine.live_bytes == sum(engine.cache_bytes)
        pinned = [
            ledger.record_bytes(row)
            for row in rows
            if any(pin.matches(engine.index.page(row).version.object_id) for pin in ledger._pins)
        ]
        assert engine.pinned_bytes == sum(pinned)
        if not self.faults.any and self.disk.watch.writable:
            assert ledger._pins == self.store.pins
        assert len(rows) == len(engine.index)
        for (offset, size), (following, _) in pairwise(taken):
            assert offset + size <= following, "two records overlap"
        for segment in range(geometry.segment_count):
            used = engine.segments.used[segment]
            assert used <= geometry.segment_size(segment)
            if engine.segments.states[segment] in (SegmentState.FREE, SegmentState.FRESH):
                assert engine.segments.live_bytes[segment] == 0
            if engine.segments.states[segment] is SegmentState.OPEN:
                assert used >= SEGMENT_HEADER_BYTES
        waiting = [dropped.segment for dropped in live.tombstones._waiting]
        for segment, pins in enumerate(engine.segments.pins):
            assert pins == waiting.count(segment), "a pin was left behind"

    def teardown(self) -> None:
        logging.disable(logging.NOTSET)
        if hasattr(self, "store"):
            self.faults.__dict__.update(Faults().__dict__)
            self.store.close()


class FaultyStore(HealthyStore):
    """With faults of every kind, which break promises but never bytes."""

    @rule(data=st.data(), kind=st.sampled_from(sorted(FAULTS)))
    def break_something(self, data: st.DataObject, kind: str) -> None:
        setattr(self.faults, kind, data.draw(FAULTS[kind]))
        self.lied |= kind in SILENT or kind in ("write_errors", "no_space", "read_only", "vanished")
        self.forget_promises()

    @rule()
    def mend_everything(self) -> None:
        healthy = Faults()
        self.faults.__dict__.update(healthy.__dict__)
        self.forget_promises()

    @rule(offset=st.integers(0, CAPACITY - 1))
    def rot_a_bit(self, offset: int) -> None:
        self.medium.rot(offset)
        self.lied = True
        self.forget_promises()

    @rule(first=st.integers(0, CAPACITY // SECTOR - 1), count=st.integers(1, 400))
    def punch_a_hole(self, first: int, count: int) -> None:
        """F38, F39: zeros where a record was."""
        offset = first * SECTOR
        self.medium.punch(offset, min(count * SECTOR, CAPACITY - offset))
        self.lied = True
        self.forget_promises()


for machine in (HealthyStore, FaultyStore):
    machine.TestCase.settings = settings(
        max_examples=50,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class TestHealthyStore(HealthyStore.TestCase):
    """R22, R23, R24, F2, F7, F29, F37, F43: promises hold through kills and power losses."""


class TestFaultyStore(FaultyStore.TestCase):
    """R22, R23, F5, F11, F18, F19, F38, F39: whatever the medium does, no byte is wrong."""
