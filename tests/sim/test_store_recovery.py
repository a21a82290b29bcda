"""What a slab comes back with, after any way of stopping and any change around it."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from racerd.errors import ResourceError, Retry
from racerd.ids import PageId
from racerd.pages import PageGeometry
from racerd.store import Store, StoreSettings, engine, tombstones
from racerd.store.buffers import aligned_buffer
from racerd.store.claims import Reservation
from racerd.store.device import BlockDevice
from racerd.store.geometry import BLOCK_BYTES, NOTES_OFFSETS, SUPERBLOCK_OFFSETS
from racerd.store.notes import Notes, Selector
from racerd.store.superblock import SUPERBLOCK_MAGIC
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.sim.faulty_device import Crash, Faults, FaultyDevice, Medium
from tests.sim.store_driver import Clock, InlineKeeper
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, settings, version

PATH = Path("/faulty/slab")
SMALL = version(b"small", size=100)
PAGES = [PageId(version(), index) for index in range(30)] + [PageId(SMALL, 0)]


class Rig:
    """A store over a medium, started and stopped as often as a test likes."""

    def __init__(self, size: int = 4 * MIB) -> None:
        self.medium = Medium(size, seed=1)
        self.faults = Faults()
        self.clock = Clock()
        self.metrics = Metrics()
        self.keepers: list[InlineKeeper] = []

    def device(self) -> BlockDevice:
        return FaultyDevice(self.medium, self.faults, sleep=self.clock.sleep)

    def keeper(self, name, work) -> InlineKeeper:
        self.keepers.append(InlineKeeper(name, work))
        return self.keepers[-1]

    def start(self, capacity: int | None = None, geometry: PageGeometry = GEOMETRY) -> Store:
        self.metrics = Metrics()
        store = Store(
            settings(PATH, capacity=capacity or self.medium.size), geometry, self.metrics,
            open_device=lambda _: self.device(), clock=self.clock, make_keeper=self.keeper,
        )  # fmt: skip
        return store.__enter__()

    def filled(self, pages: list[PageId] = PAGES) -> Store:
        store = self.start()
        for page in pages:
            assert store.write(sealed(page))
        return store

    def found(self, store: Store, pages: list[PageId] = PAGES) -> list[PageId]:
        return [page for page in pages if read_back(store, page)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def wipe_checkpoints(rig: Rig, store: Store) -> None:
    geometry = store.disks[0]._live.slab.geometry
    rig.medium.punch(geometry.checkpoint_offset(0), 2 * geometry.checkpoint_bytes)


def test_a_restart_finds_every_page(rig: Rig) -> None:
    """R23, F2, F42: nothing that was kept is fetched again."""
    rig.filled().close()
    store = rig.start()
    assert rig.found(store) == PAGES
    progress = store.disks[0].progress
    assert (progress.pages_from_checkpoint, progress.pages_from_scan) == (len(PAGES), 0)
    assert progress.done and not store.recovering


def test_losing_every_checkpoint_loses_nothing_but_time(rig: Rig) -> None:
    store = rig.filled()
    store.close()
    store = rig.start()
    wipe_checkpoints(rig, store)
    store = rig.start()
    assert rig.found(store) == PAGES
    assert store.disks[0].progress.pages_from_scan == len(PAGES)


def test_a_kill_between_checkpoints_finds_every_page(rig: Rig) -> None:
    """R23, F37."""
    store = rig.filled(PAGES[:10])
    store.checkpoint()
    for page in PAGES[10:]:
        store.write(sealed(page))
    store = rig.start()
    assert rig.found(store) == PAGES
    progress = store.disks[0].progress
    assert progress.pages_from_checkpoint == 10
    assert progress.pages_from_scan == len(PAGES) - 10


def test_the_older_checkpoint_serves_when_the_latest_is_damaged(rig: Rig) -> None:
    store = rig.filled(PAGES[:10])
    store.checkpoint()
    store.write(sealed(PAGES[10]))
    store.checkpoint()
    geometry = store.disks[0]._live.slab.geometry
    rig.medium.rot(geometry.checkpoint_offset(1) + BLOCK_BYTES + 5)
    store = rig.start()
    assert rig.found(store, PAGES[:11]) == PAGES[:11]
    assert store.disks[0].progress.pages_from_checkpoint == 10


@pytest.mark.parametrize("power", [False, True])
def test_a_checkpoint_torn_at_any_sector_leaves_the_one_before(power: bool) -> None:
    """F37: the payload is flushed before the header that makes it valid."""
    for sectors in range(1, 60, 7):
        rig = Rig(2 * MIB)
        store = rig.filled(PAGES[:6])
        store.checkpoint()
        store.write(sealed(PAGES[6]))
        rig.faults.crash_after_sectors = sectors
        with suppress(Crash):
            store.checkpoint()
        rig.faults.crash_after_sectors = None
        if power:
            rig.medium.lose_power()
        assert rig.found(rig.start(), PAGES[:6]) == PAGES[:6]


def test_a_record_torn_by_a_crash_is_a_miss_and_is_counted(rig: Rig) -> None:
    """R22, F11, F39: the header is there, a part of the page is not."""
    store = rig.filled(PAGES[:5])
    found = store.disks[0]._live.engine.start_read(PAGES[4])
    rig.medium.punch(found.offset + 16 * KIB, 4 * KIB)
    store = rig.start()
    assert rig.found(store, PAGES[:5]) == PAGES[:4]
    assert counted(rig.metrics, "racer_corrupt_pages_total", reason="frame_crc") == 1
    assert not store.contains(PAGES[4])
    assert store.write(sealed(PAGES[4])) and read_back(store, PAGES[4])


def test_a_hole_in_a_segment_hides_only_itself(rig: Rig) -> None:
    """F38: what follows a record that is gone is found all the same."""
    store = rig.filled(PAGES[:8])
    found = store.disks[0]._live.engine.start_read(PAGES[3])
    rig.medium.punch(found.offset, found.record_bytes)
    store = rig.start()
    assert rig.found(store, PAGES[:8]) == PAGES[:3] + PAGES[4:8]


def test_zeros_are_never_a_page(rig: Rig) -> None:
    """F38, F39: a hole in the ciphertext, under an index that knows the page."""
    store = rig.filled(PAGES[:3])
    found = store.disks[0]._live.engine.start_read(PAGES[1])
    rig.medium.punch(found.offset + BLOCK_BYTES, 64 * KIB)
    assert rig.found(store, PAGES[:3]) == [PAGES[0], PAGES[2]]


def test_a_slab_that_was_cut_short_loses_only_its_end(rig: Rig) -> None:
    """F5, F11: reads past the end are misses; dropping what is not there succeeds."""
    store = rig.filled()
    store.close()
    cut = store.disks[0].settings.capacity_bytes // 3 // BLOCK_BYTES * BLOCK_BYTES
    rig.medium.punch(cut, rig.medium.size - cut)
    store = rig.start()
    kept = rig.found(store)
    assert 0 < len(kept) < len(PAGES)
    for page in PAGES:
        store.drop(page, "test")
    store.disks[0].upkeep.tick()
    assert rig.found(store) == []


def test_records_in_each_others_place_are_misses(rig: Rig) -> None:
    """R22: swapped on the medium, with headers and all; also within the index's lifetime."""
    store = rig.filled(PAGES[:4])
    engine = store.disks[0]._live.engine
    first, second = engine.start_read(PAGES[0]), engine.start_read(PAGES[1])
    size = first.record_bytes
    one = bytes(rig.medium.now[first.offset : first.offset + size])
    two = bytes(rig.medium.now[second.offset : second.offset + size])
    rig.medium.write(first.offset, two)
    rig.medium.write(second.offset, one)
    assert rig.found(store, PAGES[:4]) == PAGES[2:4]
    assert counted(rig.metrics, "racer_corrupt_pages_total", reason="header_place") == 2
    assert rig.found(rig.start(), PAGES[:4]) == PAGES[2:4]


