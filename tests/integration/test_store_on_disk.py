"""The store on a real file system: O_DIRECT, and many threads at once."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from racerd.ids import PageId
from racerd.pages import PageGeometry
from racerd.store import Store, StoreSettings
from racerd.store.device import BlockDevice, DiskError
from racerd.store.file_device import open_file_device
from racerd.store.notes import Selector
from racerd.store.settings import DiskSettings
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, settings, version

PAGES = [PageId(version(b"big"), index) for index in range(60)] + [
    PageId(version(b"small/%d" % number, size=number * 777 + 1), 0) for number in range(60)
]


@pytest.fixture
def slab() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="racer-test-", dir="/var/tmp"))
    yield folder / "slab"
    shutil.rmtree(folder)


@pytest.fixture
def block_device(slab: Path) -> Iterator[Path]:
    """A block device of 32 MiB, where the machine lets us make one."""
    backing = slab.with_name("backing")
    with backing.open("wb") as file:
        file.truncate(32 * MIB)
    losetup = shutil.which("losetup")
    if losetup is None:
        pytest.skip("there is no losetup on this machine")
    made = subprocess.run([losetup, "-f", "--show", backing], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run([losetup, "-d", path], check=True)


def recovered(store: Store) -> Store:
    pause = threading.Event()
    while store.recovering:
        pause.wait(0.002)
    return store


def test_a_restart_on_a_real_disk(slab: Path) -> None:
    """R21, R23, F2, F25: direct, unbuffered, and every page is there again."""
    metrics = Metrics()
    with Store(settings(slab, capacity=16 * MIB), GEOMETRY, metrics) as store:
        recovered(store)
        assert all(store.write(sealed(page)) for page in PAGES)
        assert counted(metrics, "racer_store_buffered") == 0
    assert slab.stat().st_size <= 16 * MIB
    with Store(settings(slab, capacity=16 * MIB), GEOMETRY, metrics) as store:
        assert [page for page in PAGES if read_back(recovered(store), page)] == PAGES
        device = store.disks[0]._live.slab.device
        assert device.bounced_bytes == 0


def test_a_slab_on_a_block_device(block_device: Path) -> None:
    """R21, F31: its own size and alignment; nothing is allocated, nothing has a floor."""
    metrics = Metrics()
    for round_ in range(2):
        chosen = settings(block_device, capacity=None, free_floor_ratio=0.5)
        with Store(chosen, GEOMETRY, metrics) as store:
            recovered(store)
            device = store.disks[0]._live.slab.device
            assert device.is_block and device.direct and device.alignment in (512, 4096)
            assert store.disks[0].capacity_bytes == 32 * MIB
            if round_ == 0:
                for page in PAGES:
                    assert store.write(sealed(page))
            assert [page for page in PAGES if read_back(store, page)] == PAGES
            with pytest.raises(DiskError):
                open_file_device(block_device)
    with Store(settings(block_device, capacity=8 * MIB), GEOMETRY, metrics) as store:
        recovered(store)
        for index in range(300):
            assert store.write(sealed(PageId(version(b"flood"), index)))
        assert store.disks[0].live_bytes <= 8 * MIB


def test_the_slab_never_outgrows_its_capacity_on_disk(slab: Path) -> None:
    """F1, F3, F19, F41: 8 MiB, filled many times over; then half of it."""
    with Store(settings(slab, capacity=8 * MIB), GEOMETRY, Metrics()) as store:
        recovered(store)
        for index in range(500):
            assert store.write(sealed(PageId(version(b"flood"), index)))
        assert slab.stat().st_blocks * 512 <= 8 * MIB + 64 * KIB
    with Store(settings(slab, capacity=4 * MIB), GEOMETRY, Metrics()) as store:
        recovered(store)
        kept = [n for n in range(500) if read_back(store, PageId(version(b"flood"), n))]
        assert 20 < len(kept) < 60
    assert slab.stat().st_size <= 4 * MIB


def test_a_second_store_is_refused_and_leaves_nothing_open(
    slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F37: it is told once, by whoever started the store, and blames no disk."""
    with Store(settings(slab), GEOMETRY, Metrics()) as store:
        recovered(store)
        second = Store(settings(slab, slab.with_name("other")), GEOMETRY, Metrics())
        with pytest.raises(DiskError) as caught:
            second.__enter__()
        assert caught.value.code == "slab_locked"
        assert "stop that daemon" in caught.value.hint and "dmesg" not in caught.value.hint
        assert caplog.text == ""
        assert store.write(sealed(PAGES[0]))


