"""Descriptors over a real socket: the right head gets them, and none is left (R5)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.support.memory_reader import MemoryReader
from tests.support.socket_rig import Memory, RawClient, SocketRig, head

READ = head("POST /v1/host-read/b/k")
HEAD = head("HEAD /v1/objects/b/k")
DATA = b"some bytes"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False  # That of the listing itself.


def serve(folder: Path, body: Callable[[SocketRig], object]) -> None:
    """Runs `body(rig)` in a thread; the daemon's descriptors must be what they were after it."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA)
        async with SocketRig(folder, reader) as rig:
            # Threads, and the loop's own descriptors, are made by the first connection.
            await rig.client(lambda client: client.ask("GET /v1/info"))
            before = descriptors()
            await asyncio.to_thread(body, rig)
            await rig.connections(0)
            assert descriptors() == before

    uvloop.run(main())


def test_head_and_the_start_of_a_host_read_in_one_receive(tmp_path: Path) -> None:
    """R5, R6, F67: the descriptor is not the HEAD's; it is closed, and so is the connection."""

    def body(rig: SocketRig) -> None:
        for rest in (READ[:1], READ[:20], READ):
            with RawClient(rig.path) as client, Memory(4096) as memory:
                client.send(HEAD + rest, [memory.fd])
                answer = client.receive(head_only=True)
                assert (answer.status, answer.fields["Connection"]) == (200, "close")
                assert client.ended()
                assert not any(memory.read())

    serve(tmp_path, body)


def test_two_sends_that_come_back_as_one_read(tmp_path: Path) -> None:
    """R5, F67: a HEAD without and a host-read with a descriptor, joined by the kernel."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA)
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as client, Memory(4096) as memory:
                # On the loop's own thread: the daemon cannot read in between.
                client.send(HEAD)
                client.send(READ, [memory.fd])
                answer = await asyncio.to_thread(client.receive, head_only=True)
                assert (answer.status, answer.fields["Connection"]) == (200, "close")
                assert await asyncio.to_thread(client.ended)
                assert not any(memory.read())
                # Asked again after the answer, it is served.
                with RawClient(rig.path) as again:
                    await asyncio.to_thread(again.ask, "HEAD /v1/objects/b/k")
                    again.send(READ, [memory.fd])
                    assert (await asyncio.to_thread(again.receive)).status == 200
                assert memory.read(0, len(DATA)) == DATA
            assert rig.metric("racer_descriptors_dropped_total") == 1

    uvloop.run(main())


def test_a_head_in_pieces_keeps_its_descriptor(tmp_path: Path) -> None:
    """R5: it came with the first byte, the head ends many receives later."""

    def body(rig: SocketRig) -> None:
        with RawClient(rig.path) as client, Memory(4096) as memory:
            client.send(READ[:1], [memory.fd])
            for letter in READ[1:]:
                client.send(letter)
            assert client.receive().json["bytes"] == len(DATA)
            assert memory.read(0, len(DATA)) == DATA

    serve(tmp_path, body)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_plain_request_takes_none(tmp_path: Path, count: int) -> None:
    """R5: they are closed, the request is refused, the connection goes on."""

    def body(rig: SocketRig) -> None:
        with RawClient(rig.path) as client, Memory(4096) as memory:
            for _ in range(3):
                answer = client.ask("GET /v1/info", fds=[memory.fd] * count)
                assert (answer.status, answer.code) == (400, "descriptor_unexpected")
            assert client.ask("GET /v1/info").status == 200

    serve(tmp_path, body)


@pytest.mark.parametrize("count", [5, 6, 64, 253])
def test_more_than_fit_are_closed_and_the_peer_is_dropped(tmp_path: Path, count: int) -> None:
    """R5, F69: MSG_CTRUNC. What the kernel dropped is unknown, so nothing is used."""

    def body(rig: SocketRig) -> None:
        with RawClient(rig.path) as client, Memory(4096) as memory:
            client.send(READ, [memory.fd] * count)
            answer = client.receive()
            assert (answer.status, answer.code) == (400, "bad_request")
            assert client.ended()
            assert not any(memory.read())

    serve(tmp_path, body)


def test_in_the_middle_of_a_head_it_is_nobodys(tmp_path: Path) -> None:
    """R5: it did not come with the first byte."""

    def body(rig: SocketRig) -> None:
        for cut in (1, 20, len(READ) - 1):
            with RawClient(rig.path) as client, Memory(4096) as memory:
                client.send(READ[:cut])
                client.send(READ[cut:], [memory.fd])
                try:
                    answer = client.receive()
                except EOFError:  # pragma: no cover
                    raise AssertionError("no answer") from None
                # Joined in one receive it belongs to the head that starts there, as it should.
                assert answer.status in (200, 400)
                if answer.status == 400:
                    assert answer.code == "descriptor_unexpected"
                    assert client.ended()

    serve(tmp_path, body)


def test_a_flood_during_a_request_is_closed(tmp_path: Path) -> None:
    """R5, R6: heads and descriptors that come while a request runs; the first one is answered."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA)
        async with SocketRig(tmp_path, reader) as rig:
            reader.hold()
            with RawClient(rig.path) as client, Memory(4096) as memory, Memory(4096) as other:
                before = descriptors()
                client.send(READ, [memory.fd])
                await reader.arrived.wait()
                for _ in range(50):
                    await asyncio.to_thread(client.send, READ, [other.fd] * 3)
                await rig.until(lambda: rig.metric("racer_descriptors_dropped_total") == 150)
                reader.release()
                answer = await asyncio.to_thread(client.receive)
                assert (answer.status, answer.fields["Connection"]) == (200, "close")
                assert await asyncio.to_thread(client.ended)
                assert memory.read(0, len(DATA)) == DATA
                assert not any(other.read())
                await rig.connections(0)
                # The accepted socket is closed by now; it was not open when `before` was taken.
                assert descriptors() == before - 1 or descriptors() == before

    uvloop.run(main())


