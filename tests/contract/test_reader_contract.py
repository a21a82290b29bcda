"""What the client socket relies on in a reader: one suite for the real one and the tests' own."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.read.gpu_disk import GpuDestination
from racerd.read.reader import CacheReader, RequestContext, Resolution
from racerd.runtime.deadline import Deadline
from racerd.serve.reader import Reader
from racerd.units import MIB
from tests.support.gpu_rig import GpuMemory
from tests.support.host_gpu import HostGpu
from tests.support.memory_reader import MemoryReader
from tests.support.read_rig import ReadRig, content, small_settings
from tests.support.scripted_origin import ScriptedOrigin

World = tuple[Reader, MemoryReader | ScriptedOrigin]
Body = Callable[[Reader, MemoryReader | ScriptedOrigin], Awaitable[None]]

SIZE = 3 * 65_536 + 1234
DATA = content(SIZE)


@asynccontextmanager
async def memory_world(folder: Path) -> AsyncIterator[World]:
    reader = MemoryReader()
    yield reader, reader


@asynccontextmanager
async def real_world(folder: Path) -> AsyncIterator[World]:
    settings = small_settings(share_bytes=64 * MIB)
    async with ReadRig(folder, settings=settings) as rig:
        yield rig.reader, rig.origin


WORLDS = {"memory": memory_world, "real": real_world}


@pytest.fixture(params=WORLDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Body], None]:
    """Runs the body of a test with a reader that has the object b/k."""

    def with_world(body: Body) -> None:
        async def main() -> None:
            async with WORLDS[request.param](tmp_path) as (reader, origin):
                origin.put(b"k", DATA)
                await body(reader, origin)

        uvloop.run(main())

    return with_world


def soon() -> Deadline:
    return Deadline.after(30)


def context() -> RequestContext:
    return RequestContext("connection", soon())


def name(key: bytes = b"k") -> ObjectId:
    return ObjectId("cache", "b", key)


async def current(reader: Reader, key: bytes = b"k") -> ObjectVersion:
    return (await reader.resolve(name(key), if_match=None, deadline=soon())).version


async def read(reader: Reader, version: ObjectVersion, start: int, stop: int) -> tuple[bytes, dict]:
    buffer = bytearray(b"\xaa" * (stop - start))
    report = await reader.read_into(version, start, stop, memoryview(buffer), context())
    assert report.bytes == stop - start == sum(report.rungs.values())
    return bytes(buffer), {rung: count for rung, count in report.rungs.items() if count}


def test_a_name_is_resolved(run: Callable[[Body], None]) -> None:
    """R3: size, ETag, and for how long that holds."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        for if_match in (None, '"v1"'):
            found = await reader.resolve(name(), if_match=if_match, deadline=soon())
            assert found.version == ObjectVersion(name(), '"v1"', SIZE)
            assert found.expires_in_seconds >= 0
        with pytest.raises(RequestError) as absent:
            await reader.resolve(name(b"absent"), if_match=None, deadline=soon())
        assert absent.value.code == "not_found"
        with pytest.raises(RequestError) as changed:
            await reader.resolve(name(), if_match='"other"', deadline=soon())
        assert (changed.value.code, changed.value.current_etag) == ("version_changed", '"v1"')

    run(body)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, SIZE), (0, 1), (SIZE - 1, SIZE), (65_535, 65_537), (5000, 140_000), (65_536, 131_072)],
)
def test_ranges_are_read(run: Callable[[Body], None], start: int, stop: int) -> None:
    """R1: the bytes of the range, and the rung that each came from."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        assert await read(reader, version, start, stop) == (
            DATA[start:stop],
            {"origin": stop - start},
        )
        # A read that follows at once may join the flight of the first; not one after this.
        await reader.prefetch(version, start, stop, context())
        again, rungs = await read(reader, version, start, stop)
        assert again == DATA[start:stop]
        assert "origin" not in rungs
        chunks = reader.stream(version, start, stop, context())
        assert b"".join([bytes(chunk) async for chunk in chunks]) == DATA[start:stop]

    run(body)


def test_nothing_may_be_read(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        assert await read(reader, version, 7, 7) == (b"", {})
        with pytest.raises(ValueError):
            await reader.read_into(version, 0, 10, memoryview(bytearray(9)), context())

    run(body)


def test_a_stream_may_be_left(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        chunks = reader.stream(version, 0, SIZE, context())
        first = bytes(await anext(chunks))
        assert DATA.startswith(first)
        await chunks.aclose()
        unused = reader.stream(version, 0, SIZE, context())
        await unused.aclose()

    run(body)


def test_versions_are_never_mixed(run: Callable[[Body], None]) -> None:
    """R3, F55: a read of a version that is gone fails, it does not go on with the next one."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        await read(reader, version, 0, 10)
        origin.put(b"k", DATA[::-1], etag='"v2"')
        with pytest.raises(RequestError) as changed:
            await read(reader, version, 0, SIZE)
        assert changed.value.code == "version_changed"
        found = await current(reader)
        assert found.etag == '"v2"'
        assert (await read(reader, found, 0, SIZE))[0] == DATA[::-1]

    run(body)


