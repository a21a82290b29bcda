"""Batches: pages that memory has are opened as one job, and nothing is lost where that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from racerd.errors import ResourceError
from tests.support.read_rig import FRAME, GEOMETRY, PAGE, ReadRig, content, small_settings
from tests.support.stepped_threads import SteppedThreads

PAGES = 6
DATA = content(PAGES * PAGE)


def with_rig(rig: ReadRig, work: Callable[[ReadRig], Any], data: bytes = DATA) -> None:
    """Runs `work` with the object in memory and nowhere else."""

    async def main() -> None:
        async with rig:
            rig.origin.put(b"k", data)
            assert (await rig.read(rig.version()))[0] == data
            await rig.stored()
            await work(rig)

    asyncio.run(main())


def submitted(rig: ReadRig) -> list[int]:
    """Gets the number of pieces of each job that the `open` threads are given from now on."""
    jobs: list[int] = []
    submit = rig.threads.open.submit_pieces

    def noting(pieces: Sequence[Callable[[], Any]], **more: Any) -> Any:
        jobs.append(len(pieces))
        return submit(pieces, **more)

    rig.threads.open.submit_pieces = noting  # type: ignore[method-assign]
    return jobs


def test_pages_in_memory_are_read_as_one_job(tmp_path: Path) -> None:
    """The loop's part of a warm read is paid once for all of them, and all of them are counted."""

    async def work(rig: ReadRig) -> None:
        jobs = submitted(rig)
        before = rig.metric("racer_rung_pages_total", rung="memory")
        data, rungs = await rig.read(rig.version(), 10, len(DATA) - 10)
        assert data == DATA[10:-10]
        assert rungs == {"memory": len(data)}
        assert len(jobs) == 1
        assert rig.metric("racer_rung_pages_total", rung="memory") == before + PAGES
        explained = await rig.reader.explain(rig.version(), 0, len(DATA))
        assert [page.last[0] for page in explained if page.last] == ["memory"] * PAGES

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


def test_reading_the_same_again_counts_as_a_hit(tmp_path: Path) -> None:
    """R24: eviction knows which pages are read again."""

    async def work(rig: ReadRig) -> None:
        pages = rig.services.memory.pages_of(rig.object_id())
        before = [page.hits for page in pages]
        await rig.read(rig.version())
        assert [page.hits for page in pages] == [hits + 1 for hits in before]

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


@pytest.mark.parametrize("rotten", range(PAGES))
def test_a_page_that_does_not_verify_is_read_elsewhere(tmp_path: Path, rotten: int) -> None:
    """R22: the batch fails as a whole, and the reader still gets every byte right; the one bad
    page is dropped, counted once and asked for elsewhere, the others come from memory."""

    async def work(rig: ReadRig) -> None:
        page = next(
            page
            for page in rig.services.memory.pages_of(rig.object_id())
            if page.id.index == rotten
        )
        page.slots.frames[3][17] ^= 1
        data, rungs = await rig.read(rig.version())
        assert data == DATA
        assert rungs == {"memory": (PAGES - 1) * PAGE, "origin": PAGE}
        assert rig.metric("racer_corrupt_pages_total", rung="memory", reason="corrupt_tag") == 1

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


def test_a_retired_key_is_no_reason_to_fail(tmp_path: Path) -> None:
    async def work(rig: ReadRig) -> None:
        epochs = rig.services.memory.pages_of(rig.object_id())
        rig.services.delivery._keyring = EmptyKeyring()  # type: ignore[assignment]
        data, rungs = await rig.read(rig.version())
        assert data == DATA
        assert rungs == {"origin": len(DATA)}
        assert not any(page.kept for page in epochs)

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


class EmptyKeyring:
    def get(self, epoch: int) -> None:
        return None


def test_what_waits_for_its_turn_keeps_nothing_in_memory(tmp_path: Path) -> None:
    """What is evicted meanwhile is read from where it is then."""

    async def work(rig: ReadRig) -> None:
        opening = rig.services.admission.opening
        all_of_it = opening.try_charge(opening.limit, "somebody else")
        assert all_of_it is not None
        reading = asyncio.ensure_future(rig.read(rig.version()))
        while not opening.waiting:  # noqa: ASYNC110  real loop turns
            await asyncio.sleep(0)
        assert rig.services.memory.leases == 0
        gone = rig.services.memory.pages_of(rig.object_id())[2]
        rig.services.memory.drop(gone)
        all_of_it.release()
        data, rungs = await reading
        assert data == DATA
        assert rungs == {"memory": (PAGES - 1) * PAGE, "origin": PAGE}

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