def test_ciphertext_of_another_page_is_a_miss(rig: Rig) -> None:
    """R22: only the ciphertext was swapped; its CRC tells."""
    store = rig.filled(PAGES[:2])
    engine = store.disks[0]._live.engine
    first, second = engine.start_read(PAGES[0]), engine.start_read(PAGES[1])
    data = bytes(rig.medium.now[second.offset + BLOCK_BYTES :][: 64 * KIB])
    rig.medium.write(first.offset + BLOCK_BYTES, data)
    assert rig.found(store, PAGES[:2]) == [PAGES[1]]


def test_an_evicted_object_stays_away_whatever_is_lost(rig: Rig) -> None:
    """F29: neither a kill, nor a power loss, nor the loss of the checkpoints brings it back."""
    store = rig.filled()
    store.checkpoint()
    pages, size = store.evict_object(SMALL.object_id)
    assert (pages, size) == (1, 8 * KIB)
    rig.medium.lose_power()
    assert PageId(SMALL, 0) not in rig.found(rig.start())
    store = rig.start()
    wipe_checkpoints(rig, store)
    store = rig.start()
    assert rig.found(store) == PAGES[:-1]


def test_an_eviction_is_durable_when_it_returns(rig: Rig) -> None:
    """F29: even if the disk loses everything that was not flushed."""
    store = rig.filled()
    store.checkpoint()
    store.evict_object(SMALL.object_id)
    rig.medium.lose_power(everything=True)
    wipe_checkpoints(rig, store)
    assert rig.found(rig.start()) == PAGES[:-1]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_slab_that_was_filled_many_times_over_has_no_ghosts(checkpoint: bool) -> None:
    """F29, F38: neither an old checkpoint nor records of earlier lives are taken for pages."""
    rig = Rig(2 * MIB)
    store = rig.start()
    chance = random.Random(5)
    pages = [PageId(version(b"%d" % n, size=chance.randrange(1, 64 * KIB)), 0) for n in range(400)]
    for number, page in enumerate(pages):
        assert store.write(sealed(page))
        if checkpoint and number == 150:
            store.checkpoint()
    kept = [page for page in pages if store.contains(page)]
    if not checkpoint:
        wipe_checkpoints(rig, store)
    store = rig.start()
    assert store.disks[0].page_count == len(kept)
    assert rig.found(store, pages) == kept
    assert counted(rig.metrics, "racer_corrupt_pages_total") == 0