def test_a_peer_that_never_stops_is_cut_off(tmp_path: Path) -> None:
    """R5, R6: more than a megabyte ahead of an answer."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA)
        async with SocketRig(tmp_path, reader) as rig:
            reader.hold()

            def flood(client: RawClient) -> None:
                client.send(HEAD.replace("HEAD", "GET"))
                for _ in range(1000):
                    try:
                        client.send(READ * 100)
                    except (BrokenPipeError, ConnectionResetError):
                        return
                raise AssertionError("the daemon takes everything")

            await rig.client(flood)
            await rig.connections(0)
            assert rig.metric("racer_connections_refused_total", reason="flood") == 1
            assert reader.reading == 0

    uvloop.run(main())


def test_death_in_each_phase_leaves_nothing(tmp_path: Path) -> None:
    """R5, R7: connected, in half a head, while it is served, after a registration."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA * 100_000)
        async with SocketRig(tmp_path, reader) as rig:
            await rig.client(lambda client: client.ask("GET /v1/info"))
            await rig.connections(0)
            before = descriptors()
            with Memory(2_000_000) as memory:
                start = READ[:20]
                for sent, fds in (("", []), (start, [memory.fd]), (start, [memory.fd] * 4)):
                    with RawClient(rig.path) as client:
                        if sent:
                            client.send(sent, fds)
                    await rig.connections(0)
                # While it runs.
                for text, fds in (
                    (READ, [memory.fd]),
                    (head("GET /v1/objects/b/k"), []),
                    (head("POST /v1/prefetch/b/k"), []),
                ):
                    reader.hold()
                    reader.arrived.clear()
                    with RawClient(rig.path) as client:
                        client.send(text, fds)
                        await reader.arrived.wait()
                    await rig.connections(0)
                    assert reader.reading == 0
                    reader.release()
                # In the body: the client reads some of it and leaves.
                with RawClient(rig.path) as client:
                    client.send(head("GET /v1/objects/b/k"))
                    await asyncio.to_thread(client.sock.recv, 1000)
                await rig.connections(0)
                # With a target registered, and with another head half sent.
                with RawClient(rig.path) as client:
                    answer = await asyncio.to_thread(
                        client.ask, "POST /v1/targets", fds=[memory.fd]
                    )
                    assert answer.status == 201
                    client.send(start, [memory.fd])
                await rig.connections(0)
            assert descriptors() == before

    uvloop.run(main())


def test_received_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """F70: close-on-exec from the moment they are received."""

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", DATA)
        async with SocketRig(tmp_path, reader) as rig:
            before = set(os.listdir("/proc/self/fd"))
            with RawClient(rig.path) as client, Memory(4096) as memory:
                ours = {str(client.sock.fileno()), str(memory.fd)}
                answer = await asyncio.to_thread(client.ask, "POST /v1/targets", fds=[memory.fd])
                assert answer.status == 201
                theirs = set(os.listdir("/proc/self/fd")) - before - ours
                inheritable = [fd for fd in theirs if _inheritable(int(fd))]
                assert inheritable == []

    uvloop.run(main())


def test_what_a_client_sends_is_no_socket_of_ours(tmp_path: Path) -> None:
    """F70: a received socket or listening socket is closed, and closing it closes nothing else."""

    def body(rig: SocketRig) -> None:
        for _ in range(20):
            first, second = socket.socketpair()
            with first, second, RawClient(rig.path) as client:
                answer = client.ask("POST /v1/targets", fds=[first.fileno()])
                assert answer.code == "target_not_memory"
                assert client.ask("GET /v1/info").status == 200
                second.send(b"still ours")
                assert first.recv(20) == b"still ours"

    serve(tmp_path, body)
