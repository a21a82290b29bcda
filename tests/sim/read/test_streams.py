"""Plain streams: in order, verified, bounded, and gone when they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RacerError
from racerd.ids import ObjectVersion, PageId
from tests.support.read_rig import FRAME, PAGE, ReadRig, content, small_settings
from tests.support.scripted_origin import version_changed
from tests.support.scripted_store import ScriptedStore

DATA = content(6 * PAGE + 321)


def run(
    folder: Path,
    body: Callable[[ReadRig], Awaitable[None]],
    *,
    pages_in_memory: int = 16,
    store: ScriptedStore | None = None,
    **settings: object,
) -> None:
    async def main() -> None:
        rig = ReadRig(
            folder,
            settings=small_settings(**settings),
            pages_in_memory=pages_in_memory,
            store=store,
        )
        async with rig:
            rig.origin.put(b"k", DATA)
            await body(rig)

    uvloop.run(main())


async def stream(rig: ReadRig, start: int, stop: int, **context: object) -> bytes:
    chunks = rig.reader.stream(rig.version(), start, stop, rig.context(**context))  # type: ignore[arg-type]
    return b"".join([bytes(chunk) async for chunk in chunks])


SPANS = [(0, len(DATA)), (0, 0), (1, 2), (PAGE - 1, PAGE + 1), (FRAME + 3, 5 * PAGE - 7)]


@pytest.mark.parametrize("span", SPANS)
def test_bytes_come_in_order_from_every_rung(tmp_path: Path, span: tuple[int, int]) -> None:
    """R3: cold, from memory and from disk, any range, cut as it may be."""

    async def body(rig: ReadRig) -> None:
        assert await stream(rig, *span) == DATA[slice(*span)]
        assert await stream(rig, *span) == DATA[slice(*span)]
        await rig.stored()
        rig.forget_memory()
        assert await stream(rig, *span) == DATA[slice(*span)]
        assert all(count == 1 for count in rig.origin.fetches.values())

    run(tmp_path, body)


def test_an_empty_object_asks_the_origin_for_nothing(tmp_path: Path) -> None:
    """F50: size 0 is answered here."""

    async def body(rig: ReadRig) -> None:
        rig.origin.put(b"empty", b"")
        version = rig.version(b"empty")
        assert [chunk async for chunk in rig.reader.stream(version, 0, 0, rig.context())] == []
        assert await rig.read(version) == (b"", {})
        report = await rig.reader.prefetch(version, 0, 0, rig.context())
        assert (report.bytes, report.rungs) == (0, {})
        assert await rig.reader.explain(version, 0, 0) == []
        assert not rig.origin.fetches

    run(tmp_path, body)


def test_a_slow_consumer_holds_a_bounded_amount(tmp_path: Path) -> None:
    """L50: what a stream holds does not grow with the object, nor with the time."""

    async def body(rig: ReadRig) -> None:
        chunks = rig.reader.stream(rig.version(), 0, len(DATA), rig.context())
        got = bytes(await anext(chunks))
        await rig.stored()
        admission = rig.services.admission
        assert admission.streams.used <= 4 * 4 * FRAME
        # Three pages were asked for; they are kept by now, so that no plaintext is held.
        assert admission.plaintext.used == 0
        assert sum(rig.origin.fetches.values()) == 3
        async for chunk in chunks:
            got += bytes(chunk)
        assert got == DATA

    run(tmp_path, body)


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_stream_that_is_left_leaves_nothing(tmp_path: Path, taken: int) -> None:
    """R7: closing returns when nothing runs or is charged; the rig checks."""

    async def body(rig: ReadRig) -> None:
        chunks = rig.reader.stream(rig.version(), 0, len(DATA), rig.context())
        for _ in range(taken):
            await anext(chunks)
        await chunks.aclose()
        assert rig.services.admission.streams.used == 0
        assert rig.services.admission.opening.used == 0

    run(tmp_path, body)


def test_a_cancelled_stream_cancels_its_fetches(tmp_path: Path) -> None:
    """R7: a consumer that goes away while the stream waits takes the origin calls along."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        task = asyncio.ensure_future(stream(rig, 0, len(DATA)))
        await rig.arrived(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await rig.reader._strays.close()
        assert rig.origin.running == 0 and len(rig.services.flights) == 0

    run(tmp_path, body)


def test_a_page_that_is_not_kept_is_fetched_once(tmp_path: Path) -> None:
    """R32: no room in memory, no disk: a stream of many chunks still asks once for each page."""

    async def body(rig: ReadRig) -> None:
        slots = rig.services.memory.try_reserve(0, rig.arena.free_slots, PAGE)
        assert slots is not None
        assert await stream(rig, 0, len(DATA)) == DATA
        assert len(rig.origin.fetches) == 7
        assert set(rig.origin.fetches.values()) == {1}
        rig.services.memory.return_slots(slots)

    run(tmp_path, body, pages_in_memory=1, progress_seconds=0.001)


def test_streams_that_keep_nothing_do_not_block_each_other(tmp_path: Path) -> None:
    """Many streams, no room to keep a page, plaintext for two: they give way and all end."""

    async def body(rig: ReadRig) -> None:
        slots = rig.services.memory.try_reserve(0, rig.arena.free_slots, PAGE)
        assert slots is not None
        streams = [stream(rig, i, len(DATA), connection=str(i)) for i in range(8)]
        for number, got in enumerate(await asyncio.gather(*streams)):
            assert got == DATA[number:]
        rig.services.memory.return_slots(slots)

    run(tmp_path, body, pages_in_memory=1, plaintext_bytes=int(2.7 * PAGE), progress_seconds=0.001)


def test_streams_share_scarce_scratch(tmp_path: Path) -> None:
    """More streams than chunks of scratch: each goes on with one chunk at a time."""

    async def body(rig: ReadRig) -> None:
        streams = [stream(rig, i, len(DATA), connection=str(i)) for i in range(12)]
        for number, got in enumerate(await asyncio.gather(*streams)):
            assert got == DATA[number:]

    run(tmp_path, body, plaintext_bytes=4 * PAGE, stream_chunk_bytes=PAGE)


def test_what_was_yielded_before_a_failure_is_good(tmp_path: Path) -> None:
    """R3, F59: the failure comes instead of bytes, never after bad ones; the change is noted."""

    async def body(rig: ReadRig) -> None:
        version = rig.version()
        deadline = rig.context().deadline
        await rig.reader.resolve(version.object_id, if_match=None, deadline=deadline)

        def change(changed, start, stop):  # type: ignore[no-untyped-def]
            if start >= 4 * PAGE:
                raise version_changed(changed)

        rig.origin.on_fetch = change
        got = bytearray()

        async def take() -> None:
            async for chunk in rig.reader.stream(version, 0, len(DATA), rig.context()):
                got.extend(chunk)

        with pytest.raises(RacerError) as caught:
            await take()
        assert caught.value.code == "version_changed"
        assert DATA.startswith(got) and len(got) == 4 * PAGE
        rig.origin.on_fetch = None
        await rig.reader.resolve(version.object_id, if_match=None, deadline=deadline)
        assert rig.origin.heads[b"k"] == 2

    run(tmp_path, body)


def test_a_rotten_page_in_a_stream_is_fetched_again(tmp_path: Path) -> None:
    """R22, L39."""
    store = ScriptedStore()

    async def body(rig: ReadRig) -> None:
        assert await stream(rig, 0, len(DATA)) == DATA
        await rig.stored()
        rig.forget_memory()
        for index in (0, 3):
            store.rot(PageId(rig.version(), index), 9)
        assert await stream(rig, 0, len(DATA)) == DATA
        assert rig.origin.fetches[b"k", 0] == rig.origin.fetches[b"k", 3 * PAGE] == 2

    run(tmp_path, body, store=store)


def test_a_huge_object_costs_nothing_to_begin(tmp_path: Path) -> None:
    """L50: a stream plans as it goes: what it holds does not grow with the object."""

    async def body(rig: ReadRig) -> None:
        version = ObjectVersion(rig.object_id(), '"v1"', 1 << 50)
        rig.origin.hold()
        chunks = rig.reader.stream(version, 0, version.size, rig.context())
        task = asyncio.ensure_future(anext(chunks))
        await rig.arrived(3)
        task.cancel()
        await asyncio.wait([task])
        await chunks.aclose()
        report = await rig.reader.explain(version, 0, 3 * PAGE)
        assert [page.rung for page in report] == ["origin"] * 3

    run(tmp_path, body)
