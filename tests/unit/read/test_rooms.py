"""Rooms: reused while pages come, gone when the last page is."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest

from racerd.ids import ObjectId
from racerd.origin.beneath import Beneath
from racerd.origin.directory import DirectoryOrigin
from racerd.origin.protocol import CancelToken
from racerd.read.rooms import Rooms
from racerd.runtime.deadline import Deadline
from racerd.units import KIB, MIB


def test_a_room_goes_from_page_to_page() -> None:
    rooms = Rooms(1 * MIB)
    first, second = rooms.take(), rooms.take()
    assert first is not None and second is not None and first is not second
    assert len(first) == 1 * MIB
    rooms.give_back(first)
    assert rooms.take() is first
    rooms.give_back(first)
    rooms.give_back(second)
    assert rooms.taken == 0


def test_no_plaintext_stays_when_the_last_page_is_gone() -> None:
    """R16 in kind: an idle daemon holds no room, so no plaintext."""
    rooms = Rooms(1 * MIB)
    room = rooms.take()
    assert room is not None
    room[:4] = b"\xde\xad\xbe\xef"
    rooms.give_back(room)
    del room
    gc.collect()
    assert not [m for m in gc.get_objects() if isinstance(m, mmap.mmap) and len(m) == 1 * MIB]
    fresh = rooms.take()
    assert fresh is not None and fresh[:4] == bytes(4)


def test_small_pages_need_no_room() -> None:
    rooms = Rooms(64 * KIB)
    assert rooms.take() is None
    rooms.give_back(None)
    assert rooms.taken == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (10, 20)])
def test_an_origin_uses_the_room_it_is_given(tmp_path: Path, start: int, stop: int) -> None:
    (tmp_path / "b").mkdir()
    data = os.urandom(1000)
    (tmp_path / "b" / "k").write_bytes(data)
    root = os.fsencode(tmp_path)
    origin = DirectoryOrigin(root, Beneath(root, lambda error: None))
    try:
        soon = Deadline.after(10)
        version = origin.head(ObjectId("cache", "b", b"k"), deadline=soon)
        room = bytearray(2000)
        view = origin.fetch(
            version, start, stop, deadline=soon, cancel=CancelToken(), room=memoryview(room)
        )
        assert view == data[start:stop] and view.obj is room
        assert room[: stop - start] == data[start:stop]
    finally:
        origin.close()
