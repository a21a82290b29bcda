"""The asyncio client: the same answers, cancelled cleanly, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
import uvloop

import racer
from clients.python.racer.tests.fake_daemon import HANG_UP, FakeDaemon, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.transfer import PART_BYTES, RING_PART_BYTES

Run = Callable[[Awaitable[None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def test_calls_of_the_async_client(daemon: FakeDaemon, run: Run) -> None:
    """R1, R3: stat, read, read_into, map, stream, landing, list and the rest, awaitable."""
    data = pattern(3 * PART_BYTES + 17)
    url = daemon.put("llama", "weights", data)
    small = daemon.put("llama", "config.json", b"0123456789")

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            assert (await client.stat(url)).size == len(data)
            assert await client.read(small) == b"0123456789"
            assert await client.read(small, 2, 3) == b"234"
            assert await client.read(small, 3, 0) == b""
            assert await client.read(url, 5) == data[5:]
            buffer = bytearray(len(data))
            assert await client.read_into(url, buffer) == len(data)
            assert buffer == data
            assert await client.read_into(small, bytearray(100)) == 10
            async with client.map(url, 1) as view:
                assert view == data[1:]
            mapped = await client.map(small)
            assert bytes(mapped.view) == b"0123456789"
            mapped.close()
            async with aclosing(client.stream(url, 3)) as chunks:
                assert b"".join([bytes(chunk) async for chunk in chunks]) == data[3:]
            async with await client.landing(PART_BYTES + MIB) as landing:
                done = await landing.read(url, 7, PART_BYTES + 5, at=3)
                assert (done.bytes, done.rungs) == (PART_BYTES + 5, {"memory": PART_BYTES + 5})
                assert landing.view[3 : PART_BYTES + 8] == data[7 : PART_BYTES + 12]
            assert [e.url async for e in client.list("racer://local/llama/")] == [small, url]
            assert (await client.prefetch(url)).pages == 1
            assert (await client.evict(url)).pages == 2
            assert (await client.pin(url)).pages == 1
            assert (await client.pins("local")).pins[0].url == url
            assert (await client.unpin(url)).removed
            assert (await client.explain(url)).pages[0].rung == "disk"
            assert (await client.info("local")).page_bytes == MIB
            with pytest.raises(racer.NotFound):
                await client.stat("racer://local/llama/nothing")
            with pytest.raises(racer.VersionChanged):
                await client.read(url, etag='"v0"')
        with pytest.raises(racer.Closed):
            await client.stat(url)

    run(main())
    daemon.wait_for_clients()
    assert not daemon.targets


def test_many_tasks_share_a_client(daemon: FakeDaemon, run: Run) -> None:
    urls = {daemon.put("llama", f"file-{n}", bytes([n]) * (600_000 + n)): n for n in range(12)}

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:

            async def work(url: str, n: int) -> None:
                for _ in range(3):
                    assert await client.read(url) == bytes([n]) * (600_000 + n)

            async with asyncio.TaskGroup() as group:
                for url, n in urls.items():
                    group.create_task(work(url, n))

    run(main())


def test_cancelling_a_read_ends_it(daemon: FakeDaemon, run: Run) -> None:
    """R7: the connections close, the memory is not used again, the client goes on."""
    data = pattern(6 * RING_PART_BYTES)
    url = daemon.put("llama", "weights", data)
    asked, release = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        asked.set()
        release.wait(30)

    daemon.on("POST /v1/host-read", hold, hold, hold, hold)

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            buffer = bytearray(len(data))
            reading = asyncio.ensure_future(client.read_into(url, buffer))
            await asyncio.to_thread(asked.wait, 30)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert len(asyncio.all_tasks()) == 1
            buffer.clear()  # Nothing holds it any more.
            registered = daemon.count("POST /v1/targets")
            release.set()
            assert await client.read(url, 0, MIB) == data[:MIB]
            assert daemon.count("POST /v1/targets") > registered

    run(main())


def test_cancelled_landing_is_lost(daemon: FakeDaemon, run: Run) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    asked, release = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        asked.set()
        release.wait(30)

    daemon.on("POST /v1/host-read", hold)

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            async with await client.landing(MIB) as landing:
                reading = asyncio.ensure_future(landing.read(url, 0, MIB))
                await asyncio.to_thread(asked.wait, 30)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                release.set()
                assert landing.lost
                with pytest.raises(racer.MemoryLost):
                    await landing.read(url, 0, MIB)

    run(main())


def test_retries_and_fallback(
    daemon: FakeDaemon, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """R4: Overloaded and lost connections are tried again; a refused target is streamed."""
    data = pattern(2 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    daemon.on("HEAD", error(503, "overloaded", "same"), HANG_UP)
    daemon.on("POST /v1/host-read", None, HANG_UP)

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            buffer = bytearray(len(data))
            assert await client.read_into(url, buffer) == len(data)
            assert buffer == data
        daemon.always("POST /v1/targets", error(422, "target_sparse"))
        daemon.always("POST /v1/host-read", error(422, "target_sparse"))
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            assert await client.read(url) == data
            async with client.map(url) as view:
                assert view == data
            async with await client.landing(PART_BYTES + 9) as landing:
                done = await landing.read(url, 1, PART_BYTES + 9)
                assert done.rungs == {"stream": PART_BYTES + 9}
                assert landing.view == data[1 : PART_BYTES + 10]

    run(main())
    assert [record.levelname for record in caplog.records if record.name == "racer"] == ["WARNING"]
    assert "target_sparse" in caplog.text


def test_short_body_is_an_error(daemon: FakeDaemon, run: Run) -> None:
    """F59: a body that ends early is never returned."""
    url = daemon.put("llama", "config.json", b"0123456789")

    def cut(seen: Seen) -> object:
        reply = daemon._answer(seen, [])
        reply.cut = len(reply.encode()) - 3
        return reply

    daemon.always("GET /v1/objects", cut)

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=30) as client:
            with pytest.raises(racer.ConnectionLost, match="ended after 7 of 10 bytes"):
                await client.read(url)

    run(main())
    assert daemon.count("GET /v1/objects") == 6


def test_a_daemon_that_is_silent(daemon: FakeDaemon, run: Run, monkeypatch: object) -> None:
    """A read is never stuck: a daemon that does not keep the deadline is left."""
    url = daemon.put("llama", "config.json", b"0123456789")
    release = threading.Event()
    daemon.on("HEAD", lambda seen: release.wait(30) and None)
    monkeypatch.setattr("racer.deadline.GRACE_SECONDS", 0.0)

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=0.2) as client:
            with pytest.raises(racer.DeadlineExceeded, match=r"nothing came for 0\.2 seconds"):
                await client.stat(url)

    run(main())
    release.set()
