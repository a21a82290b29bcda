"""Budgets and windows: hard limits, turns between connections, and a clear no."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from racerd.errors import ConfigError, RacerError
from racerd.ids import ObjectVersion
from racerd.read.settings import ReadSettings
from racerd.units import MIB
from tests.support.read_rig import GEOMETRY, PAGE, ReadRig, content, small_settings

PAGES = 24
DATA = content(PAGES * PAGE)


def run(
    folder: Path, body: Callable[[ReadRig], Awaitable[None]], *, pages_in_memory: int = 8,
    disk_bytes: int = 8 * MIB, **settings: object,
) -> None:  # fmt: skip
    async def main() -> None:
        rig = ReadRig(
            folder, settings=small_settings(**settings), pages_in_memory=pages_in_memory,
            disk_bytes=disk_bytes, origin_threads=16,
        )  # fmt: skip
        async with rig:
            for key in (b"k", b"other"):
                rig.origin.put(key, DATA)
            await body(rig)

    uvloop.run(main())


def read(rig: ReadRig, version: ObjectVersion, **context: object) -> asyncio.Task[object]:
    return asyncio.ensure_future(rig.read(version, **context))


def test_memory_stays_within_the_budgets_whatever_clients_do(tmp_path: Path) -> None:
    """F10, F19, L50: sixteen clients read an object larger than all budgets: bytes held never
    pass them, every client gets its bytes, and nobody is refused."""

    async def body(rig: ReadRig) -> None:
        plaintext, used_max = rig.services.admission.plaintext, 0

        def watch(*_: object) -> None:
            nonlocal used_max
            used_max = max(used_max, plaintext.used)

        rig.origin.on_fetch = watch
        reads = [rig.read(rig.version(), connection=str(i)) for i in range(16)]
        for got, _ in await asyncio.gather(*reads):
            assert got == DATA
        assert 0 < used_max <= plaintext.limit == 3 * PAGE
        assert rig.arena.slot_count == 8 * GEOMETRY.frames_per_page

    run(tmp_path, body, plaintext_bytes=4 * PAGE, opening_bytes=2 * PAGE, reading_bytes=2 * PAGE)


def test_the_window_of_a_request_is_kept(tmp_path: Path) -> None:
    """L9, L50: so many pages in progress for one request, whatever its length."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        task = read(rig, rig.version())
        await rig.arrived(3)
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.origin.running == 3
        assert rig.services.admission.plaintext.used == 3 * PAGE
        rig.origin.release()
        await task

    run(tmp_path, body, request_pages=3)


def test_a_greedy_connection_leaves_the_others_their_turn(tmp_path: Path) -> None:
    """Fair sharing: a page for somebody new is fetched before the rest of what was asked first."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        greedy = [
            asyncio.ensure_future(rig.read(rig.version(), i * PAGE, (i + 1) * PAGE, connection="a"))
            for i in range(PAGES)
        ]
        await rig.arrived(2)  # All that the budget holds.
        modest = asyncio.ensure_future(rig.read(rig.version(b"other"), 0, PAGE, connection="b"))
        await asyncio.sleep(0)
        order: list[bytes] = []
        rig.origin.on_fetch = lambda version, *_: order.append(version.object_id.key)
        rig.origin.release()
        await asyncio.gather(modest, *greedy)
        assert b"other" in order[:5], order

    run(tmp_path, body, plaintext_bytes=int(2.7 * PAGE), connection_pages=100)


def test_one_connection_holds_a_share_only(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        tasks = [
            asyncio.ensure_future(rig.read(rig.version(), i * PAGE, (i + 1) * PAGE))
            for i in range(10)
        ]
        await rig.arrived(2)
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.services.admission.plaintext.used == 2 * PAGE
        assert rig.origin.running == 2
        other = asyncio.ensure_future(rig.read(rig.version(b"other"), 0, 5, connection="b"))
        await rig.arrived()
        rig.origin.release()
        await asyncio.gather(other, *tasks)

    run(tmp_path, body, connection_pages=2)


def test_overload_is_told_after_a_bounded_wait(tmp_path: Path) -> None:
    """503 with Retry-After: a connection that is served nothing is not kept waiting for ever."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        holders = [
            asyncio.ensure_future(rig.read(rig.version(), i * PAGE, i * PAGE + 1, connection="a"))
            for i in range(2)
        ]
        await rig.arrived(2)
        with pytest.raises(RacerError) as caught:
            await rig.read(rig.version(b"other"), 0, 1, connection="b")
        assert caught.value.code == "overloaded"
        assert caught.value.retry_after_seconds is not None and caught.value.hint
        assert rig.metric("racer_overloaded_total", budget="plaintext") == 1
        rig.origin.release()
        await asyncio.gather(*holders)
        assert (await rig.read(rig.version(b"other"), 0, 1))[0] == DATA[:1]

    run(tmp_path, body, plaintext_bytes=int(2.7 * PAGE), admission_seconds=0.05)


