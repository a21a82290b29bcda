"""A failure at each rung: the next one serves, the bytes are right, the reason is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.crypto.keyring import drop_epoch, rotate_key_file
from racerd.errors import RacerError
from racerd.ids import PageId
from tests.support.read_rig import FRAME, PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import unavailable
from tests.support.scripted_store import ScriptedStore
from tests.support.v1_pages import seal_as_one_frame

DATA = content(2 * PAGE + 100)


def run(folder: Path, body: Callable[[ReadRig, ScriptedStore], Awaitable[None]], **options) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        store = ScriptedStore()
        async with ReadRig(folder, store=store, **options) as rig:
            rig.origin.put(b"k", DATA)
            await rig.read(rig.version())
            await rig.stored()
            rig.forget_memory()
            rig.origin.fetches.clear()
            await body(rig, store)

    uvloop.run(main())


def page(rig: ReadRig, index: int = 0) -> PageId:
    return PageId(rig.version(), index)


def test_a_disk_page_serves_and_moves_to_memory(tmp_path: Path) -> None:
    """R32, F2: no origin call while a disk has it; once read whole it is in memory."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        assert await rig.read(rig.version()) == (DATA, {"disk": len(DATA)})
        assert await rig.read(rig.version()) == (DATA, {"memory": len(DATA)})
        assert not rig.origin.fetches
        assert store.reads == {(0, 0, 16): 1, (1, 0, 16): 1, (2, 0, 1): 1}

    run(tmp_path, body)


def test_a_small_read_takes_its_frames_only(tmp_path: Path) -> None:
    """A cut frame of a page on disk costs that frame; reading on brings in the whole page."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        start = 5 * FRAME + 7
        assert (await rig.read(rig.version(), start, start + 10))[0] == DATA[start : start + 10]
        assert store.reads == {(0, 5, 1): 1}
        assert not rig.services.memory.contains(page(rig))
        for at in range(0, PAGE, FRAME):
            got, rungs = await rig.read(rig.version(), at, at + FRAME)
            assert got == DATA[at : at + FRAME] and "origin" not in rungs
        assert rig.services.memory.contains(page(rig))
        assert sum(store.reads.values()) <= 6  # A quarter of the frames, then the page.

    run(tmp_path, body)


def test_readers_of_the_same_frames_share_one_disk_read(tmp_path: Path) -> None:
    """F30: joining works for parts of pages as for pages."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        reads = [rig.read(rig.version(), 10 + i, 20 + i) for i in range(8)]
        for number, (got, _) in enumerate(await asyncio.gather(*reads)):
            assert got == DATA[10 + number : 20 + number]
        assert store.reads == {(0, 0, 1): 1}

    run(tmp_path, body)


@pytest.mark.parametrize("span", [(0, PAGE), (7, 70)])
@pytest.mark.parametrize("damage", ["rot", "tear"])
def test_a_bad_page_on_disk_is_fetched_again(
    tmp_path: Path, damage: str, span: tuple[int, int]
) -> None:
    """R22, F5, L39: found by CRC or tag, counted, dropped, fetched, written anew."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        getattr(store, damage)(page(rig))
        got, rungs = await rig.read(rig.version(), *span)
        assert got == DATA[slice(*span)] and rungs == {"origin": span[1] - span[0]}
        if damage == "rot":
            assert store.drops == {(0, "corrupt_tag"): 1}
            assert rig.metric("racer_corrupt_pages_total", rung="disk", reason="corrupt_tag") == 1
        await rig.stored()
        seal, frames = store.pages[page(rig)]
        assert len(frames) == 16 and seal.length == PAGE
        assert rig.origin.fetches == {(b"k", 0): 1}

    run(tmp_path, body)


def test_many_readers_of_a_bad_page_make_one_request(tmp_path: Path) -> None:
    """R22, R32: all find it bad; the page is fetched once."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        store.rot(page(rig))
        for got, _ in await asyncio.gather(*[rig.read(rig.version(), 0, PAGE) for _ in range(9)]):
            assert got == DATA[:PAGE]
        assert rig.origin.fetches == {(b"k", 0): 1}

    run(tmp_path, body)