def test_an_emptied_segment_is_dead_before_it_is_filled_again() -> None:
    """F29: a page evicted by capacity, kept anew, then dropped, does not return as its old copy."""
    rig = Rig(2 * MIB)
    store = rig.start()
    pages = [PageId(version(b"%d" % number), 0) for number in range(100)]
    number = 0
    while counted(rig.metrics, "racer_store_evicted_pages_total") == 0:
        assert store.write(sealed(pages[number]))
        number += 1
    old = next(page for page in pages[:number] if not store.contains(page))
    assert store.write(sealed(old))
    assert store.evict_object(old.version.object_id)[0] == 1
    wipe_checkpoints(rig, store)
    assert not read_back(rig.start(), old)


def test_a_whole_record_of_another_page_in_the_very_place_is_a_miss(rig: Rig) -> None:
    """R22, F30: header, place and checksums are right, the identity is not."""
    store = rig.filled(PAGES[:2])
    live = store.disks[0]._live
    found = live.engine.start_read(PAGES[0])
    live.engine.end_read(found)
    other = sealed(PAGES[5])
    space = Reservation(
        other.page, found.segment, found.offset, found.generation, 1, found.length,
        found.record_bytes,
    )  # fmt: skip
    live.io.write(space, other)
    assert rig.found(store, PAGES[:2]) == PAGES[1:2]
    assert counted(rig.metrics, "racer_corrupt_pages_total", reason="identity") == 1


def test_old_copies_do_not_come_back_when_the_latest_is_dropped() -> None:
    """F29: evicted by capacity, kept anew elsewhere, dropped, and no checkpoint to tell."""
    rig = Rig(2 * MIB)
    store = rig.start()
    chance = random.Random(3)
    for step in range(300):
        store.write(sealed(PageId(version(), chance.randrange(40))))
        if step % 10 == 9:
            store.evict_object(version().object_id)
            wipe_checkpoints(rig, store)
            store = rig.start()
            assert store.disks[0].page_count == 0


