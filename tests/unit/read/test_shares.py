"""Shared landings: one opening for all, a budget that holds, and nothing left behind."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.pages import PageGeometry
from racerd.read.request import ReadReport, RequestContext
from racerd.read.shares import SHARE_CHUNK_BYTES, SharedLandings, SharedPiece
from racerd.read.sources import Place
from racerd.runtime.deadline import Deadline
from racerd.runtime.memory_map import HUGE_PAGE_BYTES
from racerd.runtime.shared_memory import SharedMemory
from racerd.runtime.threads import WorkerThreads
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.collector import no_collector
from tests.support.read_rig import ReadRig, content, small_settings, taken

GEOMETRY = PageGeometry(64 * KIB, 4 * KIB)
VERSION = ObjectVersion(ObjectId("cache", "b", b"k"), '"v1"', 3 * MIB)
OTHER = ObjectVersion(ObjectId("cache", "b", b"other"), '"v1"', 2 * MIB)
LONG = ObjectVersion(ObjectId("cache", "b", b"long"), '"v1"', SHARE_CHUNK_BYTES + 100)


class Filling:
    """Writes the first byte of the object's key over all of it, when it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None
        self.ended = 0

    async def __call__(
        self, version: ObjectVersion, start: int, place: Place, _: RequestContext
    ) -> ReadReport:
        out = place.writable
        self.calls += 1
        self.arrived.set()
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            out[:] = version.object_id.key[:1] * len(out)
            return ReadReport(len(out), {"memory": len(out)})
        finally:
            self.ended += 1


class World:
    def __init__(self, shares: SharedLandings, metrics: Metrics) -> None:
        self.shares = shares
        self.metrics = metrics
        self.fill = Filling()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def acquire(
        self, version: ObjectVersion = VERSION, at: int = 0, seconds: float = 30.0
    ) -> SharedPiece:
        context = RequestContext("connection", Deadline.after(seconds))
        return await self.shares.acquire(version, at, context, self.fill)

    async def use_and_let_go(self, version: ObjectVersion = VERSION) -> None:
        os.close((await self.acquire(version)).descriptor)


@asynccontextmanager
async def world(
    *, limit: int = SHARE_CHUNK_BYTES, idle_seconds: float = 60.0
) -> AsyncIterator[World]:
    metrics = Metrics()
    async with WorkerThreads("open", 2) as threads:
        shares = SharedLandings(
            threads, GEOMETRY, metrics, limit_bytes=limit, idle_seconds=idle_seconds
        )
        try:
            yield World(shares, metrics)
        finally:
            await shares.close()
            assert shares.charged_bytes == 0


