"""Disks that fail while they are used: no single fault stops a read, or makes it wrong."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from racerd.ids import PageId
from racerd.store import Store
from racerd.store.admission import OthersAtSecondSight
from racerd.store.device import BlockDevice, Extent, Space
from racerd.store.health import DiskState
from racerd.store.housekeeper import Housekeeper
from racerd.store.notes import Selector
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.sim.faulty_device import Faults, FaultyDevice, Medium
from tests.sim.store_driver import Clock, InlineKeeper
from tests.support.store_pages import (
    GEOMETRY,
    buffers,
    counted,
    read_back,
    sealed,
    settings,
    version,
)

PAGES = [PageId(version(), index) for index in range(20)]
RECORD = 68 * KIB


class Rig:
    """A store over faulty disks, on a clock that stands still."""

    def __init__(self, disks: int = 1, *, size: int = 4 * MIB, **others: object) -> None:
        self.paths = [Path(f"/faulty/{number}") for number in range(disks)]
        self.media = {path: Medium(size, seed) for seed, path in enumerate(self.paths)}
        self.faults = {path: Faults() for path in self.paths}
        self.clock = Clock()
        self.space: Space | None = None
        self.make_device: Callable[..., BlockDevice] = FaultyDevice
        self.devices: list[BlockDevice] = []
        self.pause = threading.Event()
        self.settings = settings(*self.paths, capacity=size, **others)

    @property
    def fault(self) -> Faults:
        return self.faults[self.paths[0]]

    def open(self, disk) -> BlockDevice:
        device = self.make_device(
            self.media[disk.path], self.faults[disk.path], path=disk.path,
            sleep=self.clock.sleep, space=self.space,
        )  # fmt: skip
        self.devices.append(device)
        return device

    def start(self, *, keeper=InlineKeeper, admission=None) -> Store:
        self.metrics = Metrics()
        store = Store(
            self.settings, GEOMETRY, self.metrics, open_device=self.open, clock=self.clock,
            make_keeper=keeper, admission=admission,
        )  # fmt: skip
        return store.__enter__()

    def wait(self, store: Store, seconds: float, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.clock.sleep(seconds)
            for disk in store.disks:
                disk.upkeep.tick()


def state(store: Store) -> DiskState:
    return store.disks[0].watch.state


def fill(store: Store, pages: Sequence[PageId] = PAGES) -> None:
    for page in pages:
        assert store.write(sealed(page))


def found(store: Store, pages: Sequence[PageId] = PAGES) -> list[PageId]:
    return [page for page in pages if read_back(store, page)]


def test_a_tenth_of_all_reads_fails() -> None:
    """F18, F22: the others are served, the failures counted by errno, and no page is lost."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.read_errors = 0.1
    hits = 0
    for _ in range(10):
        hits += len(found(store))
        rig.clock.sleep(1.0)
    assert 140 < hits < 200
    assert state(store) in (DiskState.NORMAL, DiskState.UNSTABLE)
    errors = counted(rig.metrics, "racer_store_device_errors_total", operation="read", errno="EIO")
    assert errors == 200 - hits
    rig.fault.read_errors = 0.0
    rig.wait(store, 60.0)
    assert state(store) is DiskState.NORMAL
    kept = found(store)
    for page in PAGES:  # What failed twice was given up; it can be kept anew.
        assert store.write(sealed(page))
    assert len(kept) > 15 and found(store) == PAGES


def test_one_failed_read_does_not_cost_the_page() -> None:
    """F18: nothing that was kept is fetched again because of one error."""
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:1])
    rig.fault.read_errors = 1.0
    assert not read_back(store, PAGES[0])
    rig.fault.read_errors = 0.0
    assert read_back(store, PAGES[0])


def test_a_page_that_cannot_be_read_is_given_up() -> None:
    """F5: it would fail for ever."""
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:2])
    rig.fault.read_errors = 1.0
    assert found(store, PAGES[:1]) == [] and store.contains(PAGES[0])
    assert found(store, PAGES[:1]) == [] and not store.contains(PAGES[0])
    rig.fault.read_errors = 0.0
    assert read_back(store, PAGES[1])


