"""Connections over a real socket: cancelling, draining, limits, policies, failures (R7)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from racerd.errors import ConfigError, SourceError
from racerd.ids import PageId
from racerd.serve.peer import OnlyUsers
from tests.support.memory_reader import MemoryReader
from tests.support.read_rig import content
from tests.support.socket_rig import Answer, Memory, RawClient, SocketRig, head

SIZE = 1_000_000
DATA = content(SIZE)
GET = head("GET /v1/objects/b/k")


def memory_reader() -> MemoryReader:
    reader = MemoryReader()
    reader.put(b"k", DATA)
    return reader


@pytest.mark.parametrize("half", [True, False], ids=["half-close", "close"])
@pytest.mark.parametrize(
    "line",
    ["GET /v1/objects/b/k", "POST /v1/host-read/b/k", "POST /v1/prefetch/b/k"],
)
def test_a_client_that_leaves_cancels_its_read(tmp_path: Path, line: str, half: bool) -> None:
    """R7: through the real read path, down to the origin's running fetch."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)
            await rig.client(lambda client: client.ask("HEAD /v1/objects/b/k"))
            rig.origin.hold()
            with RawClient(rig.path) as client, Memory(SIZE) as memory:
                client.send(head(line), [memory.fd] if "host-read" in line else [])
                await rig.until(lambda: rig.origin.running > 0)
                if half:
                    client.sock.shutdown(socket.SHUT_WR)
                else:
                    client.sock.close()
                await rig.connections(0)
                await rig.until(lambda: rig.origin.running == 0)
                assert rig.origin.cancelled > 0
                assert not any(memory.read())
                if half:
                    assert await asyncio.to_thread(client.ended)

    uvloop.run(main())


def test_a_client_that_does_not_read_is_waited_for_only_so_long(tmp_path: Path) -> None:
    """F58: the deadline ends a body that nobody takes; what is missing says so."""

    data = content(32 << 20)  # More than the kernel keeps for a socket.

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", data)
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as client:
                client.send(head("GET /v1/objects/b/k", "Racer-Deadline-Ms: 50"))
                await rig.until(
                    lambda: (
                        rig.metric("racer_connections_refused_total", reason="failed in the body")
                        == 1
                    )
                )
                answer = await asyncio.to_thread(client.receive_cut)
                assert answer.status == 200 and data.startswith(answer.body)

    uvloop.run(main())


def test_a_client_that_takes_nothing_of_a_body_is_cut(tmp_path: Path) -> None:
    """F58: long before a generous deadline, which would hold for so long what others wait for."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", bytes(32 << 20))
        async with SocketRig(tmp_path, reader, stall_seconds=0.02, stall_step_seconds=0.02) as rig:
            with RawClient(rig.path) as client:
                client.send(head("GET /v1/objects/b/k", "Racer-Deadline-Ms: 86400000"))
                await rig.until(
                    lambda: rig.metric("racer_connections_refused_total", reason="slow reader") == 1
                )
                await rig.connections(0)
                assert (await asyncio.to_thread(client.receive_cut)).status == 200

    uvloop.run(main())


def test_a_client_that_takes_nothing_is_cut_sooner_where_others_wait(tmp_path: Path) -> None:
    """F58: bodies that nobody takes hold the room for streams; the next reader gets it."""
    data = content(4 << 20)

    async def main() -> None:
        async with SocketRig(tmp_path, stall_step_seconds=0.02) as rig:
            rig.origin.put(b"k", data)
            streams = rig.reads.services.admission.streams
            with ExitStack() as stack:
                # Each holds a chunk at least: one more than there is room for.
                count = streams.limit // rig.reads.settings.stream_chunk_bytes + 1
                deaf = [stack.enter_context(RawClient(rig.path)) for _ in range(count)]
                for client in deaf:
                    client.send(head("GET /v1/objects/b/k", "Racer-Deadline-Ms: 86400000"))
                answer = await rig.client(lambda client: client.ask("GET /v1/objects/b/k"))
                assert answer.status == 200 and answer.body == data
                await rig.until(
                    lambda: rig.metric("racer_connections_refused_total", reason="slow reader") > 0
                )

    uvloop.run(main())


def test_a_client_that_takes_a_little_at_a_time_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F58: the kernel says "writable" late; what counts is that the queue becomes shorter."""
    queue = iter([1000, 990, 980, 970, 960, 960])
    monkeypatch.setattr("racerd.serve.connection.queued_bytes", lambda _: next(queue))

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", bytes(32 << 20))
        async with SocketRig(tmp_path, reader, stall_seconds=0.02, stall_step_seconds=0.02) as rig:
            with RawClient(rig.path) as client:
                client.send(GET)
                await rig.until(
                    lambda: rig.metric("racer_connections_refused_total", reason="slow reader") == 1
                )
                assert next(queue, None) is None, "it was cut while the queue became shorter"
                assert (await asyncio.to_thread(client.receive_cut)).status == 200

    uvloop.run(main())