def test_a_batch_that_gets_no_turn_says_so(tmp_path: Path) -> None:
    async def work(rig: ReadRig) -> None:
        opening = rig.services.admission.opening
        with opening.try_charge(opening.limit, "somebody else") or pytest.fail("no budget"):
            with pytest.raises(ResourceError) as caught:
                await rig.read(rig.version())
            assert caught.value.code == "overloaded"
            assert rig.services.memory.leases == 0

    with_rig(ReadRig(tmp_path, disk_bytes=0, settings=small_settings(admission_seconds=0.01)), work)


@pytest.mark.parametrize("pages", [1, 2, 3, 100])
def test_no_batch_is_larger_than_a_connection_may_have(tmp_path: Path, pages: int) -> None:
    """It would wait for ever: a stuck read."""

    async def work(rig: ReadRig) -> None:
        both = [rig.read(rig.version()), rig.read(rig.version())]
        for data, _ in await asyncio.wait_for(asyncio.gather(*both), 20):
            assert data == DATA

    with_rig(ReadRig(tmp_path, disk_bytes=0, settings=small_settings(connection_pages=pages)), work)


def test_pages_of_all_rungs_in_one_read(tmp_path: Path) -> None:
    async def work(rig: ReadRig) -> None:
        for page in rig.services.memory.pages_of(rig.object_id()):
            if page.id.index in (2, 3):
                rig.services.memory.drop(page)
        data, rungs = await rig.read(rig.version())
        assert data == DATA
        assert rungs == {"memory": 4 * PAGE, "disk": 2 * PAGE}

    with_rig(ReadRig(tmp_path), work)


def test_small_parts_stay_on_the_loop(tmp_path: Path) -> None:
    """Two small parts of neighbours are not worth a thread."""

    async def work(rig: ReadRig) -> None:
        jobs = submitted(rig)
        data, _ = await rig.read(rig.version(), PAGE - 100, PAGE + 100)
        assert data == DATA[PAGE - 100 : PAGE + 100]
        assert jobs == []

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


def test_turns_are_longer_where_there_is_much_to_do(tmp_path: Path) -> None:
    async def work(rig: ReadRig) -> None:
        jobs = submitted(rig)
        await rig.read(rig.version(), 0, PAGE)
        assert jobs == [GEOMETRY.frames_per_page // 4]
        await rig.read(rig.version())
        assert jobs[1:] == [PAGES * GEOMETRY.frames_per_page // 8]

    with_rig(ReadRig(tmp_path, disk_bytes=0), work)


def test_cancelling_while_pages_are_opened_waits_for_the_threads(tmp_path: Path) -> None:
    """R7: when the read has ended nobody writes to its memory, and no page is held."""

    async def main() -> None:
        rig = ReadRig(tmp_path, disk_bytes=0, chance=random.Random(3))
        async with rig:
            rig.origin.put(b"k", DATA)
            pools = [rig.threads.open, rig.threads.disk, rig.threads.origin]
            stepped = [pool for pool in pools if isinstance(pool, SteppedThreads)]
            first = asyncio.ensure_future(rig.read(rig.version()))
            while not first.done() or any(pool.busy for pool in stepped):
                for pool in stepped:
                    pool.step()
                await asyncio.sleep(0)
            opening = stepped[0]
            destination = bytearray(b"\xaa" * len(DATA))
            reading = asyncio.ensure_future(
                rig.reader.read_into(
                    rig.version(), 0, len(DATA), memoryview(destination), rig.context()
                )
            )
            while not opening.busy:  # noqa: ASYNC110  real loop turns
                await asyncio.sleep(0)
            opening.start_one()
            for _ in range(3):
                reading.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not reading.done()
                assert rig.services.memory.leases == PAGES
            opening.end_one()
            with pytest.raises(asyncio.CancelledError):
                await reading
            left = bytes(destination)
            assert left.count(0xAA) > len(DATA) - 10 * FRAME  # One piece ran, and no other.
            assert rig.services.memory.leases == 0
            while opening.step():  # noqa: ASYNC110  real loop turns
                await asyncio.sleep(0)
            assert destination == left

    asyncio.run(main())
