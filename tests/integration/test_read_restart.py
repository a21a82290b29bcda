"""The read layer on a real slab: what a restart keeps, what eviction and explain tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from racerd.ids import PageId
from tests.support.read_rig import PAGE, ReadRig, content

DATA = content(3 * PAGE + 77)


def run(folder: Path, body: Callable[[ReadRig], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        async with ReadRig(folder, **options) as rig:  # type: ignore[arg-type]
            rig.origin.put(b"k", DATA)
            await body(rig)

    uvloop.run(main())


async def load(rig: ReadRig) -> None:
    assert (await rig.read(rig.version()))[0] == DATA
    await rig.stored()


def test_a_restart_needs_no_origin(tmp_path: Path) -> None:
    """R23, R32, F2: every page is read from the disk; an object smaller than a page too (F6)."""

    async def first(rig: ReadRig) -> None:
        rig.origin.put(b"small", DATA[:100])
        await load(rig)
        await rig.read(rig.version(b"small"))
        await rig.stored()

    async def second(rig: ReadRig) -> None:
        rig.origin.put(b"small", DATA[:100])
        assert await rig.read(rig.version()) == (DATA, {"disk": len(DATA)})
        assert await rig.read(rig.version(b"small")) == (DATA[:100], {"disk": 100})
        assert not rig.origin.fetches

    run(tmp_path, first)
    run(tmp_path, second)


def test_a_memory_smaller_than_the_window_loses_no_page(tmp_path: Path) -> None:
    """R32: eight pages are fetched at a time, memory has slots for two: every page reaches the
    disk, because pages wait for slots as long as some come free; nothing is fetched again."""

    async def body(rig: ReadRig) -> None:
        data = content(20 * PAGE)
        rig.origin.put(b"big", data)
        version = rig.version(b"big")
        report = await rig.reader.prefetch(version, 0, len(data), rig.context())
        assert report.rungs == {"origin": len(data)}
        got, rungs = await rig.read(version)
        assert got == data and "origin" not in rungs
        assert sum(rig.origin.fetches.values()) == 20

    run(tmp_path, body, pages_in_memory=2)


def test_without_a_disk_memory_serves(tmp_path: Path) -> None:
    """R23: no disk is a smaller cache, not an error."""

    async def body(rig: ReadRig) -> None:
        await load(rig)
        assert (await rig.read(rig.version()))[1] == {"memory": len(DATA)}
        report = await rig.reader.prefetch(rig.version(), 0, len(DATA), rig.context())
        assert report.rungs == {"memory": len(DATA)}

    run(tmp_path, body, disk_bytes=0)


def test_explain_tells_the_rung_and_why_no_earlier_one(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        version = rig.version()
        await rig.read(version, 0, 2 * PAGE)
        await rig.stored()
        (lease,) = [rig.services.memory.lease(PageId(version, 0))]
        assert lease is not None
        rig.services.memory.drop(lease.page)
        lease.release()
        told = await rig.reader.explain(version, 0, len(DATA))
        assert [page.rung for page in told] == ["disk", "memory", "origin", "origin"]
        assert list(told[0].why) == ["memory"] and not told[1].why
        assert list(told[2].why) == ["memory", "disk"]
        assert "never kept" in told[2].why["disk"]
        assert told[0].last is not None and told[0].last[0] == "origin"
        assert told[2].last is None
        await rig.read(version, 0, PAGE)
        (page,) = await rig.reader.explain(version, 0, 1)
        assert page.last is not None and page.last[0] == "disk"

    run(tmp_path, body)


def test_explain_tells_what_was_evicted(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        for start in range(0, len(DATA), PAGE):
            await rig.read(rig.version(), start, min(start + PAGE, len(DATA)))
            await rig.stored()
        (page,) = await rig.reader.explain(rig.version(), 0, 1)
        assert page.why["memory"] == "not in memory: evicted for other pages"

    run(tmp_path, body, pages_in_memory=2)


def test_evict_takes_memory_and_disk(tmp_path: Path) -> None:
    """Every version of an object; its namesakes in other buckets and longer names stay (F14)."""

    async def body(rig: ReadRig) -> None:
        await load(rig)
        rig.origin.put(b"k", DATA[::-1], etag='"v2"')
        assert (await rig.read(rig.version()))[0] == DATA[::-1]
        rig.origin.put(b"k2", DATA[:50])
        await rig.read(rig.version(b"k2"))
        await rig.stored()
        pages, size = await rig.reader.evict("b", b"k", prefix=False)
        assert pages == 8 and size >= 2 * len(DATA)
        assert (await rig.read(rig.version(b"k2")))[1] == {"memory": 50}
        assert (await rig.read(rig.version()))[1] == {"origin": len(DATA)}

    run(tmp_path, body)


def test_pages_of_memory_alone_are_counted_by_evict(tmp_path: Path) -> None:
    async def body(rig: ReadRig) -> None:
        await load(rig)
        assert await rig.reader.evict("b", b"k", prefix=True) == (4, len(DATA))

    run(tmp_path, body, disk_bytes=0)


def test_prefetch_and_explain_are_not_deceived_by_an_old_checkpoint(tmp_path: Path) -> None:
    """F29: what was evicted between a checkpoint and a crash is fetched again by a prefetch, and
    explain does not say that it is on the disk."""
    slab = tmp_path / "slab"
    at_crash: list[bytes] = []

    async def before(rig: ReadRig) -> None:
        await load(rig)
        rig.store.checkpoint()
        await rig.reader.evict("b", b"k", prefix=False)
        at_crash.append(await asyncio.to_thread(slab.read_bytes))

    run(tmp_path, before)
    slab.write_bytes(at_crash[0])

    async def after(rig: ReadRig) -> None:
        told = await rig.reader.explain(rig.version(), 0, len(DATA))
        assert [page.rung for page in told] == ["origin"] * 4
        report = await rig.reader.prefetch(rig.version(), 0, len(DATA), rig.context())
        assert report.rungs == {"origin": len(DATA)}
        assert await rig.read(rig.version()) == (DATA, {"memory": len(DATA)})

    run(tmp_path, after)