def test_connections_are_described_in_plain_words(tmp_path: Path) -> None:
    """F66, R7: who holds what, and for how long, without a name or a byte of an object."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"secret", bytes(4 << 20))
            await rig.client(lambda client: client.ask("HEAD /v1/objects/b/secret"))
            await rig.connections(0)

            def described() -> dict[str, Any]:
                [connection] = rig.socket.connections
                return connection.describe()

            with RawClient(rig.path) as client, Memory(4096) as memory:
                await rig.connections(1)
                assert described()["client"] == "waits for a request"
                assert described()["pid"] == os.getpid() and described()["uid"] == os.getuid()
                await asyncio.to_thread(client.ask, "POST /v1/targets", fds=[memory.fd])
                assert (described()["targets"], described()["target_bytes"]) == (1, 4096)
                client.send("GET /v1/obj")
                await rig.until(lambda: "half a head" in described()["client"])
                rig.origin.hold()
                client.send(head("ects/b/secret"))
                await rig.until(lambda: rig.origin.running > 0)
                assert described()["client"] == "waits for the answer to get"
                rig.origin.release()
                await rig.until(lambda: described()["not_taken_bytes"] > 100_000)
                assert described()["client"] == "is being sent the answer to get"
                assert "secret" not in str(described()) and described()["seconds"] >= 0

    uvloop.run(main())


def test_a_deadline_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            reader.hold()

            def talk(client: RawClient) -> Answer:
                answer = client.ask("GET /v1/objects/b/k", "Racer-Deadline-Ms: 20")
                assert client.ask("GET /v1/info").status == 200
                return answer

            answer = await rig.client(talk)
            assert (answer.status, answer.code) == (504, "deadline_exceeded")
            assert reader.reading == 0

    uvloop.run(main())


def test_a_failure_in_the_body_shows_as_a_short_body(tmp_path: Path) -> None:
    """F55, F59: never as bytes of something else, and never as a whole answer."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)

            def fail_late(version: object, start: int, stop: int) -> None:
                if start >= 5 * 65_536:
                    raise SourceError("origin_unavailable", "gone")

            rig.origin.on_fetch = fail_late

            def talk(client: RawClient) -> Answer:
                client.send(GET)
                return client.receive_cut()

            answer = await rig.client(talk)
            assert answer.status == 200
            assert answer.fields["Content-Length"] == str(SIZE)
            assert len(answer.body) < SIZE and DATA.startswith(answer.body)
            labels = {"cache": "cache", "operation": "get", "status": "502"}
            assert rig.metric("racer_requests_total", **labels) == 1

    uvloop.run(main())