def test_what_handed_out_nothing_starts_over_once(run: Callable[[Body], None]) -> None:
    """R3, F51: an unpinned request follows the change, a pinned one is told of it."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        tried: list[str] = []

        async def attempt(resolution: Resolution) -> bytes:
            tried.append(resolution.version.etag)
            if len(tried) == 1:
                origin.put(b"k", DATA[::-1], etag='"v2"')
            return (await read(reader, resolution.version, 0, 100))[0]

        got = await reader.once_more_if_changed(
            name(), if_match=None, deadline=soon(), attempt=attempt
        )
        assert (got, tried) == (DATA[::-1][:100], ['"v1"', '"v2"'])

        async def changes_again(resolution: Resolution) -> None:
            raise RequestError("version_changed", "again")

        for if_match in (None, '"v2"'):
            with pytest.raises(RequestError, match="again"):
                await reader.once_more_if_changed(
                    name(), if_match=if_match, deadline=soon(), attempt=changes_again
                )

    run(body)


def test_what_was_prefetched_is_there(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        first = await reader.prefetch(version, 0, SIZE, context())
        assert first.rungs == {"origin": SIZE}
        again = await reader.prefetch(version, 0, SIZE, context())
        assert again.bytes == SIZE and "origin" not in again.rungs
        _, rungs = await read(reader, version, 0, SIZE)
        assert "origin" not in rungs

    run(body)


def test_what_was_evicted_is_gone(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        origin.put(b"kk", b"other")
        await reader.prefetch(await current(reader), 0, SIZE, context())
        await reader.prefetch(await current(reader, b"kk"), 0, 5, context())
        assert await reader.evict("b", b"absent", prefix=False) == (0, 0)
        assert await reader.evict("other", b"k", prefix=True) == (0, 0)
        pages, size = await reader.evict("b", b"k", prefix=False)
        assert pages == 4 and size >= SIZE  # On disk a page takes more than its bytes.
        assert (await read(reader, await current(reader), 0, SIZE))[1] == {"origin": SIZE}
        _, rungs = await read(reader, await current(reader, b"kk"), 0, 5)
        assert "origin" not in rungs
        # What was read is kept a moment later; a prefetch returns when it is.
        await reader.prefetch(await current(reader), 0, SIZE, context())
        pages, size = await reader.evict("b", b"k", prefix=True)
        assert pages == 5 and size >= SIZE + 5

    run(body)


def test_pins_are_kept_until_they_are_taken_back(run: Callable[[Body], None]) -> None:
    """R24: exact names and prefixes are different pins; a pin tells what it holds."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        await reader.prefetch(await current(reader), 0, SIZE, context())
        room = reader.pins.room_bytes
        assert room > 0
        pin = await reader.pins.pin("b", b"k", prefix=False)
        assert (pin.bucket, pin.key, pin.prefix, pin.pages) == ("b", b"k", False, 4)
        assert pin.bytes >= SIZE and reader.pins.room_bytes == room - pin.bytes
        assert await reader.pins.pin("b", b"k", prefix=False) == pin, "twice is once"
        everything = await reader.pins.pin("b", b"", prefix=True)
        assert everything.pages == 4 and everything.prefix
        assert await reader.pins.all() == [pin, everything]
        assert not await reader.pins.unpin("b", b"k", prefix=True)
        assert await reader.pins.unpin("b", b"k", prefix=False)
        assert await reader.pins.all() == [everything]
        assert await reader.pins.unpin("b", b"", prefix=True)
        assert await reader.pins.all() == [] and reader.pins.room_bytes == room

    run(body)