def test_a_broken_disk_is_left_alone_and_its_pages_are_there_when_it_is_well_again() -> None:
    """F17, R23: down, probed, normal; what could not be read meanwhile was not dropped."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.read_errors = 1.0
    while state(store) is not DiskState.DOWN:
        found(store, PAGES[:10])
    device = rig.devices[-1]
    operations = device.operations
    assert found(store) == [] and not store.write(sealed(PageId(version(b"new"), 0)))
    assert not any(store.contains(page) for page in PAGES)
    assert device.operations == operations, "a disk that is down is not touched"
    assert "is down: read of slab /faulty/0 failed" in store.explain(PAGES[15])
    rig.wait(store, 10.0, ticks=5)
    assert state(store) is DiskState.DOWN
    rig.fault.read_errors = 0.0
    rig.wait(store, 61.0, ticks=4)
    assert state(store) is DiskState.NORMAL
    assert set(PAGES[10:]) <= set(found(store))


def test_a_device_that_vanishes_and_comes_back() -> None:
    """R23, F17: it is opened anew and recovered, with every page."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.vanished = True
    assert found(store) == [] and state(store) is DiskState.DOWN
    assert counted(rig.metrics, "racer_store_reads_total", result="down") == 19
    rig.wait(store, 10.0, ticks=3)
    assert rig.devices[0].closed and not store.write(sealed(PAGES[0]))
    rig.fault.vanished = False
    rig.wait(store, 61.0, ticks=4)
    assert found(store) == PAGES
    assert all(device.closed for device in rig.devices[:-1])
    store.close()
    assert rig.devices[-1].closed


class Stuck:
    """A read on a thread of its own that hangs until it is let go."""

    def __init__(self, rig: Rig, store: Store, page: PageId) -> None:
        self.release = threading.Event()
        self.result: list[object] = []
        rig.fault.hang = self.release
        self.frames = buffers(page)
        self.thread = threading.Thread(
            target=lambda: self.result.append(store.read(page, 0, self.frames))
        )
        self.thread.start()
        device = rig.devices[-1]
        while not device.running:
            self.thread.join(0.001)
        rig.fault.hang = None

    def let_go(self) -> None:
        self.release.set()
        self.thread.join()


def test_a_disk_that_hangs_holds_nobody_else() -> None:
    """F18: one thread waits for the kernel; all others pass by, without touching the disk."""
    rig = Rig()
    store = rig.start()
    fill(store)
    stuck = Stuck(rig, store, PAGES[0])
    assert read_back(store, PAGES[1]), "not overdue yet"
    rig.clock.sleep(rig.settings.hang_seconds)
    operations = rig.devices[-1].operations
    assert not store.contains(PAGES[1]) and found(store) == []
    assert not store.write(sealed(PageId(version(b"new"), 0)))
    rig.wait(store, 100.0, ticks=3)
    assert rig.devices[-1].operations == operations
    assert state(store) is DiskState.DOWN
    assert "has been running" in store.explain(PAGES[1])
    stuck.let_go()
    assert stuck.result[0] is not None, "the late read is still a right one"
    rig.wait(store, 61.0, ticks=4)
    assert found(store) == PAGES


def test_closing_does_not_close_a_device_that_is_in_use() -> None:
    """F30, R7: the descriptor would be somebody else's when the kernel comes back."""
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:2])
    stuck = Stuck(rig, store, PAGES[0])
    store.close()
    assert not rig.devices[-1].closed
    assert store.read(PAGES[1], 0, buffers(PAGES[1])) is None
    stuck.let_go()


def test_evict_and_checkpoint_wait_a_bounded_time_for_a_disk_that_hangs() -> None:
    """F18: the disk's own thread hangs; whoever asked it goes on."""
    rig = Rig(wait_seconds_max=0.05)
    store = rig.start(keeper=Housekeeper)
    while store.recovering:
        rig.pause.wait(0.001)
    fill(store)
    release = threading.Event()
    rig.fault.hang = release
    assert store.evict_object(version(b"other").object_id) == (0, 0)
    store.checkpoint()
    assert store.evict_object(version().object_id) == (20, 20 * RECORD)
    store.close()
    assert not rig.devices[-1].closed
    rig.fault.hang = None
    release.set()
    while not rig.devices[-1].closed:
        store.disks[0].upkeep._keeper._thread.join(0.01)  # type: ignore[attr-defined]


