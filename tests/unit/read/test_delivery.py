"""What pieces leave behind in scratch and destination."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from racerd.crypto.keyring import Keyring
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.errors import IntegrityError
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.read.delivery import _copy, _open_cut, _open_run, _ScratchFrames
from racerd.read.plan import FrameCut, FrameRun, PagePart
from racerd.units import KIB
from tests.support.read_rig import ReadRig, content

GEOMETRY = PageGeometry(64 * KIB, 16 * KIB)
FRAME = GEOMETRY.frame_bytes
DATA = content(3 * FRAME + 100)
PAGE = PageId(ObjectVersion(ObjectId("cache", "b", b"k"), '"v1"', len(DATA)), 0)


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[PageOpener, list[memoryview]]:
    key = Keyring.open(tmp_path / "keys").active
    sealer = PageSealer(PAGE, len(DATA), GEOMETRY, key)
    frames = [
        memoryview(bytearray(GEOMETRY.frame_length(len(DATA), i) + TAG_BYTES)) for i in range(4)
    ]
    sealer.seal_frames(0, memoryview(DATA), frames)
    return PageOpener(PAGE, sealer.finish(), GEOMETRY, key), frames


@pytest.mark.parametrize(("frame", "start", "stop"), [(0, 0, 1), (1, 7, FRAME), (3, 50, 100)])
def test_a_cut_writes_its_bytes_and_wipes_its_scratch(
    sealed: tuple[PageOpener, list[memoryview]], frame: int, start: int, stop: int
) -> None:
    """R9 in kind: plaintext beyond what was asked for does not stay in the daemon."""
    opener, frames = sealed
    scratch, destination = (
        _ScratchFrames(FRAME),
        memoryview(bytearray(b"\xaa" * (stop - start + 10))),
    )
    _open_cut(opener, FrameCut(frame, start, stop, 5), frames[frame], destination, scratch)
    at = frame * FRAME
    assert destination[5:-5] == DATA[at + start : at + stop]
    assert destination[:5] == destination[-5:] == b"\xaa" * 5
    assert scratch.frame == bytes(FRAME)


def test_a_bad_cut_writes_nothing(sealed: tuple[PageOpener, list[memoryview]]) -> None:
    """R22: neither in the destination nor in the scratch is there an unverified byte."""
    opener, frames = sealed
    frames[1][0] ^= 1
    scratch, destination = _ScratchFrames(FRAME), memoryview(bytearray(b"\xaa" * 10))
    with pytest.raises(IntegrityError):
        _open_cut(opener, FrameCut(1, 0, 10, 0), frames[1], destination, scratch)
    assert destination == b"\xaa" * 10 and scratch.frame == bytes(FRAME)


def test_a_bad_run_is_wiped_and_nothing_else(
    sealed: tuple[PageOpener, list[memoryview]],
) -> None:
    """R22: a bad tag wipes what was written of the run, within its bounds."""
    opener, frames = sealed
    frames[2][5] ^= 1
    destination = memoryview(bytearray(b"\xaa" * (2 * FRAME + 20)))
    with pytest.raises(IntegrityError):
        _open_run(opener, FrameRun(1, 3, 10, 2 * FRAME), frames[1:3], destination)
    assert destination[10:-10] == bytes(2 * FRAME)
    assert destination[:10] == destination[-10:] == b"\xaa" * 10


def test_copies_go_where_they_belong_and_leave_no_view() -> None:
    memory = bytearray(b"\xaa" * 30)
    _copy(memoryview(DATA), 3, memoryview(memory), 10, 7)
    assert memory == b"\xaa" * 10 + DATA[3:10] + b"\xaa" * 13
    memory.clear()  # BufferError if a view of it were left.


def test_only_what_takes_a_moment_is_opened_on_the_loop(tmp_path: Path) -> None:
    """A page of store format v1 has one tag for all: a few bytes of it cost the whole page."""

    async def main() -> None:
        async with ReadRig(tmp_path) as rig:
            length = rig.reader.geometry.page_bytes
            memory, frames = rig.services.memory, rig.reader.geometry.frames_per_page

            def small(seal: Seal, bytes_wanted: int) -> bool:
                slots = memory.try_reserve(0, frames, length)
                assert slots is not None
                lease = memory.hold(PAGE, seal, slots, rung="memory")
                try:
                    part = PagePart(0, length, 0, bytes_wanted, 0)
                    return rig.services.delivery._is_small(lease, part)
                finally:
                    lease.release()

            framed = Seal(1, bytes(24), length, bytes(16 * frames), (0,) * frames, 0)
            one_tag = Seal(1, bytes(24), length, bytes(16), (0,), 0)
            assert small(framed, 4096)
            assert not small(framed, 32 * KIB)
            assert not small(one_tag, 4096)

    asyncio.run(main())