def test_pages_are_explained(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        # Read bytes come before the page is kept; prefetched pages are kept when it returns.
        await reader.prefetch(version, 0, 2 * 65_536, context())
        await read(reader, version, 65_536, 65_537)
        await read(reader, version, 0, 10)
        pages = await reader.explain(version, 0, 3 * 65_536)
        assert [page.index for page in pages] == [0, 1, 2]
        assert pages[2].rung == "origin" and pages[2].last is None
        assert pages[2].why and all(text for text in pages[2].why.values())
        for page in pages[:2]:
            assert page.rung in ("memory", "disk")
            assert page.last is not None and page.last[1] >= 0
        assert [page.index for page in await reader.explain(version, 70_000, 70_001)] == [1]

    run(body)


def test_listings_come_in_parts(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        for key in (b"a/1", b"a/2", b"a/b/3", b"a-", b"a/\xff", b"z"):
            origin.put(key, key, etag='"x"')
        keys = [b"a-", b"a/1", b"a/2", b"a/b/3", b"a/\xff", b"k", b"z"]

        async def collect(
            prefix: bytes, delimiter: bytes | None, limit: int
        ) -> tuple[list[bytes], list[bytes]]:
            found: tuple[list[bytes], list[bytes]] = ([], [])
            after: bytes | None = None
            while True:
                part = await reader.list_objects(
                    "b", prefix, delimiter=delimiter, after=after, limit=limit, deadline=soon()
                )
                assert len(part.objects) + len(part.prefixes) <= limit
                found[0].extend(entry.key for entry in part.objects)
                found[1].extend(part.prefixes)
                after = part.next
                if after is None:
                    return found

        for limit in (1, 2, 3, 100):
            assert await collect(b"", None, limit) == (keys, [])
            assert await collect(b"", b"/", limit) == ([b"a-", b"k", b"z"], [b"a/"])
            assert await collect(b"a/", b"/", limit) == ([b"a/1", b"a/2", b"a/\xff"], [b"a/b/"])
            assert await collect(b"nothing", None, limit) == ([], [])
        whole = await reader.list_objects(
            "b", b"a-", delimiter=None, after=None, limit=9, deadline=soon()
        )
        assert [(entry.key, entry.size) for entry in whole.objects] == [(b"a-", 2)]
        assert await reader.list_buckets(deadline=soon()) == ["b"]

    run(body)


def test_a_deadline_ends_a_read(run: Callable[[Body], None]) -> None:
    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        late = RequestContext("connection", Deadline.after(0))
        with pytest.raises(RacerError) as caught:
            await reader.read_into(version, 0, 10, memoryview(bytearray(10)), late)
        assert caught.value.code == "deadline_exceeded"

    run(body)


def test_a_cancelled_read_touches_nothing_more(run: Callable[[Body], None]) -> None:
    """R7: once cancelling returned, the memory is the caller's own."""

    async def body(reader: Reader, origin: MemoryReader | ScriptedOrigin) -> None:
        version = await current(reader)
        origin.hold()
        buffer = bytearray(b"\xaa" * SIZE)
        task = asyncio.ensure_future(
            reader.read_into(version, 0, SIZE, memoryview(buffer), context())
        )
        if isinstance(origin, ScriptedOrigin):
            assert await asyncio.to_thread(origin.arrived.acquire, timeout=20)
        else:
            await origin.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        buffer[:] = b"\xbb" * SIZE
        origin.release()
        assert (await read(reader, version, 0, SIZE))[0] == DATA
        assert buffer == b"\xbb" * SIZE

    run(body)


def test_shared_memory_holds_the_byte_that_was_asked_for(run) -> None:
    """It is cut on a grid, ends with the object, and nobody can write to it."""

    async def body(reader: Reader, origin: object) -> None:
        version = await current(reader)
        grid = reader.share_chunk_bytes
        assert grid % reader.geometry.page_bytes == 0
        for at in (0, SIZE - 1):
            piece = await reader.share(version, at, context())
            assert piece.start == at - at % grid
            assert piece.stop == min(piece.start + grid, SIZE)
            assert piece.report.bytes == piece.stop - piece.start
            assert (
                os.pread(piece.descriptor, SIZE, 0)[: piece.stop - piece.start]
                == (DATA[piece.start : piece.stop])
            )
            assert fcntl.fcntl(piece.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
            os.close(piece.descriptor)

    run(body)


def test_gpu_memory_gets_the_range_and_nothing_beside_it(run) -> None:
    """R2: from the offset of the destination on, and reported as what it was; a destination that
    does not fit is refused."""

    async def body(reader: Reader, origin: object) -> None:
        arena = reader._services.memory._arena if isinstance(reader, CacheReader) else None
        device = HostGpu(0, arena)
        with GpuMemory() as memory:
            target = await device.import_target(memory.send(), memory.size)
            version = await current(reader)
            for start, stop, offset in ((0, SIZE, 0), (65_000, 70_001, 7), (5, 6, 1)):
                memory.fill(0xEE)
                destination = GpuDestination(device, target, offset, stop - start)
                report = await reader.read_into_gpu(version, start, stop, destination, context())
                assert report.bytes == sum(report.rungs.values()) == stop - start
                end = offset + stop - start
                assert memory.bytes(offset, end) == DATA[start:stop]
                assert memory.bytes(end, end + 9) == b"\xee" * 9
            short = GpuDestination(device, target, 0, 5)
            with pytest.raises(ValueError):
                await reader.read_into_gpu(version, 0, 6, short, context())
            await device.release_target(target)
        device.close()

    run(body)
