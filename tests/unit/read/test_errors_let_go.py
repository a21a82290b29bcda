"""Errors let go: what was failed, or got over, keeps no memory until the collector comes.

An error refers to the frames that it went through, frames to tasks and lists, and these to the
error. A view in one of those frames keeps memory that nobody uses, and memory with a view of it can
neither be sealed nor unmapped.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import weakref
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RequestError
from racerd.ids import ObjectVersion
from racerd.read import rooms
from racerd.read.rooms import Rooms
from tests.support.collector import no_collector
from tests.support.read_rig import KIB, MIB, PAGE, ReadRig, content, small_settings

DATA = content(3 * PAGE)


def damage(rig: ReadRig, index: int) -> None:
    """Flips a bit of a page of `k` in memory."""
    pages = rig.services.memory.pages_of(rig.object_id())
    next(page for page in pages if page.id.index == index).slots.frames[0][0] ^= 1


def corrupt_pages(rig: ReadRig) -> float:
    return rig.metric("racer_corrupt_pages_total", rung="memory", reason="bad_tag")


def test_pages_that_were_rotten_do_not_keep_memory_from_being_shared(tmp_path: Path) -> None:
    """R22: they are fetched anew, and land where they are shared."""

    async def main() -> None:
        settings = small_settings(share_bytes=64 * MIB)
        async with ReadRig(tmp_path, settings=settings, disk_bytes=0) as rig:
            rig.origin.put(b"k", DATA)
            await rig.read(rig.version())
            await rig.flights_over()
            for index in (0, 2):
                damage(rig, index)
            with no_collector():
                piece = await rig.reader.share(rig.version(), 0, rig.context())
            assert os.pread(piece.descriptor, len(DATA), 0) == DATA
            assert piece.report.rungs == {"memory": PAGE, "origin": 2 * PAGE}
            os.close(piece.descriptor)

    uvloop.run(main())


@pytest.mark.parametrize("case", ["absent", "rotten"])
def test_a_reader_has_its_memory_back(tmp_path: Path, case: str) -> None:
    """R7, R8: mappings of clients' memory go as soon as nobody writes there."""

    async def main() -> None:
        async with ReadRig(tmp_path, disk_bytes=0) as rig:
            rig.origin.put(b"k", DATA)
            version = rig.version()
            await rig.read(version)
            await rig.flights_over()
            damage(rig, 1)
            if case == "absent":
                del rig.origin.objects["b", b"k"]
                rig.forget_memory()
            with no_collector():
                memory = (ctypes.c_char * version.size)()
                gone = weakref.ref(memory)
                view = memoryview(memory).cast("B")
                del memory
                if case == "absent":
                    with pytest.raises(RequestError):
                        await rig.reader.read_into(version, 0, version.size, view, rig.context())
                else:
                    await rig.reader.read_into(version, 0, version.size, view, rig.context())
                    assert view == DATA
                del view
                await rig.flights_over()
                await asyncio.sleep(0)
                assert gone() is None

    uvloop.run(main())


def test_a_fetch_that_failed_leaves_no_plaintext(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R16 in kind: what came of a page before its fetch failed is unmapped, and not only free."""
    made: list[weakref.ref[mmap.mmap]] = []
    fresh = Rooms._fresh

    def noting(self: Rooms) -> mmap.mmap:
        room = fresh(self)
        made.append(weakref.ref(room))
        return room

    monkeypatch.setattr(rooms, "_ROOM_BYTES_MIN", KIB)
    monkeypatch.setattr(Rooms, "_fresh", noting)

    async def main() -> None:
        async with ReadRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)
            version = rig.version()

            def broken(asked: ObjectVersion, start: int, stop: int) -> None:
                raise RequestError("version_changed", "it changed half-way")

            rig.origin.on_fetch = broken
            with no_collector():
                with pytest.raises(RequestError):
                    await rig.read(version)
                await rig.flights_over()
                await asyncio.sleep(0)
                assert made
                assert [room() for room in made if room() is not None] == []

    uvloop.run(main())