def test_a_defect_is_logged_once_and_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace for the operator, a code for the client, no payload for anybody."""

    async def main() -> Answer:
        reader = memory_reader()

        def break_down(page: PageId) -> None:
            raise LookupError("secret plaintext")

        reader.on_page = break_down
        async with SocketRig(tmp_path, reader) as rig:

            def talk(client: RawClient) -> Answer:
                answer = client.ask("GET /v1/objects/b/k")
                assert client.ask("GET /v1/info").status == 200
                return answer

            return await rig.client(talk)

    with caplog.at_level(logging.INFO):
        answer = uvloop.run(main())
    assert (answer.status, answer.code) == (500, "internal")
    assert b"secret" not in answer.body
    [record] = [r for r in caplog.records if r.name.startswith("racerd.serve")]
    assert record.exc_info is not None and "get failed on cache cache" in record.message


def test_a_slow_head_is_answered_and_cut(tmp_path: Path) -> None:
    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader(), head_seconds=0.02) as rig:

            def talk(client: RawClient) -> None:
                client.send("GET /v1/inf")
                answer = client.receive()
                assert (answer.status, answer.code) == (400, "bad_request")
                assert "took longer" in answer.json["error"]["message"]
                assert client.ended()

            await rig.client(talk)
            # Between two requests a connection may be quiet for as long as it likes.
            assert rig.metric("racer_connections_refused_total", reason="slow head") == 1

    uvloop.run(main())


def test_connections_beyond_the_limit_are_told(tmp_path: Path) -> None:
    """503 at once, for the next few; more than that are cut; room comes back."""

    async def main() -> None:
        limits = {"connections_max": 2, "surplus_max": 1}
        async with SocketRig(tmp_path, memory_reader(), **limits) as rig:
            with RawClient(rig.path) as first, RawClient(rig.path) as second:
                for client in (first, second):
                    answer = await asyncio.to_thread(client.ask, "GET /v1/info")
                    assert answer.status == 200
                with RawClient(rig.path) as third, RawClient(rig.path) as fourth:
                    # The fourth is answered before it asks; a third is kept for its request.
                    cut = await asyncio.to_thread(fourth.receive)
                    assert (cut.status, cut.code) == (503, "overloaded")
                    assert await asyncio.to_thread(fourth.ended)
                    refused = await asyncio.to_thread(third.ask, "GET /v1/info")
                    assert (refused.status, refused.code) == (503, "overloaded")
                    assert refused.fields["Retry-After"] == "1"
                    assert await asyncio.to_thread(third.ended)
                await rig.connections(2)
                first.sock.close()
                await rig.connections(1)
                await rig.client(lambda client: client.ask("GET /v1/info"))
            assert rig.metric("racer_connections_refused_total", reason="too many") == 2

    uvloop.run(main())


def test_a_refused_connection_does_not_stay(tmp_path: Path) -> None:
    """One that never asks gives its place up."""

    async def main() -> None:
        limits = {"connections_max": 0, "head_seconds": 0.02}
        async with SocketRig(tmp_path, memory_reader(), **limits) as rig:
            with RawClient(rig.path) as client:
                assert await asyncio.to_thread(client.ended)
            await rig.connections(0)

    uvloop.run(main())


def test_a_policy_decides_by_credentials(tmp_path: Path) -> None:
    """F77: the kernel says who is at the other end."""

    async def main() -> None:
        me = os.getuid()
        for users, status in ((frozenset({me}), 200), (frozenset({me + 1}), 403)):
            rig = SocketRig(tmp_path, memory_reader(), policy=OnlyUsers(users))
            async with rig:
                answer = await rig.client(lambda client: client.ask("GET /v1/info"))
                assert answer.status == status
                if status == 403:
                    assert answer.code == "forbidden"
                    assert f"user {me} may not" in answer.json["error"]["message"]
                    assert answer.fields["Connection"] == "close"

    uvloop.run(main())


def test_out_of_descriptors_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R5: accepting pauses, nothing spins, and it goes on when there are descriptors again."""

    async def main() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with SocketRig(tmp_path, memory_reader()) as rig:
            await rig.client(lambda client: client.ask("GET /v1/info"))
            await rig.connections(0)
            clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
            try:
                highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
                fillers = []
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
                try:
                    while True:
                        fillers.append(os.dup(0))
                except OSError:
                    pass
                clients[0].connect(os.fspath(rig.path))
                await rig.until(
                    lambda: (
                        rig.metric("racer_connections_refused_total", reason="no descriptors") == 1
                    )
                )
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for fd in fillers:
                    os.close(fd)
            await rig.connections(1)
            for client in clients:
                client.close()
            await rig.connections(0)
        assert "accepts no connection for 0.5 s: Too many open files" in caplog.text

    uvloop.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    """F78."""

    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as busy, RawClient(rig.path) as idle, Memory(SIZE) as memory:
                await asyncio.to_thread(idle.ask, "GET /v1/info")
                with RawClient(rig.path):
                    await rig.connections(3)
                await rig.connections(2)  # One has ended before.
                reader.hold()
                busy.send(head("POST /v1/host-read/b/k"), [memory.fd])
                await reader.arrived.wait()
                draining = asyncio.create_task(rig.socket.drain(30))
                await rig.until(lambda: rig.socket.state == "draining")
                refused = await asyncio.to_thread(idle.ask, "GET /v1/objects/b/k")
                assert (refused.status, refused.code) == (503, "draining")
                assert refused.fields["Connection"] == "close"
                assert int(refused.fields["Retry-After"]) >= 1
                with pytest.raises(FileNotFoundError):
                    RawClient(rig.path)
                assert not draining.done()
                reader.release()
                answer = await asyncio.to_thread(busy.receive)
                assert (answer.status, answer.fields["Connection"]) == (200, "close")
                assert memory.read() == DATA
                assert await draining == 0

    uvloop.run(main())


