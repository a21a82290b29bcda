"""What a slab in a real file comes back with: capacity, checkpoints, formats, progress."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from racerd.ids import PageId
from racerd.store import DiskSettings, Store
from racerd.store.device import BlockDevice
from racerd.store.file_device import FileDevice, open_file_device
from racerd.store.geometry import BLOCK_BYTES, FRONT_BYTES, SUPERBLOCK_OFFSETS
from racerd.store.record import HEADER_BYTES_MAX
from racerd.telemetry import Metrics
from racerd.units import MIB
from tests.support.store_pages import GEOMETRY, counted, read_back, sealed, settings, version
from tools.torture.damage import geometry_of, lose_checkpoints

PAGES = [PageId(version(b"big"), index) for index in range(100)] + [
    PageId(version(b"small/%d" % number, size=number * 777 + 1), 0) for number in range(60)
]
PLENTY = 16 * MIB


@pytest.fixture
def slab() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="racer-recovery-", dir="/var/tmp"))
    yield folder / "slab"
    shutil.rmtree(folder)


def wait_recovered(store: Store) -> None:
    pause = threading.Event()
    while store.recovering:
        pause.wait(0.002)


class Opened:
    """A store on the slab, recovered."""

    def __init__(self, slab: Path, capacity: int = PLENTY) -> None:
        self.metrics = Metrics()
        self.store = Store(settings(slab, capacity=capacity), GEOMETRY, self.metrics)

    def __enter__(self) -> Opened:
        self.store.__enter__()
        wait_recovered(self.store)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    @property
    def found(self) -> list[PageId]:
        return [page for page in PAGES if read_back(self.store, page)]


def fill(slab: Path) -> None:
    with Opened(slab) as opened:
        assert all(opened.store.write(sealed(page)) for page in PAGES)


def test_capacity_shrinks_and_grows_and_what_fits_is_kept(slab: Path) -> None:
    """F3, F42: in a file; the file itself shrinks, and no page comes back that was cut off."""
    fill(slab)
    with Opened(slab, 5 * MIB) as opened:
        kept = opened.found
        assert 20 < len(kept) < len(PAGES)
        assert opened.store.disks[0].live_bytes <= 5 * MIB
    assert slab.stat().st_size <= 5 * MIB
    for capacity in (9 * MIB, 24 * MIB):
        with Opened(slab, capacity) as opened:
            assert opened.found == kept
            assert opened.store.disks[0].capacity_bytes == capacity
    with Opened(slab, 24 * MIB) as opened:
        assert all(opened.store.write(sealed(page)) for page in PAGES)
        assert opened.found == PAGES
        assert counted(opened.metrics, "racer_corrupt_pages_total") == 0


@pytest.mark.parametrize("how", ["zeroed", "damaged", "both headers damaged"])
def test_without_any_checkpoint_every_page_is_found(slab: Path, how: str) -> None:
    """R23: whatever became of both checkpoints; told by the progress and the metrics."""
    fill(slab)
    if how == "zeroed":
        lose_checkpoints(slab)
    else:
        geometry = geometry_of(slab)
        with slab.open("r+b") as file:
            for number in (0, 1):
                behind = 24 if how == "both headers damaged" else 4096 + 40
                file.seek(geometry.checkpoint_offset(number) + behind)
                file.write(b"rotten")
    with Opened(slab) as opened:
        assert opened.found == PAGES
        progress = opened.store.disks[0].progress
        assert (progress.pages_from_checkpoint, progress.pages_from_scan) == (0, len(PAGES))
        assert progress.segments_done == progress.segments_total
        pages = "racer_store_recovery_pages"
        assert counted(opened.metrics, pages, source="scan") == len(PAGES)
        assert counted(opened.metrics, "racer_store_recovery_seconds") > 0


class Observed(FileDevice):
    """Counts what is read; what `holds` says waits for the gate before it is read."""

    bytes_read = 0

    @staticmethod
    def holds(offset: int) -> bool:
        return False

    gate = threading.Event()

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        if self.holds(offset):
            self.gate.wait()
        got = super().read(offset, buffers)
        self.bytes_read += got
        return got


def observed(slab: Path, metrics: Metrics) -> Store:
    def open_observed(disk: DiskSettings) -> BlockDevice:
        device = open_file_device(disk.path)
        device.__class__ = Observed
        return device

    chosen = settings(slab, capacity=PLENTY)
    return Store(chosen, GEOMETRY, metrics, open_device=open_observed)


def test_a_scan_reads_headers_and_no_pages(slab: Path) -> None:
    """R23: what recovery costs without a checkpoint is bounded by the number of records."""
    fill(slab)
    lose_checkpoints(slab)
    with observed(slab, Metrics()) as store:
        wait_recovered(store)
        geometry = store.disks[0]._live.slab.geometry
        device = store.disks[0]._live.slab.device
        records = len(PAGES) * HEADER_BYTES_MAX
        # What is left at a segment's end, and the rest of the open one, is searched for records.
        ends = geometry.segment_count * (2 * BLOCK_BYTES + geometry.full_record_bytes)
        areas = FRONT_BYTES + 2 * geometry.checkpoint_bytes
        assert device.bytes_read <= records + ends + geometry.segment_bytes + areas
        assert device.bytes_read < store.disks[0].live_bytes / 2


def test_serving_starts_before_recovery_ends(slab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R23, F3: the scan stands still half-way; what it found is served meanwhile, and said."""
    fill(slab)
    lose_checkpoints(slab)
    geometry = geometry_of(slab)
    middle = geometry.segment_offset(geometry.segment_count // 3)
    metrics = Metrics()
    store = observed(slab, metrics)
    gate = threading.Event()
    waiting = threading.Event()

    def holds(offset: int) -> bool:
        scanning = store.disks[0].progress.state == "scanning segments"
        mine = threading.current_thread().name.startswith("store ")
        if mine and scanning and offset >= middle:
            waiting.set()
            return True
        return False

    monkeypatch.setattr(Observed, "holds", staticmethod(holds))
    monkeypatch.setattr(Observed, "gate", gate)
    with store:
        try:
            assert waiting.wait(30)
            served = [page for page in PAGES if read_back(store, page)]
            assert store.recovering and 0 < len(served) < len(PAGES)
            scanned = counted(metrics, "racer_store_recovery_pages", source="scan")
            assert scanned == len(served)
            assert counted(metrics, "racer_store_recovering") == 1
            assert "recovering (scanning segments)" in store.reports()[0].troubles[0]
        finally:
            gate.set()
        wait_recovered(store)
        assert all(read_back(store, page) for page in PAGES)


def test_a_newer_format_is_left_alone_to_the_byte(slab: Path) -> None:
    """F35: a clear message, what to do, and not one byte of the file is changed."""
    fill(slab)
    with slab.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset + 16)
            file.write(b"\x09")
    before = hashlib.sha256(slab.read_bytes()).digest()
    with Opened(slab) as opened:
        assert opened.found == [] and not opened.store.write(sealed(PAGES[0]))
        assert "has a newer format than this racerd knows" in opened.store.explain(PAGES[1])
        (report,) = opened.store.reports()
        assert report.state == "down" and "newer format" in report.troubles[0]
        assert counted(opened.metrics, "racer_store_state", state="down") == 1
    assert hashlib.sha256(slab.read_bytes()).digest() == before


def test_one_damaged_superblock_after_the_other(slab: Path) -> None:
    """R23: each start renews the copy that is damaged."""
    fill(slab)
    for offset in (*SUPERBLOCK_OFFSETS, SUPERBLOCK_OFFSETS[0]):
        with slab.open("r+b") as file:
            file.seek(offset)
            file.write(b"x" * 100)
        with Opened(slab) as opened:
            assert opened.found == PAGES


def test_a_file_that_was_cut_short_loses_only_its_end(slab: Path) -> None:
    """F5, F11: also its checkpoints are gone then; what is left is found and the rest refilled."""
    fill(slab)
    with slab.open("r+b") as file:
        file.truncate(slab.stat().st_size // 3)
    with Opened(slab) as opened:
        kept = opened.found
        assert 0 < len(kept) < len(PAGES)
        assert all(opened.store.write(sealed(page)) for page in PAGES)
        assert opened.found == PAGES
