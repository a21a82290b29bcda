"""Write-back: clients first, bounded dirty bytes, and a slow disk that slows nobody for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from racerd.ids import PageId
from tests.support.read_rig import PAGE, ReadRig, content, small_settings
from tests.support.scripted_store import ScriptedStore

PAGES = 12
DATA = content(PAGES * PAGE)


class Gate:
    """Holds writes until it is opened, and tells that one has come."""

    def __init__(self, store: ScriptedStore) -> None:
        self._open = threading.Event()
        self._arrived = threading.Semaphore(0)
        store.on_write = self._pass

    def _pass(self, _: PageId) -> None:
        self._arrived.release()
        assert self._open.wait(30)

    async def arrived(self) -> None:
        assert await asyncio.to_thread(self._arrived.acquire, timeout=20)

    def open(self) -> None:
        self._open.set()


def run(
    folder: Path, body: Callable[[ReadRig, ScriptedStore], Awaitable[None]], **settings: object
) -> None:
    async def main() -> None:
        store = ScriptedStore()
        changes = {
            "dirty_bytes": 3 * PAGE,
            "write_seconds": 0.05,
            "progress_seconds": 0.02,
            **settings,
        }
        options = {"settings": small_settings(**changes), "store": store, "pages_in_memory": 16}
        async with ReadRig(folder, **options) as rig:  # type: ignore[arg-type]
            rig.origin.put(b"k", DATA)
            await body(rig, store)

    uvloop.run(main())


def test_bytes_reach_the_client_before_any_disk(tmp_path: Path) -> None:
    """F15: a read returns while not one of its pages is written."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = Gate(store)
        assert await rig.read(rig.version(), 0, 3 * PAGE) == (
            DATA[: 3 * PAGE],
            {"origin": 3 * PAGE},
        )
        assert not store.pages
        gate.open()
        await rig.stored()
        assert sorted(page.index for page in store.pages) == [0, 1, 2]

    run(tmp_path, body)


def test_a_disk_that_makes_no_progress_loses_writes_not_reads(tmp_path: Path) -> None:
    """F15, R23, F10: the queue is full: the whole object is served; what found no room is dropped
    and counted; dirty bytes never pass their limit, and the pages are still in memory."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = Gate(store)
        assert (await rig.read(rig.version()))[0] == DATA
        await rig.flights_over()
        assert rig.services.write_back.used <= rig.services.write_back.limit
        dropped = rig.metric("racer_fallbacks_total", step="write", reason="queue_full")
        assert dropped == PAGES - 3
        assert (await rig.read(rig.version()))[1] == {"memory": len(DATA)}
        gate.open()
        await rig.stored()
        assert len(store.pages) == 3

    run(tmp_path, body)


def test_a_page_waits_for_room_while_the_disk_makes_progress(tmp_path: Path) -> None:
    """R32, F15: a slow disk gets every page, as long as it goes on: the read waits for it."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        assert (await rig.read(rig.version()))[0] == DATA
        await rig.stored()
        assert len(store.pages) == PAGES
        assert rig.metric("racer_fallbacks_total", step="write", reason="queue_full") == 0

    run(tmp_path, body, dirty_bytes=PAGE, write_seconds=30.0, progress_seconds=30.0)


def test_a_cold_read_does_not_outrun_the_disk(tmp_path: Path) -> None:
    """R32, F15: while pages wait for room the read waits too, instead of fetching what would be
    dropped; as soon as the disk goes on, so does the read."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = Gate(store)
        task = asyncio.ensure_future(rig.read(rig.version()))
        await gate.arrived()
        waiting = rig.services.write_back._waiting
        while not any(amount == 0 for amount, _ in waiting):  # noqa: ASYNC110  it has no event
            await asyncio.sleep(0.001)  # Until the reader stands in the queue, behind its pages.
        assert sum(rig.origin.fetches.values()) < PAGES / 2
        gate.open()
        assert (await task)[0] == DATA
        await rig.stored()
        assert len(store.pages) == PAGES

    run(
        tmp_path, body, dirty_bytes=PAGE, write_seconds=30.0, progress_seconds=30.0,
        request_pages=1,
    )  # fmt: skip


def test_a_failing_write_is_counted_and_forgotten(tmp_path: Path) -> None:
    """R23: the disk refuses: the page was served and is in memory; no charge and no lease stay."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        def fail(_: PageId) -> None:
            raise OSError(28, "No space left on device")

        store.on_write = fail
        assert (await rig.read(rig.version(), 0, 2 * PAGE))[0] == DATA[: 2 * PAGE]
        await rig.stored()
        assert rig.metric("racer_fallbacks_total", step="write", reason="failed") == 2
        assert rig.services.write_back.used == 0
        assert (await rig.read(rig.version(), 0, PAGE))[1] == {"memory": PAGE}

    run(tmp_path, body)


def test_a_page_waiting_for_its_disk_is_not_evicted(tmp_path: Path) -> None:
    """R7: its slots are what the disk will write."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = Gate(store)
        await rig.read(rig.version(), 0, PAGE)
        await gate.arrived()
        taken = rig.services.memory.try_reserve(0, rig.arena.slot_count - 16, PAGE)
        assert taken is not None
        assert rig.services.memory.try_reserve(0, 1, PAGE) is None
        assert rig.services.memory.contains(PageId(rig.version(), 0))
        rig.services.memory.return_slots(taken)
        gate.open()
        await rig.stored()

    run(tmp_path, body)


def test_an_evicted_page_is_not_written_afterwards(tmp_path: Path) -> None:
    """F29: eviction waits for the write that runs and stops those that are queued."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = Gate(store)
        await rig.reader.prefetch(rig.version(), 0, 0, rig.context())
        await rig.read(rig.version(), 0, 3 * PAGE)
        await gate.arrived()
        evicting = asyncio.ensure_future(rig.reader.evict("b", b"k", prefix=False))
        await asyncio.sleep(0)
        assert not evicting.done()
        gate.open()
        pages, _ = await evicting
        await rig.stored()
        assert pages == 3 and not store.pages and len(rig.services.memory) == 0

    run(tmp_path, body)


def test_what_a_running_read_fetches_is_not_kept_after_an_eviction(tmp_path: Path) -> None:
    """F29: who evicts while a page is in the air does not find it again."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        rig.origin.hold()
        reading = asyncio.ensure_future(rig.read(rig.version(), 0, PAGE))
        await rig.arrived()
        await rig.reader.evict("b", b"", prefix=True)
        rig.origin.release()
        assert (await reading)[0] == DATA[:PAGE]
        await rig.stored()
        assert not store.pages and len(rig.services.memory) == 0

    run(tmp_path, body)


def test_prefetch_waits_for_the_disk_and_reads_nothing_from_it(tmp_path: Path) -> None:
    """R32: at its end the pages are in the cache; what is there already costs no I/O."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        first = await rig.reader.prefetch(rig.version(), 0, len(DATA), rig.context())
        assert (first.bytes, first.rungs) == (len(DATA), {"origin": len(DATA)})
        assert len(store.pages) == PAGES
        rig.forget_memory()
        again = await rig.reader.prefetch(rig.version(), 0, len(DATA), rig.context())
        assert again.rungs == {"disk": len(DATA)}
        assert not store.reads and sum(rig.origin.fetches.values()) == PAGES

    run(tmp_path, body, dirty_bytes=PAGE, progress_seconds=30.0)