@pytest.mark.parametrize(
    ("capacity", "geometry", "why"),
    [
        (
            8 * MIB,
            PageGeometry(2 * GEOMETRY.page_bytes, 2 * GEOMETRY.frame_bytes),
            "page_bytes was 64 KiB and is 128 KiB now, frame_bytes was 16 KiB and is 32 KiB now",
        ),
        (
            8 * MIB,
            PageGeometry(GEOMETRY.page_bytes, 2 * GEOMETRY.frame_bytes),
            "slab: frame_bytes was 16 KiB and is 32 KiB now",
        ),
        (MIB, GEOMETRY, "its capacity was 8 MiB and is 1 MiB now, too little for segments of"),
    ],
    ids=["page", "frame", "capacity"],
)
def test_what_starts_a_slab_anew_is_named(
    slab: Path,
    caplog: pytest.LogCaptureFixture,
    capacity: int,
    geometry: PageGeometry,
    why: str,
) -> None:
    with Store(settings(slab), GEOMETRY, Metrics()) as store:
        assert recovered(store).write(sealed(PAGES[0]))
        store.pin(Selector("c", "bucket", b"", exact=False))
    with Store(settings(slab, capacity=capacity), geometry, Metrics()) as store:
        assert recovered(store).pins == ()
        assert not store.contains(PAGES[0])
    [record] = [each for each in caplog.records if "anew" in each.message]
    assert why in record.message and "pins" in record.message


def test_recovery_tells_what_it_found_and_nothing_of_an_empty_slab(
    slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        with Store(settings(slab), GEOMETRY, Metrics()) as store:
            assert recovered(store).write(sealed(PAGES[0]))
        assert "recovered" not in caplog.text
        told = threading.Event()

        def look(record: logging.LogRecord) -> bool:
            if "recovered in" in record.msg:
                told.set()
            return True

        caplog.handler.addFilter(look)
        # It serves before it tells, and one that is closed meanwhile has nothing to tell any more.
        with Store(settings(slab), GEOMETRY, Metrics()) as store:
            assert recovered(store) and told.wait(30)
    assert (
        "pages from the checkpoint 1, by scanning 0" in caplog.text
        and "could not be read" not in caplog.text
    )


def test_a_defect_while_a_slab_is_opened_leaves_it_down(
    slab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R23: nothing is said to be well that nobody could open."""

    def open_device(_: DiskSettings) -> BlockDevice:
        raise ZeroDivisionError

    with Store(settings(slab), GEOMETRY, Metrics(), open_device=open_device) as store:
        [report] = store.reports()
        assert report.state in ("down", "probing") and "the log says how" in report.reason
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("number", [errno.EFBIG, errno.ENOTBLK, errno.EWOULDBLOCK])
def test_the_kernels_log_is_not_named_where_it_tells_nothing(number: int) -> None:
    assert "dmesg" not in DiskError("allocate", Path("/s"), number).hint


def test_a_slab_without_a_folder_degrades(slab: Path) -> None:
    """R23: the store starts, misses, and says what to do."""
    with Store(settings(slab / "not" / "there"), GEOMETRY, Metrics()) as store:
        assert not store.write(sealed(PAGES[0])) and not store.contains(PAGES[0])
        assert "No such file" in store.explain(PAGES[0])


def hammer(store: Store, seed: int, failures: list[BaseException]) -> None:
    chance = random.Random(seed)
    try:
        for _ in range(250):
            page = chance.choice(PAGES)
            match chance.randrange(8):
                case 0:
                    store.drop(page, "test")
                case 1 if chance.random() < 0.1:
                    store.evict_object(page.version.object_id)
                case 2 if chance.random() < 0.05:
                    store.checkpoint()
                case 3 | 4 | 5:
                    store.write(sealed(page))
                case _:
                    read_back(store, page)
    except BaseException as failure:  # noqa: BLE001  told by the test's own thread
        failures.append(failure)


def test_many_threads_at_once(slab: Path) -> None:
    """F7, F10, F30, F43: writers, readers, evictions and checkpoints meet; no byte is wrong."""
    failures: list[BaseException] = []
    with Store(settings(slab, capacity=3 * MIB), GEOMETRY, Metrics()) as store:
        recovered(store)
        threads = [
            threading.Thread(target=hammer, args=(store, seed, failures)) for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        disk = store.disks[0]
        store.checkpoint()
        live = disk._live
        assert live.engine.live_bytes <= live.engine.capacity_bytes
        assert not any(live.engine.segments.pins), "a pin was left behind"
        assert live.engine.unwritten() == {}
        before = sorted(page.text for page in PAGES if store.contains(page))
    with Store(settings(slab, capacity=3 * MIB), GEOMETRY, Metrics()) as store:
        recovered(store)
        assert sorted(page.text for page in PAGES if read_back(store, page)) == before


def test_capacity_from_what_the_file_system_offers(slab: Path) -> None:
    """F13, F23: without a capacity the slab takes what the floor leaves, and no more."""
    free = os.statvfs(slab.parent)
    total = free.f_blocks * free.f_frsize
    taken = total - free.f_bavail * free.f_frsize
    ratio = 1 - (taken + 64 * MIB) / total
    chosen: StoreSettings = settings(slab, capacity=None, free_floor_ratio=ratio)
    with Store(chosen, GEOMETRY, Metrics()) as store:
        recovered(store)
        capacity = store.disks[0].capacity_bytes
    # Others use this file system too: anything near the 64 MiB will do.
    assert capacity < 200 * MIB