def test_who_finds_nothing_joins_who_found_it_bad(tmp_path: Path) -> None:
    """R22, R32: once the bad copy is gone, repair and ordinary miss are one acquisition."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        store.rot(page(rig))
        rig.origin.hold()
        repair = asyncio.ensure_future(rig.read(rig.version(), 0, PAGE))
        await rig.arrived()
        assert not store.contains(page(rig))
        miss = asyncio.ensure_future(rig.read(rig.version(), 5, 50))
        for _ in range(5):
            await asyncio.sleep(0)
        rig.origin.release()
        assert ((await repair)[0], (await miss)[0]) == (DATA[:PAGE], DATA[5:50])
        assert rig.origin.fetches == {(b"k", 0): 1}

    run(tmp_path, body)


def test_a_bad_page_in_memory_is_read_from_disk(tmp_path: Path) -> None:
    """R16, R22: memory holds ciphertext, and does not trust it either."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        await rig.read(rig.version())
        lease = rig.services.memory.lease(page(rig))
        assert lease is not None
        lease.page.slots.frames[3][9] ^= 1
        lease.release()
        assert bytes(lease.page.slots.frames[0][:16]) != DATA[:16]
        got, rungs = await rig.read(rig.version(), 0, PAGE)
        assert got == DATA[:PAGE] and rungs == {"disk": PAGE}
        assert not rig.origin.fetches and not store.drops
        assert rig.metric("racer_corrupt_pages_total", rung="memory", reason="corrupt_tag") == 1

    run(tmp_path, body)


def test_corrupt_is_told_only_when_every_rung_failed(tmp_path: Path) -> None:
    """R22: the error names the causes; no unverified byte is left in the destination."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        store.rot(page(rig))
        await rig.read(rig.version(), PAGE, 2 * PAGE)

        def down(*_: object) -> None:
            raise unavailable()

        rig.origin.on_fetch = down
        buffer = bytearray(b"\xaa" * PAGE)
        with pytest.raises(RacerError) as caught:
            await rig.reader.read_into(rig.version(), 0, PAGE, memoryview(buffer), rig.context())
        assert caught.value.code == "corrupt"
        assert "frame 0 does not verify" in caught.value.message
        assert "the origin is down" in caught.value.message
        assert all(got in (good, 0, 0xAA) for got, good in zip(buffer, DATA, strict=False))
        assert buffer[: 4 * FRAME] == bytes(4 * FRAME)  # The run of frames that failed.

    run(tmp_path, body)


def test_a_disk_that_fails_is_passed_by(tmp_path: Path) -> None:
    """R23, F18: EIO is no answer; the origin serves, the reason is counted."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        def fail(_: PageId) -> None:
            raise OSError(5, "Input/output error")

        store.on_read = fail
        assert await rig.read(rig.version()) == (DATA, {"origin": len(DATA)})
        assert rig.metric("racer_fallbacks_total", step="disk", reason="failed") == 3

    run(tmp_path, body)


def test_a_disk_that_hangs_is_passed_by_and_comes_back(tmp_path: Path) -> None:
    """R7, R23, F18: the read goes to the origin after `disk_seconds`; the slots of the call that
    hangs stay taken until it returns; then the disk is asked again."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = threading.Event()
        store.on_read = lambda _: gate.wait(30) and None
        used = rig.arena.slot_count - rig.arena.free_slots
        got, rungs = await rig.read(rig.version(), 0, PAGE)
        assert got == DATA[:PAGE] and rungs == {"origin": PAGE}
        assert rig.metric("racer_fallbacks_total", step="disk", reason="slow") == 1
        await rig.services.flights.close_cache("cache")
        assert len(rig.services.strays) == 1
        assert rig.arena.slot_count - rig.arena.free_slots >= used + 16
        assert rig.services.disk._overdue == 1
        gate.set()
        await rig.services.strays.close()
        assert rig.services.disk._overdue == 0
        store.on_read = None
        assert (await rig.read(rig.version(), PAGE, 2 * PAGE))[1] == {"disk": PAGE}

    run(tmp_path, body, settings=small_settings(disk_seconds=0.05))


def test_while_a_disk_hangs_pages_do_not_queue_for_it(tmp_path: Path) -> None:
    """F18: one page at a time tries; the others go on to the origin at once."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        gate = threading.Event()
        store.on_read = lambda _: gate.wait(30) and None
        await rig.read(rig.version(), 0, PAGE)
        got, _ = await rig.read(rig.version())
        assert got == DATA
        assert rig.metric("racer_fallbacks_total", step="disk", reason="stuck") >= 1
        gate.set()

    run(tmp_path, body, settings=small_settings(disk_seconds=0.05))