def test_draining_has_a_bound(tmp_path: Path) -> None:
    """F78: what does not end in time is cancelled when the socket is closed."""

    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            reader.hold()
            with RawClient(rig.path) as client:
                client.send(GET)
                await reader.arrived.wait()
                assert await rig.socket.drain(0.01) == 1
                await rig.socket.__aexit__(None, None, None)
                assert reader.reading == 0
                assert await asyncio.to_thread(client.ended)

    uvloop.run(main())


def test_draining_an_idle_socket_takes_no_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:
            with RawClient(rig.path) as client:
                await asyncio.to_thread(client.ask, "GET /v1/info")
                assert await rig.socket.drain(600) == 0
                # A client may still ask what is going on.
                answer = await asyncio.to_thread(client.ask, "GET /v1/info")
                assert answer.json["state"] == "draining"

    uvloop.run(main())


def test_closing_at_once_closes_what_was_just_let_in(tmp_path: Path) -> None:
    """R5: also connections whose task has not run yet, and those that wait to be let in."""

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:
            clients = [RawClient(rig.path) for _ in range(5)]
            rig.socket._on_acceptable()  # What the loop would call next.
            assert (rig.socket.connection_count, rig.socket.waiting_count) == (1, 4)
            await rig.socket.__aexit__(None, None, None)
            for client in clients:
                assert await asyncio.to_thread(client.ended)
                client.sock.close()

    uvloop.run(main())


def test_a_second_daemon_is_refused_and_a_dead_one_replaced(tmp_path: Path) -> None:
    """F77."""

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:
            second = SocketRig(tmp_path, memory_reader())
            with pytest.raises(ConfigError, match="another process listens"):
                await second.__aenter__()
            await second._stack.aclose()
            assert (await rig.client(lambda client: client.ask("GET /v1/info"))).status == 200
        assert not rig.path.exists()
        async with SocketRig(tmp_path, memory_reader()) as third:
            assert (await third.client(lambda client: client.ask("GET /v1/info"))).status == 200

    uvloop.run(main())


def test_the_socket_may_be_closed_by_another_task(tmp_path: Path) -> None:
    """R31: a cache is taken away by a reload, not by who opened it."""

    async def main() -> None:
        rig = SocketRig(tmp_path, memory_reader())
        await asyncio.create_task(rig.__aenter__())
        with RawClient(rig.path) as client:
            await asyncio.to_thread(client.ask, "GET /v1/info")
            await asyncio.create_task(rig.__aexit__())
            assert await asyncio.to_thread(client.ended)

    uvloop.run(main())


