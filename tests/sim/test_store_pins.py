"""Pins are kept: whatever else comes, and however full the slab or the file system is."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from racerd.ids import PageId
from racerd.store import Store
from racerd.store.device import Space
from racerd.store.engine import Engine
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.notes import Selector
from racerd.units import KIB, MIB
from tests.sim.test_store_faults import RECORD, Rig, fill
from tests.support.store_pages import GEOMETRY, read_back, sealed, version

SIZES = (1, 5_000, 16 * KIB, 40 * KIB, 64 * KIB, 64 * KIB, 64 * KIB)
PINNED = Selector("models", "bucket", b"pinned/", exact=False)


class Traffic:
    """Pages of all sizes are written, a tenth of them pinned; some that are there are read."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self.store = store
        self.chance = chance
        self.engine = store.disks[0]._live.engine
        self.pinned: list[PageId] = []
        self.written = 0

    def step(self) -> None:
        dice = self.chance.random()
        room = self.engine.pinned_bytes_max * 0.9 - self.engine.pinned_bytes
        if dice < 0.15 and room >= RECORD:
            page = self._write(b"pinned/")
            self.pinned += [page] if page is not None else []
        elif dice < 0.9:
            self._write(b"others/")
        else:
            rows = self.engine.index.live_rows()
            for row in self.chance.sample(list(rows), min(5, len(rows))):
                assert read_back(self.store, self.engine.index.page(int(row)))

    def _write(self, prefix: bytes) -> PageId | None:
        self.written += 1
        size = self.chance.choice(SIZES)
        page = PageId(version(prefix + b"%d" % self.written, size=size), 0)
        return page if self.store.write(sealed(page)) else None

    def lost(self) -> list[PageId]:
        return [page for page in self.pinned if not self.store.contains(page)]


@pytest.mark.parametrize("seed", range(24))
def test_a_full_slab_keeps_what_is_pinned(seed: int) -> None:
    """R24: there is always room for copies, also at the ends of segments and in a short one."""
    chance = random.Random(seed)
    rig = Rig(size=chance.choice([2, 3, 4, 6]) * MIB)
    store = rig.start()
    store.pin(PINNED)
    traffic = Traffic(store, chance)
    for _ in range(200):
        traffic.step()
        if chance.random() < 0.1:
            rig.wait(store, 1.0)
        assert traffic.lost() == []
    assert len(traffic.pinned) > 3
    store.close()


@given(
    left=st.integers(0, 480 * KIB // BLOCK_BYTES),
    free=st.lists(st.integers(0, 480 * KIB // BLOCK_BYTES), max_size=3),
    copies=st.lists(st.integers(1, RECORD // BLOCK_BYTES), max_size=60),
)
@example(left=16, free=[59], copies=[17, 17, 17, 9])  # Sixty blocks, and 16 that are too few.
def test_room_for_copies_is_room_for_any(left: int, free: list[int], copies: list[int]) -> None:
    """R24: up to half a segment of records, whatever is lost where segments end."""
    engine = Engine(SlabGeometry.plan(GEOMETRY, 4 * MIB))
    segments, limit = engine.segments, engine.geometry.segment_bytes // 2
    rooms = [left, *free]
    for segment, room in enumerate(rooms):
        segments.used[segment] = engine.geometry.segment_size(segment) - room * BLOCK_BYTES
    segments.open, segments.free = 0, deque(range(1, len(rooms)))
    assume(engine._eviction.has_room(left * BLOCK_BYTES))
    total = 0
    for copy in copies:
        total += copy * BLOCK_BYTES
        if total > limit:
            break
        while rooms[0] < copy:  # As `start_move` goes on to the next segment.
            rooms.pop(0)
        rooms[0] -= copy


def test_space_that_is_given_back_is_not_that_of_pinned_pages() -> None:
    """F23, R24: pages that are not pinned go first, and pinned ones move closer together."""
    rig = Rig(free_floor_ratio=0.15)
    rig.space = Space(free=500 * MIB, total=1000 * MIB, own=0)
    store = rig.start()
    store.pin(PINNED)
    engine = store.disks[0]._live.engine
    others = [PageId(version(b"others"), index) for index in range(40)]
    pinned = [PageId(version(b"pinned/%d" % number), 0) for number in range(6)]
    for number, page in enumerate(pinned):
        fill(store, [page, *others[6 * number : 6 * number + 6]])
    in_use = len(engine.segments.queue)
    assert in_use > 4
    rig.devices[-1]._space = Space(free=140 * MIB, total=1000 * MIB, own=0)
    rig.wait(store, 1.0, ticks=4)
    assert len(engine.segments.queue) <= in_use - 3, "it does give back"
    assert all(read_back(store, page) for page in pinned)
    store.close()
