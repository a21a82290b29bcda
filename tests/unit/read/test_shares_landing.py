"""Pages of an origin that land in the memory that is shared: no copy, and no charge lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from racerd.errors import RequestError
from racerd.ids import PageId
from racerd.read.sources import Place
from racerd.runtime.memory_map import HUGE_PAGE_BYTES
from racerd.runtime.shared_memory import SharedMemory
from racerd.units import KIB, MIB
from tests.support.read_rig import ReadRig, content, small_settings, taken


async def until(holds: Callable[[], bool]) -> None:
    """Lets the loop go on until it holds: what is waited for tells nobody."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


def places_of(rig: ReadRig) -> list[bool]:
    """Whether each fetch from now on is given a place; filled as they come."""
    found: list[bool] = []
    fetch = rig.origin.fetch

    def noting(*args: Any, room: memoryview | None = None, **options: Any) -> memoryview:
        found.append(room is not None)
        return fetch(*args, room=room, **options)

    rig.origin.fetch = noting  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("uses_rooms", [True, False])
def test_pages_of_an_origin_land_where_they_are_shared(tmp_path: Path, uses_rooms: bool) -> None:
    """R5, R21: they are not copied there; others of the flight, and the cache, get them, too."""
    data = content(2 * 64 * KIB + 100)

    async def main() -> None:
        async with ReadRig(tmp_path, settings=small_settings(share_bytes=64 * MIB)) as rig:
            rig.origin.put(b"k", data)
            rig.origin.uses_rooms = uses_rooms
            found = places_of(rig)
            copied: list[str] = []
            submit = rig.threads.open.submit_pieces

            def noting(pieces: Any, **options: Any) -> Any:
                names = [getattr(piece, "func", piece).__name__ for piece in pieces]
                copied.extend(name for name in names if name == "_copy")
                return submit(pieces, **options)

            rig.threads.open.submit_pieces = noting  # type: ignore[method-assign]
            version = rig.version()
            rig.origin.hold()
            sharing = asyncio.ensure_future(rig.reader.share(version, 0, rig.context()))
            await rig.arrived(3)
            reading = asyncio.ensure_future(rig.read(version, connection="two"))
            await until(lambda: rig.metric("racer_flight_joins_total") == 3)
            rig.origin.release()
            piece = await sharing
            assert taken(piece) == data
            assert (await reading)[0] == data
            assert found == [True] * 3
            # The other reader's, of which one is small enough for the loop; and ours, if need be.
            assert len(copied) == (8 if uses_rooms else 16)
            assert rig.metric("racer_rung_bytes_total", rung="origin") == 2 * len(data)
            assert rig.metric("racer_rung_pages_total", rung="origin") == 6
            await rig.flights_over()
            assert await rig.read(version) == (data, {"memory": len(data)})
            assert not rig.services.shares.describe()[0]["in_use"]

    uvloop.run(main())


def test_parts_of_pages_do_not_land_where_they_are_read_to(tmp_path: Path) -> None:
    """R22: the page is longer than its place; what is whole between them does land."""
    data = content(4 * 64 * KIB)

    async def main() -> None:
        async with ReadRig(tmp_path) as rig:
            rig.origin.put(b"k", data)
            found = places_of(rig)
            memory = SharedMemory(2 * 64 * KIB + 150)
            with memory.view() as writable, memory.settled() as settled:
                start, stop = 64 * KIB - 100, 3 * 64 * KIB + 50
                place = Place(writable, settled)
                await rig.reader.read_into(
                    rig.version(), start, stop, writable, rig.context(), place
                )
                assert settled == data[start:stop]
            assert sorted(found) == [False, False, True, True]
            await rig.flights_over()
            memory.seal()
            memory.close()

    uvloop.run(main())


def test_what_a_fetch_still_receives_stays_charged(tmp_path: Path) -> None:
    """R7: also to the budget of plaintext, whose rooms would go to other pages."""

    async def main() -> None:
        async with ReadRig(tmp_path) as rig:
            rig.origin.put(b"k", content(64 * KIB))
            plaintext = rig.services.admission.plaintext
            rig.origin.hold(obeys_cancel=False)
            reading = asyncio.ensure_future(rig.read(rig.version()))
            await rig.arrived()
            reading.cancel()
            await asyncio.wait([reading])
            await rig.flights_over()
            assert plaintext.used == 64 * KIB
            rig.origin.release()
            await rig.reader._strays.close()
            assert plaintext.used == 0

    uvloop.run(main())