class FullOnce(FaultyDevice):
    """Says ENOSPC to the first write of a record after `armed` was set."""

    armed = False

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if FullOnce.armed and sum(len(buffer) for buffer in buffers) >= RECORD:
            FullOnce.armed = False
            raise self._error("write", errno.ENOSPC, Extent(offset, RECORD))
        super().write(offset, buffers)


def test_a_full_disk_means_one_eviction_and_one_more_try() -> None:
    """F1."""
    rig = Rig()
    rig.make_device = FullOnce
    store = rig.start()
    fill(store)
    FullOnce.armed = True
    assert store.write(sealed(PageId(version(b"new"), 0)))
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="capacity") > 0
    assert state(store) is DiskState.NORMAL


def test_a_disk_that_stays_full_keeps_nothing_new_and_serves_the_rest() -> None:
    """F1, F23: counted, never an error, and the disk is not blamed."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.no_space = True
    for number in range(5):
        assert not store.write(sealed(PageId(version(b"new"), number)))
    assert counted(rig.metrics, "racer_store_writes_total", result="disk_full") == 5
    assert state(store) is DiskState.NORMAL
    assert len(found(store)) >= 12, "one eviction, not one for each page that does not fit"
    rig.fault.no_space = False
    rig.wait(store, 20.0)
    assert store.write(sealed(PageId(version(b"new"), 0)))


def test_a_file_system_that_became_read_only_is_read() -> None:
    """R23: writes fail, reads go on."""
    rig = Rig()
    store = rig.start()
    fill(store)
    rig.fault.read_only = True
    for number in range(10):
        assert not store.write(sealed(PageId(version(b"new"), number)))
    rig.wait(store, 1.0, ticks=20)
    assert state(store) is DiskState.UNSTABLE
    assert found(store) == PAGES
    store.close()


def test_the_floor_stops_growth_and_then_gives_space_back() -> None:
    """F23, F13: others fill the file system; the slab stops at the floor and yields."""
    rig = Rig(free_floor_ratio=0.15)
    rig.space = Space(free=100 * MIB, total=1000 * MIB, own=0)
    store = rig.start()
    assert not store.write(sealed(PAGES[0]))
    rig.space = Space(free=500 * MIB, total=1000 * MIB, own=0)
    rig.devices[-1]._space = rig.space
    rig.wait(store, 1.0)
    fill(store)
    states = store.disks[0]._live.engine.segments.states
    used = [s for s in states if s.name not in ("FRESH", "UNKNOWN")]
    rig.devices[-1]._space = Space(free=140 * MIB, total=1000 * MIB, own=0)
    rig.wait(store, 1.0, ticks=2)
    left = [s for s in states if s.name not in ("FRESH", "UNKNOWN")]
    assert len(left) == len(used) - 2
    assert 0 < len(found(store)) < 20
    rig.devices[-1]._space = Space(free=500 * MIB, total=1000 * MIB, own=0)
    rig.wait(store, 1.0)
    fill(store)
    assert found(store) == PAGES


def test_rot_is_found_by_the_scrubber_before_anybody_reads_it() -> None:
    """R22: without keys; dropped, counted, and kept anew at the next chance."""
    rig = Rig()
    store = rig.start()
    fill(store)
    engine = store.disks[0]._live.engine
    rotten = engine.start_read(PAGES[7])
    engine.end_read(rotten)
    rig.media[rig.paths[0]].rot(rotten.offset + 40 * KIB)
    sizes = []
    while (size := store.disks[0].scrub_next()) is not None:
        sizes.append(size)
    assert sizes == [RECORD] * 20
    assert not store.contains(PAGES[7])
    assert counted(rig.metrics, "racer_corrupt_pages_total", reason="frame_crc") == 1
    assert counted(rig.metrics, "racer_store_scrubbed_bytes_total") == 20 * RECORD
    assert found(store) == [page for page in PAGES if page != PAGES[7]]


def test_the_scrubber_is_a_thread_that_stops_when_it_is_told() -> None:
    rig = Rig(scrub_bytes_per_second=1 << 40)
    store = rig.start()
    fill(store)
    stop = threading.Event()
    thread = threading.Thread(target=store.scrub, args=(stop,))
    thread.start()
    while counted(rig.metrics, "racer_store_scrubbed_bytes_total") < 30 * RECORD:
        thread.join(0.001)
    stop.set()
    thread.join()
    assert found(store) == PAGES


def test_two_disks_share_the_pages_and_one_may_fail() -> None:
    """R23: the other one serves its own, and takes what is new."""
    rig = Rig(disks=2)
    store = rig.start()
    fill(store)
    counts = [disk.page_count for disk in store.disks]
    assert sum(counts) == 20 and min(counts) > 3
    rig.faults[rig.paths[0]].vanished = True
    assert len(found(store)) == counts[1]
    new = [PageId(version(b"new"), number) for number in range(10)]
    fill(store, new)
    assert found(store, new) == new
    assert store.disks[1].page_count == counts[1] + 10


def test_a_further_disk_loses_nothing() -> None:
    """F42: pages are looked for where they are, not only where they would go now."""
    rig = Rig(disks=2)
    rig.settings = settings(rig.paths[0], capacity=4 * MIB)
    store = rig.start()
    fill(store)
    store.close()
    rig.settings = settings(*rig.paths, capacity=4 * MIB)
    store = rig.start()
    assert found(store) == PAGES
    fill(store, [PageId(version(b"new"), number) for number in range(20)])
    assert store.disks[1].page_count > 3


def test_placement_follows_capacity() -> None:
    rig = Rig(disks=2)
    store = rig.start()
    store.disks[1].settings = settings(rig.paths[1], capacity=MIB).disks[0]
    store.disks[1].upkeep.mount = None
    first = [store._ranked(PageId(version(b"x"), number))[0] for number in range(1000)]
    assert 750 < first.count(store.disks[0]) < 850


def test_quotas_hold_over_disks_and_change_at_run_time() -> None:
    """F9, F41."""
    rig = Rig(disks=2, quotas={"small": 10 * RECORD})
    store = rig.start()
    for number in range(30):
        store.write(sealed(PageId(version(b"s", cache="small"), number)))
    fill(store)
    assert store.disks[0].page_count + store.disks[1].page_count <= 30
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="quota") > 0
    store.set_quotas({"small": RECORD})
    assert not store.write(sealed(PageId(version(b"t", cache="small"), 0)))
    assert counted(rig.metrics, "racer_store_writes_total", result="quota") == 1
    store.set_quotas({})
    assert store.write(sealed(PageId(version(b"t", cache="small"), 0)))


def test_a_disk_that_is_opened_late_gets_its_share_of_the_quotas() -> None:
    """F9, F17: how much it takes is not known before, and a share of nothing would keep nothing."""
    rig = Rig(disks=2)
    rig.settings = settings(*rig.paths, capacity=None, quotas={"models": 60 * RECORD})
    rig.faults[rig.paths[1]].vanished = True
    store = rig.start()
    rig.faults[rig.paths[1]].vanished = False
    rig.wait(store, 60.0, ticks=5)
    fill(store)
    assert store.disks[1].page_count > 3
    assert counted(rig.metrics, "racer_store_evicted_pages_total", reason="quota") == 0


def test_a_disk_that_is_opened_late_learns_what_was_pinned_meanwhile() -> None:
    """R24, F17."""
    rig = Rig(disks=2)
    pins = [Selector("models", "bucket", name, exact=True) for name in (b"a", b"b")]
    with rig.start() as store:
        store.pin(pins[0])
    rig.faults[rig.paths[1]].vanished = True
    with rig.start() as store:
        store.pin(pins[1])
    store = rig.start()
    rig.faults[rig.paths[1]].vanished = False
    rig.wait(store, 60.0, ticks=5)
    assert store.disks[1].notes.pins == store.pins == tuple(pins)


def test_a_defect_while_a_slab_is_opened_leaves_no_device_open() -> None:
    """A device that is left open keeps the slab locked: no probe could open it again."""

    class Strange(FaultyDevice):
        def space(self) -> Space | None:
            raise RuntimeError("a defect")

    rig = Rig()
    rig.settings = settings(*rig.paths)
    rig.make_device = Strange
    with pytest.raises(RuntimeError, match="a defect"):
        rig.start()
    assert all(device.closed for device in rig.devices) and rig.devices


def test_the_write_budget_is_per_day() -> None:
    rig = Rig(write_bytes_per_day=10 * RECORD)
    store = rig.start()
    kept = [page for page in PAGES if store.write(sealed(page))]
    assert kept == PAGES[:10]
    assert counted(rig.metrics, "racer_store_writes_total", result="write_budget") == 10
    rig.clock.sleep(86_400 / 10)
    assert store.write(sealed(PAGES[10])) and not store.write(sealed(PAGES[11]))


def test_what_is_not_written_costs_no_write_budget() -> None:
    """F15: a cache at its quota, and two writers of one page, do not keep others from the disk."""
    rig = Rig(write_bytes_per_day=10 * RECORD, quotas={"models": RECORD // 2})
    store = rig.start()
    assert not any(store.write(sealed(page)) for page in PAGES)
    assert counted(rig.metrics, "racer_store_writes_total", result="quota") == 20
    others = [PageId(version(cache="others"), index) for index in range(11)]
    assert [store.write(sealed(page)) for page in others] == [True] * 10 + [False]


def test_pins_and_hot_pages_outlast_a_write_budget_that_is_always_spent() -> None:
    """F10, R24: copies come first, and new pages wait for what they took."""
    rig = Rig(write_bytes_per_day=1000 * RECORD)
    store = rig.start()
    store.pin(Selector("models", "bucket", b"pinned", exact=True))
    pinned, hot = PageId(version(b"pinned"), 0), PageId(version(b"hot"), 0)
    fill(store, PAGES[:2])  # The first segment is a short one.
    fill(store, [pinned, hot])
    for number in range(1000):  # Until nothing is left: what comes now is one page at a time.
        store.write(sealed(PageId(version(b"first"), number)))
        assert read_back(store, hot)
    before = counted(rig.metrics, "racer_store_written_bytes_total")
    for number in range(200):
        rig.clock.sleep(86.4)
        store.write(sealed(PageId(version(b"later"), number)))
        assert read_back(store, hot)
    assert read_back(store, pinned)
    written = counted(rig.metrics, "racer_store_written_bytes_total") - before
    segment = store.disks[0]._live.engine.geometry.segment_bytes
    assert 150 * RECORD < written <= 200 * RECORD + segment, "and the wear is what was allowed"


def test_pages_of_other_nodes_are_kept_at_second_sight() -> None:
    rig = Rig()
    store = rig.start(admission=OthersAtSecondSight(lambda page: page.index == 0))
    assert store.write(sealed(PAGES[0]))
    assert not store.write(sealed(PAGES[1])) and store.write(sealed(PAGES[1]))
    assert counted(rig.metrics, "racer_store_writes_total", result="not_admitted") == 1


def test_no_disk_at_all_is_a_store_that_misses() -> None:
    store = Store(settings(), GEOMETRY, Metrics(), make_keeper=InlineKeeper)
    with store:
        assert not store.write(sealed(PAGES[0])) and not store.contains(PAGES[0])
        assert store.read(PAGES[0], 0, buffers(PAGES[0])) is None
        assert store.explain(PAGES[0]) == "no disk is configured"
        assert store.evict_prefix("models", "bucket", b"") == (0, 0)
        assert not store.recovering and store.pins == ()


def test_dropping_is_counted_and_explained() -> None:
    rig = Rig()
    store = rig.start()
    fill(store, PAGES[:2])
    assert store.explain(PAGES[0]) == "on disk /faulty/0"
    store.drop(PAGES[0], "corrupt_tag")
    store.drop(PAGES[0], "corrupt_tag")
    dropped = counted(rig.metrics, "racer_store_evicted_pages_total", reason="corrupt_tag")
    assert dropped == 1
    told = "not on disk: dropped: its copy was damaged (corrupt_tag), 0 s ago"
    assert store.explain(PAGES[0]) == told
    assert counted(rig.metrics, "racer_store_pages") == 1
    assert counted(rig.metrics, "racer_store_bytes") == RECORD


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_replays_the_same_faults(seed: int) -> None:
    def run() -> tuple[bytes, list[PageId]]:
        rig = Rig(size=2 * MIB)
        rig.media[rig.paths[0]].chance.seed(seed)
        rig.fault.write_errors = rig.fault.lost_writes = rig.fault.misdirected_writes = 0.1
        store = rig.start()
        for page in PAGES:
            store.write(sealed(page))
        return bytes(rig.media[rig.paths[0]].now), found(store)

    first = run()
    second = run()
    assert first[1] == second[1]