def test_a_reader_leaves_a_disk_that_hangs(tmp_path: Path) -> None:
    """R7: cancelling returns at once, because the disk writes to the flight's slots, not to the
    reader's memory; the slots come back when the call has returned."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        arrived, gate = threading.Event(), threading.Event()

        def hang(_: PageId) -> None:
            arrived.set()
            gate.wait(30)

        store.on_read = hang
        task = asyncio.ensure_future(rig.read(rig.version(), 0, PAGE))
        assert await asyncio.to_thread(arrived.wait, 20)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert rig.arena.free_slots == rig.arena.slot_count - 16
        gate.set()
        await rig.services.strays.close()
        assert rig.arena.free_slots == rig.arena.slot_count

    run(tmp_path, body)


def test_a_page_that_cannot_be_kept_is_served(tmp_path: Path) -> None:
    """R23: every slot is in use: the origin's bytes reach the reader, nothing is kept."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        store.pages.clear()
        slots = rig.services.memory.try_reserve(0, rig.arena.free_slots, PAGE)
        assert slots is not None
        assert await rig.read(rig.version()) == (DATA, {"origin": len(DATA)})
        await rig.flights_over()
        rig.services.memory.return_slots(slots)
        assert rig.metric("racer_fallbacks_total", step="memory", reason="no_frames") == 3
        assert len(rig.services.memory) == 0

    run(tmp_path, body, settings=small_settings(progress_seconds=0.02))


def test_a_removed_key_is_a_miss(tmp_path: Path) -> None:
    """R22: pages sealed under an epoch that is gone are fetched again, not called corrupt."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        await rig.read(rig.version(), 0, PAGE)  # In memory, its opener made.
        old = rig.keyring.active.epoch
        rotate_key_file(rig.folder / "keys")
        drop_epoch(rig.folder / "keys", old)
        assert rig.keyring.reload()
        assert await rig.read(rig.version()) == (DATA, {"origin": len(DATA)})
        assert rig.metric("racer_corrupt_pages_total", rung="memory", reason="key_retired") == 0
        assert rig.metric("racer_fallbacks_total", step="memory", reason="key_retired") == 1
        assert rig.metric("racer_fallbacks_total", step="disk", reason="key_retired") == 3

    run(tmp_path, body)


@pytest.mark.parametrize("span", [(0, PAGE), (100, PAGE - 100), (3, 5)])
def test_a_page_of_one_frame_is_read_whole(tmp_path: Path, span: tuple[int, int]) -> None:
    """R20: what a disk keeps in format v1 has one tag for the page: no part of it is read alone."""

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        seal_as_one_frame(rig, store, page(rig), DATA[:PAGE])
        got, rungs = await rig.read(rig.version(), *span)
        assert got == DATA[slice(*span)] and rungs == {"disk": span[1] - span[0]}
        assert store.reads == {(0, 0, 16): 1}

    run(tmp_path, body)


def test_no_view_of_a_destination_is_left(tmp_path: Path) -> None:
    """R7: a mapping can be closed as soon as its read ended, whether it failed or not."""
    import mmap

    async def body(rig: ReadRig, store: ScriptedStore) -> None:
        store.rot(page(rig))
        rig.origin.on_fetch = lambda *_: (_ for _ in ()).throw(unavailable())
        mapping = mmap.mmap(-1, PAGE)
        view = memoryview(mapping)
        caught = None
        try:
            await rig.reader.read_into(rig.version(), 0, PAGE, view, rig.context())
        except RacerError as error:
            caught = error
        assert caught is not None and caught.code == "corrupt"
        view.release()
        mapping.close()  # BufferError, if the error's traceback had kept a view.

    run(tmp_path, body)