def test_memory_is_ready_before_its_pages_are_sealed(tmp_path: Path) -> None:
    """Where the cache has no room for a page, readers do not wait for some."""
    data = content(64 * KIB)

    async def main() -> None:
        settings = small_settings(share_bytes=64 * MIB)
        async with ReadRig(tmp_path, settings=settings, pages_in_memory=1, disk_bytes=0) as rig:
            rig.origin.put(b"k", data)
            rig.origin.put(b"first", content(64 * KIB, 1))
            await rig.read(rig.version(b"first"))
            await rig.flights_over()
            (held,) = rig.services.memory.pages_of(rig.object_id(b"first"))
            lease = rig.services.memory.lease(held.id)
            assert lease is not None
            piece = await rig.reader.share(rig.version(), 0, rig.context())
            assert taken(piece) == data
            (described,) = rig.services.shares.describe()
            assert described["in_use"], "the page that waits to be sealed lies there"
            lease.release()
            await rig.flights_over()
            assert rig.services.memory.contains(PageId(rig.version(), 0))
            assert await rig.read(rig.version()) == (data, {"memory": len(data)})
            assert not rig.services.shares.describe()[0]["in_use"]

    uvloop.run(main())


def test_memory_that_a_fetch_still_writes_to_stays_charged(tmp_path: Path) -> None:
    """R7, R8: nobody waits for the fetch any more, and it does not stop: it has the memory."""

    async def main() -> None:
        async with ReadRig(tmp_path, settings=small_settings(share_bytes=64 * MIB)) as rig:
            rig.origin.put(b"k", content(64 * KIB))
            shares = rig.services.shares
            rig.origin.hold(obeys_cancel=False)
            sharing = asyncio.ensure_future(rig.reader.share(rig.version(), 0, rig.context()))
            await rig.arrived()
            sharing.cancel()
            await asyncio.wait([sharing])
            await until(lambda: shares.describe()[0]["state"] == "abandoned")
            assert shares.charged_bytes == HUGE_PAGE_BYTES
            rig.origin.release()
            await rig.services.strays.close()
            await rig.reader._strays.close()
            await rig.flights_over()
            shares._reap()
            assert shares.describe() == []
            assert shares.charged_bytes == 0

    uvloop.run(main())


def test_who_joined_gets_the_page_though_the_memory_was_given_up(tmp_path: Path) -> None:
    """R6, R7: the flight goes on for the other reader, into memory that nobody shares any more."""
    data = content(64 * KIB)

    async def main() -> None:
        async with ReadRig(tmp_path, settings=small_settings(share_bytes=64 * MIB)) as rig:
            rig.origin.put(b"k", data)
            version, shares = rig.version(), rig.services.shares
            rig.origin.hold()
            sharing = asyncio.ensure_future(rig.reader.share(version, 0, rig.context()))
            await rig.arrived()
            reading = asyncio.ensure_future(rig.read(version, connection="two"))
            await until(lambda: rig.metric("racer_flight_joins_total") == 1)
            sharing.cancel()
            await asyncio.wait([sharing])
            again = asyncio.ensure_future(rig.reader.share(version, 0, rig.context()))
            await until(lambda: rig.metric("racer_flight_joins_total") == 2)
            rig.origin.release()
            assert (await reading)[0] == data
            assert taken(await again) == data
            await rig.flights_over()
            shares._reap()
            assert [chunk["state"] for chunk in shares.describe()] == ["ready"]
            assert shares.charged_bytes == HUGE_PAGE_BYTES
            assert rig.origin.fetches == {(b"k", 0): 1}

    uvloop.run(main())


def test_a_fetch_that_fails_leaves_no_memory_behind(tmp_path: Path) -> None:
    """R8: not in the error either, which those who waited may keep."""

    async def main() -> None:
        async with ReadRig(tmp_path, settings=small_settings(share_bytes=64 * MIB)) as rig:
            rig.origin.put(b"k", content(3 * 64 * KIB))
            version = rig.version()
            del rig.origin.objects["b", b"k"]
            with pytest.raises(RequestError) as caught:
                await rig.reader.share(version, 0, rig.context())
            assert caught.value.code == "not_found"
            await rig.flights_over()
            rig.services.shares._reap()
            assert rig.services.shares.charged_bytes == 0

    uvloop.run(main())