def test_an_eviction_during_recovery_holds_for_what_is_found_later(rig: Rig) -> None:
    """F29: also after a crash in the middle of that recovery, and another one."""
    store = rig.filled()
    wipe_checkpoints(rig, store)
    counts = []

    def evict_once() -> None:
        if not counts:
            counts.append(rig.restarted.evict_prefix("models", "bucket", b"small"))

    class Eager(InlineKeeper):
        def run_tasks(self) -> None:
            evict_once()

    rig.restarted = Store(
        settings(PATH, capacity=rig.medium.size), GEOMETRY, Metrics(),
        open_device=lambda _: rig.device(), clock=rig.clock, make_keeper=Eager,
    )  # fmt: skip
    with rig.restarted as store:
        assert counts == [(0, 0)]
        assert rig.found(store) == PAGES[:-1]
        assert store.disks[0].notes.fences == ()
    assert rig.found(rig.start()) == PAGES[:-1]


def test_a_fence_outlives_a_crash_before_recovery_was_complete(rig: Rig) -> None:
    """F29."""
    store = rig.filled()
    wipe_checkpoints(rig, store)

    class Crashing(InlineKeeper):
        steps = 0

        def run_tasks(self) -> None:
            Crashing.steps += 1
            if Crashing.steps == 2:
                rig.restarted.evict_object(SMALL.object_id)
            if Crashing.steps == 3:
                raise KeyboardInterrupt

    rig.restarted = Store(
        settings(PATH, capacity=rig.medium.size), GEOMETRY, Metrics(),
        open_device=lambda _: rig.device(), clock=rig.clock, make_keeper=Crashing,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        rig.restarted.__enter__()
    rig.medium.lose_power()
    store = rig.start()
    assert rig.found(store) == PAGES[:-1]
    assert store.disks[0].notes.fences == ()


def test_half_the_capacity_keeps_what_fits_and_growing_keeps_all(rig: Rig) -> None:
    """F3, F42: pages beyond the new end are dropped, everything else stays."""
    rig.filled().close()
    store = rig.start(capacity=2 * MIB)
    kept = rig.found(store)
    assert len(PAGES) // 3 < len(kept) < len(PAGES)
    assert store.disks[0].capacity_bytes == 2 * MIB
    for page in PAGES:
        store.write(sealed(page))
    assert store.disks[0].live_bytes <= 2 * MIB
    latest = rig.found(store)
    store.close()
    store = rig.start(capacity=2 * MIB)
    assert rig.found(store) == latest
    assert store.disks[0].progress.pages_from_checkpoint == len(latest)
    store.close()
    store = rig.start(capacity=4 * MIB)
    assert rig.found(store) == latest
    for page in PAGES:
        assert store.write(sealed(page))
    assert rig.found(store) == PAGES


def test_a_crash_right_after_the_capacity_changed(rig: Rig) -> None:
    """F3, F37: the new superblock is there, the new checkpoint is not."""
    rig.filled().close()
    for sectors in (17, 18, 24, 32, 39):
        rig.faults.crash_after_sectors = sectors
        with pytest.raises(Crash):
            rig.start(capacity=4 * MIB - sectors * BLOCK_BYTES)
        rig.faults.crash_after_sectors = None
        rig.medium.lose_power()
    store = rig.start(capacity=4 * MIB)
    assert len(rig.found(store)) >= len(PAGES) // 2


def test_other_page_sizes_start_the_slab_anew(rig: Rig) -> None:
    """F35: pages of another size are other ranges; none of them is taken for one of ours."""
    rig.filled().close()
    other = PageGeometry(128 * KIB, 16 * KIB)
    store = rig.start(geometry=other)
    assert store.disks[0].page_count == 0
    page = PageId(version(), 0)
    assert store.write(sealed(page, other)) and read_back(store, page, other)
    store.close()
    wipe_checkpoints(rig, rig.start(geometry=other))
    store = rig.start(geometry=GEOMETRY)
    assert rig.found(store) == []


def test_a_newer_format_is_left_alone(rig: Rig) -> None:
    """F35: the slab is not touched, the store works without it, and says what to do."""
    rig.filled().close()
    for offset in SUPERBLOCK_OFFSETS:
        assert rig.medium.now[offset : offset + 8] == SUPERBLOCK_MAGIC
        rig.medium.now[offset + 16] = 3
    before = bytes(rig.medium.now)
    store = rig.start()
    assert rig.found(store) == [] and not store.write(sealed(PAGES[0]))
    assert "newer format" in store.explain(PAGES[0])
    store.close()
    assert rig.medium.now == before
    assert counted(rig.metrics, "racer_store_writes_total", result="down") == 1


def test_something_that_is_not_a_slab_is_left_alone(rig: Rig) -> None:
    rig.medium.write(0, b"precious data of somebody".ljust(4096, b"!"))
    before = bytes(rig.medium.now)
    store = rig.start()
    assert "did not write" in store.explain(PAGES[0])
    store.close()
    assert rig.medium.now == before


@pytest.mark.parametrize("offset", SUPERBLOCK_OFFSETS)
def test_one_damaged_superblock_is_no_loss(rig: Rig, offset: int) -> None:
    """R23: no single fault costs the slab."""
    rig.filled().close()
    rig.medium.rot(offset + 30)
    assert rig.found(rig.start()) == PAGES


def test_both_superblocks_damaged_start_the_slab_anew(rig: Rig) -> None:
    rig.filled().close()
    for offset in SUPERBLOCK_OFFSETS:
        rig.medium.rot(offset + 30)
    store = rig.start()
    assert rig.found(store) == []
    assert store.write(sealed(PAGES[0])) and rig.found(store) == PAGES[:1]


def test_a_lost_segment_header_is_no_loss(rig: Rig) -> None:
    """R23: the records' own generations tell."""
    store = rig.filled()
    store.close()
    geometry = store.disks[0].settings
    assert geometry.capacity_bytes
    store = rig.start()
    live = store.disks[0]._live
    for segment in range(live.slab.geometry.segment_count):
        rig.medium.rot(live.slab.geometry.segment_offset(segment) + 9)
    assert rig.found(rig.start()) == PAGES
    wipe_checkpoints(rig, store)
    assert rig.found(rig.start()) == PAGES


def test_a_hole_over_a_segments_start_costs_what_was_in_it(rig: Rig) -> None:
    """F38: header and first record are gone; the checkpoint knows the rest, and it heals."""
    store = rig.filled()
    store.close()
    live = rig.start().disks[0]._live
    segment = live.engine.start_read(PAGES[3]).segment
    first = min(
        (page for page in PAGES if live.engine.start_read(page).segment == segment),
        key=lambda page: live.engine.start_read(page).offset,
    )
    rig.medium.punch(live.slab.geometry.segment_offset(segment), 8 * KIB)
    rest = [page for page in PAGES if page != first]
    assert rig.found(rig.start()) == rest
    assert rig.medium.now[live.slab.geometry.segment_offset(segment) :][:8] == b"RACERSEG"
    wipe_checkpoints(rig, rig.start())
    assert rig.found(rig.start()) == rest


def test_read_errors_during_recovery_are_tried_again(rig: Rig) -> None:
    """F18: 10 % EIO while the slab is scanned costs nothing."""
    rig.filled().close()
    for seed in range(5):
        rig.medium.chance.seed(seed)
        store = rig.start()
        wipe_checkpoints(rig, store)
        rig.faults.read_errors = 0.02
        store = rig.start()
        rig.faults.read_errors = 0.0
        rig.clock.sleep(3.0)
        for _ in range(5):
            store.disks[0].upkeep.tick()
        rig.clock.sleep(60.0)
        assert rig.found(store) == PAGES


def test_a_disk_that_cannot_be_read_at_the_start_is_opened_later(rig: Rig) -> None:
    """F17, R23: the store starts without it and takes it back."""
    rig.filled().close()
    rig.faults.vanished = True
    store = rig.start()
    assert (rig.found(store) == [] and "gone" in store.explain(PAGES[0])) or "ENODEV"
    for _ in range(5):
        rig.clock.sleep(10.0)
        store.disks[0].upkeep.tick()
    rig.faults.vanished = False
    for _ in range(5):
        rig.clock.sleep(60.0)
        store.disks[0].upkeep.tick()
    assert rig.found(store) == PAGES


def test_a_write_in_flight_at_the_checkpoint_is_found_after_a_kill(rig: Rig) -> None:
    """F37: its segment was closed meanwhile, but the checkpoint says where to look."""
    store = rig.start()
    live = store.disks[0]._live
    space = store.disks[0].upkeep.mount.writer._reserve(PAGES[0], 64 * KIB)
    for page in PAGES[1:20]:
        store.write(sealed(page))
    store.checkpoint()
    live.io.write(space, sealed(PAGES[0]))
    assert live.engine.commit(space) is None
    store = rig.start()
    assert rig.found(store, PAGES[:20]) == PAGES[:20]


def test_a_checkpoint_that_does_not_fit_is_completed_by_scanning(rig: Rig) -> None:
    tiny = [PageId(version(b"tiny/%05d" % n, size=10), 0) for n in range(400)]
    store = rig.filled(tiny)
    store.close()
    store = rig.start()
    progress = store.disks[0].progress
    assert progress.pages_from_checkpoint > 0 and progress.pages_from_scan > 0
    assert rig.found(store, tiny) == tiny


@pytest.fixture
def few_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each page of these tests were a hundred."""
    monkeypatch.setattr(tombstones, "TOMBSTONES_MAX", 8)
    monkeypatch.setattr(engine, "_STEP_PAGES", 2)


@pytest.mark.usefixtures("few_tombstones")
def test_an_eviction_of_more_pages_than_tombstones_may_wait_is_for_good(rig: Rig) -> None:
    """F29: they are written on the way, on a disk that is well; none is given up."""
    store = rig.filled()
    store.checkpoint()
    assert store.evict_object(version().object_id)[0] == 30
    assert store.disks[0]._live.tombstones.given_up == 0
    assert rig.found(rig.start()) == PAGES[-1:]


@pytest.mark.usefixtures("few_tombstones")
def test_a_noted_eviction_of_many_pages_is_for_good(rig: Rig) -> None:
    """F29, F37: of what the checkpoint had of it, every record gets its tombstone."""
    store = rig.filled()
    store.checkpoint()
    live = store.disks[0]._live
    fence = Selector("models", "bucket", version().object_id.key, exact=True)
    live.slab.write_notes(Notes(sequence=live.slab.notes.sequence + 1, fences=(fence,)))
    store = rig.start()
    assert store.disks[0].notes.fences == () and store.disks[0]._live.tombstones.given_up == 0
    assert rig.found(rig.start()) == PAGES[-1:]


def test_pins_survive_everything(rig: Rig) -> None:
    """R24: pins are notes of the slab itself, not of a checkpoint."""
    store = rig.filled(PAGES[:5])
    pin = Selector("models", "bucket", version().object_id.key, exact=True)
    other = Selector("models", "bucket", b"x", exact=False)
    store.pin(other)
    store.pin(pin)
    store.pin(pin)
    store.unpin(other)
    wipe_checkpoints(rig, store)
    rig.medium.lose_power()
    store = rig.start()
    assert store.pins == (pin,)
    for number in range(300):
        store.write(sealed(PageId(version(b"flood"), number)))
    assert rig.found(store, PAGES[:5]) == PAGES[:5]
    rig.medium.rot(NOTES_OFFSETS[store.disks[0].notes.slot] + 100)
    assert rig.start().pins == (other, pin), "the notes before the latest ones"


def test_too_many_pins_are_refused_with_advice(rig: Rig) -> None:
    store = rig.start()
    pins = [Selector("models", "b", b"k" * 1000 + b"%d" % n, exact=True) for n in range(24)]
    for pin in pins:
        store.pin(pin)
    with pytest.raises(ResourceError, match="do not fit") as caught:
        store.pin(Selector("models", "b", b"k" * 1001, exact=True))
    assert caught.value.code == "pin_refused" and caught.value.hint
    assert store.pins == tuple(pins)
    assert rig.start().pins == store.pins


def test_a_pin_of_more_than_may_be_pinned_is_refused(rig: Rig) -> None:
    """R24: it is refused whole, with figures; what was pinned before stays as it was."""
    store = rig.start()
    small = Selector("models", "bucket", b"small", exact=True)
    store.write(sealed(PageId(version(b"small"), 0)))
    store.pin(small)
    limit = store.disks[0].pinned_bytes_max
    pages = [PageId(version(b"flood"), number) for number in range(100)]
    for page in pages:
        store.write(sealed(page))
    everything = Selector("models", "bucket", b"", exact=False)
    assert store.held(everything)[1] > limit
    with pytest.raises(ResourceError, match=f"at most {limit} may be") as caught:
        store.pin(everything)
    assert caught.value.code == "pin_refused" and caught.value.hint
    assert store.pins == (small,)
    assert store.pin_room_bytes == limit - store.held(small)[1]
    assert rig.start().pins == (small,)


def test_pins_of_a_disk_that_is_opened_late_are_not_lost(rig: Rig) -> None:
    """R24, F17: a disk that is slow to open, or fails at first, is asked before pins change."""
    pins = tuple(Selector("models", "bucket", name, exact=True) for name in (b"a", b"b", b"c"))
    with rig.start() as store:
        store.pin(pins[0])
        store.pin(pins[1])
    rig.faults.vanished = True
    store = rig.start()
    assert store.pins == ()
    rig.faults.vanished = False
    for _ in range(5):
        rig.clock.sleep(60.0)
        store.disks[0].upkeep.tick()
    assert store.pins == pins[:2]
    store.pin(pins[2])
    assert store.pins == pins
    assert rig.start().pins == pins


def test_a_pin_that_no_disk_can_note_is_not_kept(rig: Rig) -> None:
    """R24: what would be forgotten at the next start is said, not promised."""
    store = rig.filled(PAGES[:5])
    kept = Selector("models", "bucket", b"", exact=False)
    store.pin(kept)
    rig.faults.vanished = True
    for change in (store.pin, store.unpin):
        selector = kept if change == store.unpin else Selector("models", "bucket", b"x", exact=True)
        with pytest.raises(ResourceError, match="could note") as caught:
            change(selector)
        assert (caught.value.code, caught.value.retry) == ("overloaded", Retry.SAME)
        assert store.pins == (kept,)
    rig.faults.vanished = False
    assert rig.start().pins == (kept,)


def test_without_a_disk_nothing_can_be_pinned() -> None:
    with Store(StoreSettings(()), GEOMETRY, Metrics()) as store:
        with pytest.raises(ResourceError, match="no disk") as caught:
            store.pin(Selector("models", "bucket", b"", exact=False))
        assert caught.value.code == "pin_refused" and store.pins == ()
        assert store.pin_room_bytes == 0


def test_versions_are_found_in_what_is_stored(rig: Rig) -> None:
    store = rig.start()
    one = version(b"k", size=200_000, etag='"1"', token="17")
    two = version(b"k", size=100_000, etag='W/"2"')
    for each in (one, two):
        store.write(sealed(PageId(each, 0)))
    store.close()
    store = rig.start()
    found = store.find_version(one.object_id, '"1"')
    assert found == one and found.origin_token == "17"
    assert store.find_version(one.object_id, 'W/"2"') == two
    assert store.find_version(one.object_id, '"3"') is None
    assert store.find_version(version(b"none").object_id, '"1"') is None


def test_an_object_smaller_than_a_page_is_just_its_bytes(rig: Rig) -> None:
    """F6: a page has the length that the object's size gives it, and takes what it needs."""
    page = PageId(SMALL, 0)
    store = rig.filled([page])
    assert store.disks[0].live_bytes == 2 * BLOCK_BYTES
    assert len(store.read(page, 0, [frame := aligned_buffer(100 + 16)]).tags) == 16
    assert frame == sealed(page).frames[0]
    assert not store.contains(PageId(SMALL, 1))


def test_the_probe_block_is_all_that_an_idle_start_writes(rig: Rig) -> None:
    rig.filled().close()
    before = bytes(rig.medium.now)
    store = rig.start()
    after = bytes(rig.medium.now)
    changed = [at for at in range(0, len(before), BLOCK_BYTES)
               if before[at : at + BLOCK_BYTES] != after[at : at + BLOCK_BYTES]]  # fmt: skip
    assert changed == [BLOCK_BYTES]
    assert store.disks[0].page_count == len(PAGES)


def test_reading_back_what_was_never_aligned(rig: Rig) -> None:
    """F33: buffers of a client may lie anywhere; the last frame ends anywhere."""
    odd = PageId(version(b"odd", size=64 * KIB + 12_345), 1)
    store = rig.start()
    assert store.write(sealed(odd))
    frames = [aligned_buffer(12_345 + 16)]
    assert store.read(odd, 0, frames) is not None
    with pytest.raises(ValueError):
        store.read(odd, 0, [frames[0][1:]])
    with pytest.raises(ValueError):
        store.read(odd, 1, frames)
    with pytest.raises(ValueError):
        store.read(odd, 0, [])