def run(body: Callable[[World], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        async with world(**options) as made:  # type: ignore[arg-type]
            await body(made)

    uvloop.run(main())


def test_only_what_is_filled_and_of_that_version_is_there_already() -> None:
    """R5: what is still being written is given to nobody; giving it out counts as use."""

    async def body(w: World) -> None:
        w.fill.go.clear()
        reading = asyncio.ensure_future(w.acquire())
        await w.fill.arrived.wait()
        assert w.shares.ready(VERSION, 0, VERSION.size, 16) == []
        w.fill.go.set()
        os.close((await reading).descriptor)
        used = w.value("racer_shared_reads_total", result="joined")
        (piece,) = w.shares.ready(VERSION, 0, VERSION.size, 16)
        assert (piece.start, piece.stop, piece.report.rungs) == (0, 3 * MIB, {"shared": 3 * MIB})
        assert taken(piece) == b"k" * (3 * MIB)
        assert w.value("racer_shared_reads_total", result="joined") == used + 1
        assert w.shares.ready(OTHER, 0, OTHER.size, 16) == []
        assert w.shares.ready(VERSION, 0, VERSION.size, 0) == []

    run(body)


def test_eight_readers_cost_one_opening() -> None:
    """F19: readers of one version share one acquisition, also while it is under way."""

    async def body(w: World) -> None:
        w.fill.go.clear()
        reading = [asyncio.ensure_future(w.acquire()) for _ in range(7)]
        await w.fill.arrived.wait()
        w.fill.go.set()
        pieces = [*(await asyncio.gather(*reading)), await w.acquire()]
        assert w.fill.calls == 1
        assert [piece.report.rungs for piece in pieces[:2]] == [
            {"memory": VERSION.size},
            {"shared": VERSION.size},
        ]
        assert all(taken(piece) == b"k" * VERSION.size for piece in pieces)
        assert w.value("racer_shared_reads_total", result="filled") == 1
        assert w.value("racer_shared_reads_total", result="joined") == 7

    run(body)


def test_objects_are_cut_where_pages_end() -> None:
    async def body(w: World) -> None:
        assert w.shares.chunk_bytes % GEOMETRY.page_bytes == 0
        first = await w.acquire(LONG, SHARE_CHUNK_BYTES - 1)
        assert (first.start, first.stop) == (0, SHARE_CHUNK_BYTES)
        os.close(first.descriptor)
        last = await w.acquire(LONG, SHARE_CHUNK_BYTES)
        assert (last.start, last.stop) == (SHARE_CHUNK_BYTES, LONG.size)
        assert taken(last) == b"l" * 100

    run(body, limit=2 * SHARE_CHUNK_BYTES)


def test_versions_are_not_mixed() -> None:
    """F30"""

    async def body(w: World) -> None:
        newer = ObjectVersion(VERSION.object_id, '"v2"', VERSION.size)
        pieces = [await w.acquire(), await w.acquire(newer)]
        assert w.fill.calls == 2
        for piece in pieces:
            os.close(piece.descriptor)

    run(body)


def test_what_fails_is_told_to_all_and_costs_nothing() -> None:
    """F66: every waiter gets the cause; nothing stays charged, and the next one tries anew."""

    async def body(w: World) -> None:
        w.fill.go.clear()
        w.fill.error = RequestError("version_changed", "it changed")
        reading = [asyncio.ensure_future(w.acquire()) for _ in range(3)]
        await w.fill.arrived.wait()
        w.fill.go.set()
        found = await asyncio.gather(*reading, return_exceptions=True)
        assert [getattr(error, "code", None) for error in found] == ["version_changed"] * 3
        assert w.shares.charged_bytes == 0
        w.fill.error = None
        assert taken(await w.acquire()) == b"k" * VERSION.size

    run(body)


def test_views_in_errors_that_were_got_over_do_not_keep_memory_from_being_shared() -> None:
    """R7: what refers to itself is collected then; it is counted, as it takes time."""

    async def body(w: World) -> None:
        async def fill(*args: Any) -> ReadReport:
            report = await w.fill(*args)
            try:
                raise OSError("got over")
            except OSError as error:
                kept = [error, args[2].writable[1:]]
                kept.append(kept)
            return report

        with no_collector():
            context = RequestContext("connection", Deadline.after(20))
            piece = await w.shares.acquire(VERSION, 0, context, fill)
        assert taken(piece) == b"k" * VERSION.size
        assert w.value("racer_fallbacks_total", step="share_seal", reason="views_left") == 1

    run(body)


def test_memory_that_is_still_written_to_is_given_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R7: a fetch that was not waited for would be a defect, and never a wrong byte."""

    async def body(w: World) -> None:
        left: list[memoryview] = []

        async def fill(*args: Any) -> ReadReport:
            left.append(args[2].writable[1:])
            return await w.fill(*args)

        context = RequestContext("connection", Deadline.after(20))
        with pytest.raises(RacerError) as caught:
            await w.shares.acquire(VERSION, 0, context, fill)
        assert caught.value.code == "internal"
        assert w.shares.ready(VERSION, 0, VERSION.size, 16) == []
        assert w.shares.charged_bytes > 0
        left.clear()
        w.shares._reap()
        assert w.shares.charged_bytes == 0
        assert taken(await w.acquire()) == b"k" * VERSION.size

    run(body)
    assert "a view of it is held" in caplog.text


def test_a_defect_strands_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def body(w: World) -> None:
        w.fill.error = ZeroDivisionError("a defect")
        with pytest.raises(RacerError) as caught:
            await w.acquire()
        assert caught.value.code == "internal"
        assert w.shares.charged_bytes == 0

    run(body)
    assert "a defect" in caplog.text


def test_the_last_who_leaves_cancels_it() -> None:
    """R7: nobody fills memory for nobody."""

    async def body(w: World) -> None:
        w.fill.go.clear()
        reading = [asyncio.ensure_future(w.acquire()) for _ in range(2)]
        await w.fill.arrived.wait()
        reading[0].cancel()
        await asyncio.wait([reading[0]])
        assert w.fill.ended == 0, "somebody still waits"
        reading[1].cancel()
        await asyncio.wait([reading[1]])
        while w.shares.charged_bytes:  # noqa: ASYNC110  freed when the filling task has ended
            await asyncio.sleep(0)
        assert w.fill.ended == 1
        w.fill.go.set()
        assert taken(await w.acquire()) == b"k" * VERSION.size

    run(body)


def test_who_waits_has_a_deadline_of_its_own() -> None:
    async def body(w: World) -> None:
        w.fill.go.clear()
        patient = asyncio.ensure_future(w.acquire())
        await w.fill.arrived.wait()
        with pytest.raises(RacerError) as caught:
            await w.acquire(seconds=0.01)
        assert caught.value.code == "deadline_exceeded"
        w.fill.go.set()
        assert taken(await patient) == b"k" * VERSION.size

    run(body)


def test_the_budget_is_a_hard_limit_and_what_nobody_uses_makes_room() -> None:
    """F12: what readers have mapped is charged for as long as they have it mapped."""

    async def body(w: World) -> None:
        piece = await w.acquire(LONG)
        assert w.shares.charged_bytes == SHARE_CHUNK_BYTES
        mapping = mmap.mmap(piece.descriptor, 100, prot=mmap.PROT_READ)
        os.close(piece.descriptor)
        with pytest.raises(RacerError) as caught:
            await w.acquire(OTHER)
        assert caught.value.code == "share_full"
        assert "--share" in caught.value.hint
        assert w.value("racer_shares_refused_total", reason="full") == 1
        mapping.close()
        while w.value("racer_shares_evicted_total", reason="room") == 0:  # a refusal holds 50 ms
            try:
                piece = await w.acquire(OTHER)
            except RacerError:
                await asyncio.sleep(0.01)
        assert taken(piece) == b"o" * OTHER.size
        assert w.value("racer_shares_evicted_total", reason="room") == 1
        assert w.shares.charged_bytes == 2 * MIB

    run(body)


def test_what_was_used_longest_ago_makes_room_first() -> None:
    async def body(w: World) -> None:
        await w.use_and_let_go(VERSION)  # 4 MiB
        await w.use_and_let_go(OTHER)  # 2 MiB
        await w.use_and_let_go(VERSION)
        w.shares._make_room(SHARE_CHUNK_BYTES - 4 * MIB)
        assert [shown["object"] for shown in w.shares.describe()] == ["b/k"]

    run(body)


def test_plaintext_that_nobody_uses_does_not_stay() -> None:
    async def body(w: World) -> None:
        piece = await w.acquire()
        await w.use_and_let_go(OTHER)
        while len(w.shares.describe()) > 1:  # noqa: ASYNC110  a timer drops it
            await asyncio.sleep(0.01)
        assert w.shares.describe()[0]["object"] == "b/k", "what is used stays"
        os.close(piece.descriptor)
        while w.shares.charged_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert w.value("racer_shares_evicted_total", reason="idle") == 2

    run(body, idle_seconds=0.05)


def test_what_was_evicted_by_name_is_given_to_nobody_and_stays_charged_while_it_is_used() -> None:
    async def body(w: World) -> None:
        piece = await w.acquire()
        w.shares.evicted(lambda object_id: object_id.key == b"k")
        assert w.shares.charged_bytes == 4 * MIB
        assert w.shares.describe()[0]["retired"] is True
        assert taken(await w.acquire()) == b"k" * VERSION.size
        assert w.fill.calls == 2, "filled anew"
        assert taken(piece) == b"k" * VERSION.size
        w.shares.evicted(lambda object_id: False)
        assert w.shares.charged_bytes == 4 * MIB

    run(body)


def test_what_is_evicted_while_it_is_filled_serves_those_who_wait() -> None:
    async def body(w: World) -> None:
        w.fill.go.clear()
        reading = asyncio.ensure_future(w.acquire())
        await w.fill.arrived.wait()
        w.shares.evicted(lambda object_id: True)
        w.fill.go.set()
        piece = await reading
        assert w.shares.describe()[0]["retired"] is True
        assert taken(piece) == b"k" * VERSION.size

    run(body)


def test_closing_a_cache_ends_its_fillings_only() -> None:
    async def body(w: World) -> None:
        await w.use_and_let_go()
        w.fill.go.clear()
        w.fill.arrived.clear()
        reading = asyncio.ensure_future(w.acquire(OTHER))
        await w.fill.arrived.wait()
        await w.shares.close_cache("another")
        assert not reading.done()
        await w.shares.close_cache("cache")
        with pytest.raises(RacerError) as caught:
            await reading
        assert caught.value.code == "draining"
        assert w.shares.charged_bytes == 0

    run(body)


def test_readers_keep_what_they_have_when_all_is_closed() -> None:
    async def main() -> None:
        async with world() as w:
            piece = await w.acquire()
        assert taken(piece) == b"k" * VERSION.size

    uvloop.run(main())


def test_after_the_end_nothing_is_filled() -> None:
    async def body(w: World) -> None:
        await w.shares.close()
        with pytest.raises(RacerError) as caught:
            await w.acquire()
        assert caught.value.code == "draining"

    run(body)


def test_cancelled_before_it_begins() -> None:
    """A task that is cancelled early never runs: its charge is given back all the same."""

    async def body(w: World) -> None:
        w.shares._lead(VERSION, 0, "connection", w.fill)
        await w.shares.close()
        assert w.fill.calls == 0
        assert w.shares.charged_bytes == 0

    run(body)


@pytest.mark.parametrize("turns", range(12))
def test_leaving_at_any_moment_leaves_nothing(turns: int) -> None:
    """R7: also in the very turn of the loop in which the filling ends."""

    async def body(w: World) -> None:
        reading = asyncio.ensure_future(w.acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 2:
            while w.fill.ended == 0 and not reading.done():  # noqa: ASYNC110  on threads of its own
                await asyncio.sleep(0)
            for _ in range(turns // 2):
                await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            os.close(reading.result().descriptor)
        w.shares.evicted(lambda object_id: True)
        while w.shares.charged_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert w.shares.describe() == []

    run(body)


def test_the_last_leaves_in_the_turn_in_which_it_is_filled() -> None:
    async def body(w: World) -> None:
        chunk = w.shares._lead(VERSION, 0, "connection", w.fill)
        assert chunk.task is not None
        while not chunk.task.done():  # noqa: ASYNC110  its callbacks have not run by then
            await asyncio.sleep(0)
        if chunk.report is None:
            w.shares._abandon(chunk)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert w.shares.charged_bytes == 0

    run(body)


def test_a_kernel_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be asked for is used: nothing is freed twice, or under somebody's feet."""

    async def body(w: World) -> None:
        piece = await w.acquire()
        w.shares.evicted(lambda object_id: True)
        os.close(piece.descriptor)

        def refuse(fd: int, command: int, argument: int = 0) -> int:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "fcntl", refuse)
            w.shares._reap()
            assert w.shares.charged_bytes == 4 * MIB
        w.shares._reap()
        w.shares._reap()
        assert w.shares.charged_bytes == 0

    run(body)


def test_chunks_are_bounded_by_descriptors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(w: World) -> None:
        monkeypatch.setattr(w.shares, "_chunks_max", 1)
        piece = await w.acquire()
        with pytest.raises(RacerError) as caught:
            await w.acquire(OTHER)
        assert caught.value.code == "share_full"
        os.close(piece.descriptor)
        w.shares._full_until = 0.0
        assert taken(await w.acquire(OTHER)) == b"o" * OTHER.size

    run(body)


def test_memory_that_cannot_be_given_out_any_more_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(w: World) -> None:
        await w.use_and_let_go()

        def refuse(self: SharedMemory) -> int:
            raise OSError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(SharedMemory, "reader", refuse)
            with pytest.raises(RacerError):
                await w.acquire()
        assert taken(await w.acquire()) == b"k" * VERSION.size
        assert w.fill.calls == 2

    run(body)


@pytest.mark.parametrize(
    ("limit", "why"), [(0, "`share` is 0"), (HUGE_PAGE_BYTES, "less than a chunk of 32 MiB")]
)
def test_sharing_that_is_off_says_why(limit: int, why: str) -> None:
    async def body(w: World) -> None:
        assert not w.shares.on
        with pytest.raises(RacerError) as caught:
            await w.acquire()
        assert caught.value.code == "share_off"
        assert why in caught.value.message
        assert w.value("racer_shares_refused_total", reason="off") == 1

    run(body, limit=limit)


def test_memory_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(w: World) -> None:
        def refuse(name: str, flags: int = 0) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(RacerError) as caught:
            await w.acquire()
        assert caught.value.code == "share_full"
        assert "Too many open files" in caught.value.message
        assert w.shares.charged_bytes == 0
        monkeypatch.undo()

    run(body)


def test_freeing_twice_gives_nothing_back_twice() -> None:
    async def body(w: World) -> None:
        await w.use_and_let_go()
        (chunk,) = w.shares._chunks.values()
        w.shares._forget(chunk)
        w.shares._free(chunk)
        w.shares._free(chunk)
        assert w.shares.charged_bytes == 0

    run(body)


def test_what_is_shared_during_an_eviction_is_given_to_nobody_afterwards(tmp_path: Path) -> None:
    """It was filled from pages that are gone when the eviction is over."""

    async def main() -> None:
        async with ReadRig(tmp_path, settings=small_settings(share_bytes=64 * MIB)) as rig:
            rig.origin.put(b"k", content(100_000))
            version, reader = rig.version(), rig.reader
            begun, go_on = threading.Event(), threading.Event()
            evict = reader._evict_stored

            def slowly(bucket: str, key: bytes, prefix: bool) -> tuple[int, int]:
                begun.set()
                assert go_on.wait(20)
                return evict(bucket, key, prefix)

            reader._evict_stored = slowly  # type: ignore[method-assign]
            evicting = asyncio.ensure_future(reader.evict("b", b"k", prefix=False))
            assert await asyncio.to_thread(begun.wait, 20)
            os.close((await reader.share(version, 0, rig.context())).descriptor)
            go_on.set()
            await evicting
            assert rig.services.shares.describe() == []

    uvloop.run(main())
