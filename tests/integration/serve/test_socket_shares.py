"""Shared memory through the socket: descriptors on the way back."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from pathlib import Path

import pytest
import uvloop

from racerd.units import MIB
from tests.support.memory_reader import MemoryReader
from tests.support.read_rig import content, small_settings
from tests.support.socket_rig import Answer, Memory, RawClient, SocketRig, head

SIZE = 5 * 65_536 + 17
DATA = content(SIZE)
CHUNK = 2 * 65_536
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def share(client: RawClient, *fields: str, line: str = "POST /v1/share/b/k") -> tuple[Answer, int]:
    """One exchange; returns the answer and its descriptor, or -1."""
    client.send(head(line, *fields))
    data, descriptors, flags, _ = socket.recv_fds(client.sock, 65_536, 4)
    client._buffer += data
    assert len(descriptors) <= 1
    assert not flags & socket.MSG_CTRUNC
    return client.receive(), descriptors[0] if descriptors else -1


def contents(descriptor: int, length: int) -> bytes:
    with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as mapping:
        return mapping[:]


def memory_rig(folder: Path) -> SocketRig:
    memory = MemoryReader()
    memory.put(b"k", DATA)
    memory.put(b"empty", b"")
    return SocketRig(folder, memory)


def real_rig(folder: Path, **settings: object) -> SocketRig:
    rig = SocketRig(folder)
    rig.reads.settings = small_settings(share_bytes=64 * MIB, **settings)
    rig.origin.put(b"k", DATA)
    return rig


def test_the_answer_brings_memory_that_holds_the_byte(tmp_path: Path) -> None:
    """R5: one read-only descriptor with the first byte; what it holds is in the answer."""

    def talk(client: RawClient) -> None:
        for at, start, stop in ((0, 0, CHUNK), (CHUNK - 1, 0, CHUNK), (SIZE - 1, 2 * CHUNK, SIZE)):
            answer, descriptor = share(client, f"Range: bytes={at}-")
            assert answer.status == 200
            assert answer.fields["ETag"] == '"v1"'
            shown = answer.json
            assert (shown["offset"], shown["bytes"], shown["size"]) == (start, stop - start, SIZE)
            assert contents(descriptor, stop - start) == DATA[start:stop]
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == SEALS
            os.close(descriptor)

    async def main() -> None:
        async with memory_rig(tmp_path) as rig:
            await rig.client(talk)

    uvloop.run(main())


def test_all_readers_get_the_same_memory(tmp_path: Path) -> None:
    """The second and the eighth cost no opening, and their rung says so."""

    async def main() -> None:
        async with real_rig(tmp_path) as rig:
            answers = await asyncio.gather(*(rig.client(share) for _ in range(8)))
            assert {answer.status for answer, _ in answers} == {200}
            inodes = {os.fstat(descriptor).st_ino for _, descriptor in answers}
            assert len(inodes) == 1
            rungs = sorted(next(iter(answer.json["rungs"])) for answer, _ in answers)
            assert rungs == ["origin", *["shared"] * 7]
            assert rig.metric("racer_shared_reads_total", result="filled") == 1
            for answer, descriptor in answers:
                assert contents(descriptor, answer.json["bytes"]) == DATA
                os.close(descriptor)

    uvloop.run(main())


def find_shared(client: RawClient, *fields: str) -> tuple[Answer, list[int]]:
    client.send(head("GET /v1/share/b/k", *fields))
    data, descriptors, flags, _ = socket.recv_fds(client.sock, 65_536, 32)
    client._buffer += data
    assert not flags & socket.MSG_CTRUNC
    return client.receive(), descriptors


def pieces(answer: Answer) -> list[tuple[int, int]]:
    return [(piece["offset"], piece["bytes"]) for piece in answer.json["pieces"]]


def test_what_is_shared_already_comes_in_one_answer(tmp_path: Path) -> None:
    """Nothing is opened for it; what is missing is left out, and so is what is asked for not."""
    chunk, big = 32 * MIB, content(3 * 32 * MIB + 100)

    async def main() -> None:
        rig = SocketRig(tmp_path)
        rig.reads.settings = small_settings(share_bytes=160 * MIB)
        rig.origin.put(b"k", big)
        async with rig:
            answer, descriptors = await rig.client(find_shared)
            assert (answer.status, answer.json["size"], pieces(answer)) == (200, len(big), [])
            assert not descriptors
            for at in (0, 2 * chunk, 3 * chunk):
                _, descriptor = await rig.client(lambda c, at=at: share(c, f"Range: bytes={at}-"))
                os.close(descriptor)
            fetched = rig.metric("racer_shared_reads_total", result="filled")
            answer, descriptors = await rig.client(find_shared)
            assert answer.fields["ETag"] == '"v1"'
            assert pieces(answer) == [(0, chunk), (2 * chunk, chunk), (3 * chunk, 100)]
            assert answer.json["pieces"][0]["rungs"] == {"shared": chunk}
            assert answer.json["share_chunk_bytes"] == chunk
            for (start, length), descriptor in zip(pieces(answer), descriptors, strict=True):
                assert contents(descriptor, length) == big[start : start + length]
                assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == SEALS
                os.close(descriptor)
            answer, descriptors = await rig.client(
                lambda c: find_shared(c, f"Range: bytes={chunk}-{3 * chunk - 1}")
            )
            assert pieces(answer) == [(2 * chunk, chunk)]
            os.close(*descriptors)
            assert rig.metric("racer_shared_reads_total", result="filled") == fetched

    uvloop.run(main())


def test_descriptors_that_nobody_takes_are_bounded(tmp_path: Path) -> None:
    """F5: the kernel counts what is on its way to clients against all of the daemon's. Who does
    not read gets no second answer, and others get fewer at a time."""

    async def main() -> None:
        rig = real_rig(tmp_path)
        async with rig:
            answer, descriptor = await rig.client(share)
            os.close(descriptor)
            room = rig.socket._room.descriptors
            room._limit = 2

            with RawClient(rig.path) as one, RawClient(rig.path) as two:
                for client in (one, two):
                    await asyncio.to_thread(client.send, head("GET /v1/share/b/k"))
                    await asyncio.to_thread(client.sock.recv, 1, socket.MSG_PEEK)
                answer, descriptors = await rig.client(find_shared)
                assert (answer.status, pieces(answer), descriptors) == (200, [], [])
            await rig.until(lambda: room.room == 2)
            answer, descriptors = await rig.client(find_shared)
            assert len(descriptors) == 1
            os.close(*descriptors)

    uvloop.run(main())


def test_info_says_how_objects_are_cut(tmp_path: Path) -> None:
    async def main() -> None:
        async with real_rig(tmp_path) as rig:
            info = (await rig.client(lambda client: client.ask("GET /v1/info"))).json
            assert info["share_chunk_bytes"] == 32 * MIB
        rig = SocketRig(tmp_path)
        async with rig:
            info = (await rig.client(lambda client: client.ask("GET /v1/info"))).json
            assert info["share_chunk_bytes"] == 0

    uvloop.run(main())


@pytest.mark.parametrize(
    ("line", "fields", "status", "code"),
    [
        ("POST /v1/share/b/k", ("Range: bytes=999999999-",), 416, "range_not_satisfiable"),
        ("POST /v1/share/b/empty", (), 416, "range_not_satisfiable"),
        ("POST /v1/share/b/missing", (), 404, "not_found"),
        ("POST /v1/share/b/k", ('If-Match: "other"',), 412, "version_changed"),
        ("GET /v1/share/b/k", ("Range: bytes=999999999-",), 416, "range_not_satisfiable"),
        ("GET /v1/share/b/missing", (), 404, "not_found"),
        ("GET /v1/share/b/k", ('If-Match: "other"',), 412, "version_changed"),
        ("DELETE /v1/share/b/k", (), 405, "method_not_allowed"),
    ],
)
def test_refusals_bring_no_descriptor(
    tmp_path: Path, line: str, fields: tuple[str, ...], status: int, code: str
) -> None:
    async def main() -> None:
        async with memory_rig(tmp_path) as rig:
            answer, descriptor = await rig.client(lambda c: share(c, *fields, line=line))
            assert (answer.status, answer.code, descriptor) == (status, code, -1)

    uvloop.run(main())


def test_where_nothing_is_shared(tmp_path: Path) -> None:
    async def main() -> None:
        rig = SocketRig(tmp_path)
        rig.origin.put(b"k", DATA)
        async with rig:
            answer, descriptor = await rig.client(share)
            assert (answer.status, answer.code, descriptor) == (422, "share_off", -1)

    uvloop.run(main())


def test_a_descriptor_that_comes_with_it_is_refused_and_closed(tmp_path: Path) -> None:
    """R5"""

    def talk(client: RawClient) -> Answer:
        with Memory(4096) as memory:
            return client.ask("POST /v1/share/b/k", fds=[memory.fd])

    async def main() -> None:
        async with memory_rig(tmp_path) as rig:
            assert (await rig.client(talk)).code == "descriptor_unexpected"
            assert rig.metric("racer_descriptors_dropped_total") == 1

    uvloop.run(main())


def test_a_reader_that_leaves_costs_nobody_anything(tmp_path: Path) -> None:
    """R7: the last reader who leaves ends the filling; its memory and its charge are free."""

    async def main() -> None:
        async with real_rig(tmp_path) as rig:
            await rig.client(lambda client: client.ask("HEAD /v1/objects/b/k"))
            rig.origin.hold()
            with RawClient(rig.path) as client:
                client.send(head("POST /v1/share/b/k"))
                await rig.reads.arrived()
                assert rig.metric("racer_budget_used_bytes", budget="share") == 2 * MIB
            await rig.connections(0)
            rig.origin.release()
            await rig.until(lambda: rig.metric("racer_budget_used_bytes", budget="share") == 0)

    uvloop.run(main())


def test_a_reader_that_never_looks_at_its_answer(tmp_path: Path) -> None:
    """R5, R7: the descriptor dies in the socket with the connection."""

    async def main() -> None:
        async with real_rig(tmp_path) as rig:
            with RawClient(rig.path) as client:
                client.send(head("POST /v1/share/b/k"))
                await rig.until(lambda: rig.metric("racer_shared_reads_total", result="filled") > 0)
                (shown,) = rig.reads.services.shares.describe()
                assert shown["in_use"], "it is on its way"
            await rig.connections(0)

            def in_use() -> bool:
                (shown,) = rig.reads.services.shares.describe()
                return bool(shown["in_use"])

            await rig.until(lambda: not in_use())  # The kernel may take a moment.

    uvloop.run(main())


def test_evicting_an_object_gives_its_memory_to_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with real_rig(tmp_path) as rig:
            _, old = await rig.client(share)
            await rig.client(lambda client: client.ask("POST /v1/evict/b/k"))
            answer, new = await rig.client(share)
            assert answer.json["rungs"] == {"origin": SIZE}
            assert os.fstat(old).st_ino != os.fstat(new).st_ino
            assert contents(old, SIZE) == contents(new, SIZE) == DATA
            os.close(old)
            os.close(new)

    uvloop.run(main())


def test_an_object_that_changes_is_shared_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with real_rig(tmp_path, version_seconds=0.0) as rig:
            _, old = await rig.client(share)
            rig.origin.put(b"k", DATA[::-1], etag='"v2"')
            answer, new = await rig.client(share)
            assert answer.fields["ETag"] == '"v2"'
            assert contents(old, SIZE) == DATA
            assert contents(new, SIZE) == DATA[::-1]
            os.close(old)
            os.close(new)

    uvloop.run(main())


def test_a_client_that_takes_no_answer_gets_no_second_descriptor(tmp_path: Path) -> None:
    """R5: descriptors on their way count against all of the daemon's together."""

    async def main() -> None:
        async with real_rig(tmp_path) as rig:

            def answered(status: str) -> bool:
                labels = {"cache": "cache", "operation": "share", "status": status}
                return rig.metric("racer_requests_total", **labels) == 1

            with RawClient(rig.path) as client:
                client.send(head("POST /v1/share/b/k"))
                await rig.until(lambda: answered("200"))
                client.send(head("POST /v1/share/b/k"))
                await rig.until(lambda: answered("503"))
                first, descriptors, _, _ = socket.recv_fds(client.sock, 65_536, 8)
                assert len(descriptors) == 1
                os.close(descriptors[0])
                client._buffer += first
                assert client.receive().status == 200
                assert client.receive().code == "share_full"

    uvloop.run(main())
