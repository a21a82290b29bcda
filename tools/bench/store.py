"""What the store's index costs: memory, lookups, a checkpoint, and recovery from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import PageGeometry
from racerd.store import DiskSettings, Store, StoreSettings
from racerd.store.buffers import aligned_buffer
from racerd.store.checkpoint import compose, encode, freeze, write_checkpoint
from racerd.store.claims import Prepare, Reservation
from racerd.store.engine import Engine
from racerd.store.file_device import open_file_device
from racerd.store.geometry import BLOCK_BYTES, SlabGeometry
from racerd.store.segments import SegmentState
from racerd.store.slab import Slab, open_slab
from racerd.store.superblock import encode_segment_header
from racerd.telemetry import Metrics
from racerd.units import GIB, MIB
from tools.bench.report import Figure

PAGES = 250_000
PAGES_PER_VERSION = 100
_LOOKUPS = 20_000


def index_figures(folder: Path) -> list[Figure]:
    """Makes a slab of 250,000 pages of 16 MiB in `folder`: a sparse file that takes some MiB."""
    page = PageGeometry()
    settings = StoreSettings(
        (DiskSettings(folder / "index-slab", (PAGES + PAGES // 50) * page.page_bytes),), 0.0
    )
    device = open_file_device(settings.disks[0].path)
    slab = open_slab(device, settings.disks[0], settings, page)
    engine = _filled(slab, _pages(PAGES // PAGES_PER_VERSION, PAGES_PER_VERSION))
    seconds_locked = statistics.median(_seconds(lambda: freeze(engine)) for _ in range(9))
    data = encode(compose(freeze(engine), 1), slab.id)
    seconds_write = _seconds(lambda: write_checkpoint(device, slab.geometry, data, 0))
    device.close()
    figures = [
        Figure(
            "index memory per page", engine.index.nbytes / PAGES, "B", "< 100",
            f"{PAGES} pages of {PAGES // PAGES_PER_VERSION} objects; names included",
        ),
        _one_page_objects(),
        _lookup(engine),
        Figure("checkpoint: lock held", 1000 * seconds_locked, "ms", "< 10"),
        Figure("checkpoint: written", 1000 * seconds_write, "ms", "", f"{len(data) / MIB:.1f} MiB"),
        _recovery(settings, page),
    ]  # fmt: skip
    settings.disks[0].path.unlink()
    return figures


def _pages(versions: int, pages: int) -> Iterable[PageId]:
    for number in range(versions):
        key = b"models/meta-llama/Llama-3.1-405B-Instruct/model-%05d.safetensors" % number
        version = ObjectVersion(
            ObjectId("models", "hub", key), f'"{number:032x}"', pages * 16 * MIB
        )
        for index in range(pages):
            yield PageId(version, index)


def _filled(slab: Slab, pages: Iterable[PageId]) -> Engine:
    """An engine that holds `pages`, whose segments have headers on the medium."""
    engine = _empty(slab.geometry)
    block = aligned_buffer(BLOCK_BYTES)
    for page in pages:
        answer = engine.reserve(page, slab.geometry.page.page_bytes)
        while isinstance(answer, Prepare):
            offset = slab.geometry.segment_offset(answer.segment)
            encode_segment_header(
                block, slab=slab.id, segment=answer.segment, generation=answer.generation,
                offset=offset,
            )  # fmt: skip
            slab.device.write(offset, [block])
            engine.prepared(answer)
            answer = engine.reserve(page, slab.geometry.page.page_bytes)
        assert isinstance(answer, Reservation)
        engine.commit(answer)
    return engine


def _empty(geometry: SlabGeometry) -> Engine:
    engine = Engine(geometry)
    for segment in range(geometry.segment_count):
        engine.settle(segment, SegmentState.FRESH, 0, 0)
    engine.recovered()
    return engine


def _one_page_objects() -> Figure:
    """The worst case: every page has a name of its own."""
    count = PAGES // 10
    engine = _empty(SlabGeometry.plan(PageGeometry(), 1024 * GIB))
    for page in _pages(count, 1):
        answer = engine.reserve(page, 4096)
        while isinstance(answer, Prepare):
            engine.prepared(answer)
            answer = engine.reserve(page, 4096)
        assert isinstance(answer, Reservation)
        engine.commit(answer)
    return Figure(
        "index memory per page, one-page objects", engine.index.nbytes / count, "B", "",
        "names of 150 bytes included",
    )  # fmt: skip


def _lookup(engine: Engine) -> Figure:
    pages = list(_pages(_LOOKUPS // PAGES_PER_VERSION, PAGES_PER_VERSION))
    seconds = _seconds(lambda: [engine.contains(page) for page in pages])
    return Figure("index lookup", 1e6 * seconds / len(pages), "us", "< 50", "on the event loop")


def _recovery(settings: StoreSettings, page: PageGeometry) -> Figure:
    """From opening the slab to the last segment settled."""
    started = time.perf_counter()
    with Store(settings, page, Metrics()) as store:
        while store.recovering:
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        found = store.disks[0].page_count
    assert found == PAGES, f"{found} of {PAGES} pages were recovered"
    return Figure("recovery of 250,000 pages", seconds, "s", "< 2", "from a checkpoint")


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