def test_exchanges_are_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:

            def talk(client: RawClient) -> None:
                for _ in range(3):
                    client.ask("GET /v1/objects/b/k", "Range: bytes=0-9")
                client.ask("HEAD /v1/objects/b/absent")

            await rig.client(talk)
            get = {"cache": "cache", "operation": "get"}
            assert rig.metric("racer_requests_total", **get, status="206") == 3
            assert rig.metric("racer_request_bytes_total", **get) == 30
            assert rig.metric("racer_request_seconds_count", **get) == 3
            failed = {"cache": "cache", "operation": "head", "status": "404"}
            assert rig.metric("racer_requests_total", **failed) == 1

    uvloop.run(main())


def test_many_clients_at_once(tmp_path: Path) -> None:
    """R32: everybody gets their own bytes, through the real read path."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)

            def talk(number: int) -> None:
                with RawClient(rig.path) as client, Memory(1 << 20) as memory:
                    target = client.ask("POST /v1/targets", fds=[memory.fd]).json["id"]
                    for i in range(6):
                        first = (number * 7919 + i * 104_729) % (SIZE - 70_000)
                        span = f"Range: bytes={first}-{first + 69_999}"
                        got = client.ask("POST /v1/host-read/b/k", f"Racer-Target: {target}", span)
                        assert got.json["bytes"] == 70_000
                        assert memory.read(0, 70_000) == DATA[first : first + 70_000]
                        assert client.ask("GET /v1/objects/b/k", span).body == memory.read(
                            0, 70_000
                        )

            await asyncio.gather(*(asyncio.to_thread(talk, number) for number in range(8)))

    uvloop.run(main())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_works_for_plain_operations(tmp_path: Path) -> None:
    """R3: a person with curl and this socket needs nothing else."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)
            rig.origin.put(b" odd+key%?#/", b"odd", etag='"o"')

            def curl(target: str, *options: str) -> bytes:
                command = ["curl", "-sS", "--unix-socket", os.fspath(rig.path), *options]
                done = subprocess.run(
                    [*command, f"http://racer{target}"], capture_output=True, timeout=30, check=True
                )
                return done.stdout

            def talk() -> None:
                assert json.loads(curl("/v1/info"))["cache"] == "cache"
                assert curl("/v1/objects/b/k") == DATA
                assert curl("/v1/objects/b/k", "-r", "100-199") == DATA[100:200]
                assert curl("/v1/objects/b/%20odd%2Bkey%25%3F%23/") == b"odd"
                assert b'ETag: "v1"' in curl("/v1/objects/b/k", "-I")
                assert json.loads(curl("/v1/prefetch/b/k", "-X", "POST"))["bytes"] == SIZE
                assert len(json.loads(curl("/v1/explain/b/k"))["pages"]) == 16
                assert json.loads(curl("/v1/evict/b/k", "-X", "POST"))["pages"] == 16
                listing = json.loads(curl("/v1/list/b/"))
                assert [entry["key"] for entry in listing["objects"]] == [
                    "%20odd%2Bkey%25%3F%23/",
                    "k",
                ]

            await asyncio.to_thread(talk)

    uvloop.run(main())


def test_a_read_that_fails_after_its_last_byte_answers_nothing_else(tmp_path: Path) -> None:
    """R6: the next request may have come already; the failure must not become its answer."""

    asked_again = asyncio.Event()

    class LateFailure(MemoryReader):
        async def stream(self, *arguments: Any) -> AsyncGenerator[memoryview, None]:
            try:
                async with aclosing(super().stream(*arguments)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                await asked_again.wait()
                raise LookupError("while letting go")

    async def main() -> None:
        reader = LateFailure()
        reader.put(b"k", b"short")
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as client:
                answer = await asyncio.to_thread(client.ask, "GET /v1/objects/b/k")
                assert answer.body == b"short"
                client.send(head("GET /v1/info"))
                await rig.until(lambda: any(c.busy for c in rig.socket._connections))
                asked_again.set()
                assert await asyncio.to_thread(client.ended)

    uvloop.run(main())