async def wait_at(rig: ReadRig, stage: str) -> None:
    """Waits at `stage` until a deadline ends it."""
    deadline = rig.context(seconds=0.05).deadline
    if stage == "version":
        await rig.reader.resolve(rig.object_id(), if_match=None, deadline=deadline)
    elif stage == "listing":
        await rig.reader.list_buckets(deadline=deadline)
    else:
        seconds = 0.0 if stage == "before" else 0.05
        await rig.read(rig.version(b"other"), 0, PAGE, connection="b", seconds=seconds)


@pytest.mark.parametrize("stage", ["before", "budget", "origin", "version", "listing"])
def test_a_deadline_ends_every_stage(tmp_path: Path, stage: str) -> None:
    """R7: at whatever a request waits, its deadline ends it, and nothing of it is left."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold(obeys_cancel=False)
        others: list[asyncio.Task[object]] = []
        if stage == "budget":
            others = [read(rig, rig.version(), connection="x")]
            await rig.arrived(2)
        with pytest.raises(RacerError) as caught:
            await wait_at(rig, stage)
        assert caught.value.code == "deadline_exceeded"
        rig.origin.release()
        await asyncio.gather(*others)

    run(tmp_path, body, plaintext_bytes=int(2.7 * PAGE), request_pages=2)


def test_budgets_that_cannot_hold_a_page_are_refused_at_start() -> None:
    with pytest.raises(ConfigError) as caught:
        ReadSettings(plaintext_bytes=PAGE, opening_bytes=1, request_pages=0).check(GEOMETRY)
    assert len(caught.value.problems) == 3


def test_gauges_tell_what_is_charged(tmp_path: Path) -> None:
    """L7: budgets, used and limit, are there to be seen."""

    async def body(rig: ReadRig) -> None:
        rig.origin.hold()
        task = read(rig, rig.version())
        await rig.arrived()
        names = ("plaintext", "streams", "reading", "opening", "dirty", "memory")
        for name in names:
            assert rig.metric("racer_budget_limit_bytes", budget=name) > 0
        assert rig.metric("racer_budget_used_bytes", budget="plaintext") >= PAGE
        assert rig.metric("racer_flights") >= 1
        rig.origin.release()
        await task

    run(tmp_path, body)


def test_stages_and_rungs_are_measured(tmp_path: Path) -> None:
    """L7: where the time of a read goes, and which rung served how much."""

    async def body(rig: ReadRig) -> None:
        await rig.read(rig.version())
        await rig.stored()
        rig.forget_memory()
        await rig.read(rig.version())
        await rig.read(rig.version(), 0, PAGE)
        for stage in ("queue", "open", "seal", "origin", "disk"):
            assert rig.metric("racer_stage_seconds_count", stage=stage) > 0
        total = sum(
            rig.metric("racer_rung_bytes_total", rung=rung) for rung in ("memory", "disk", "origin")
        )
        assert total == 2 * len(DATA) + PAGE
        assert rig.metric("racer_rung_pages_total", rung="origin") == PAGES

    run(tmp_path, body, pages_in_memory=64, dirty_bytes=64 * PAGE)
