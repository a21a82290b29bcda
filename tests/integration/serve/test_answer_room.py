"""What clients that ask and do not read may make the daemon hold: a bounded amount (L9, F58)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from racerd.serve.send_buffers import LARGE_BYTES, SMALL_BYTES, SendBuffers
from racerd.units import KIB, MIB
from tests.support.memory_reader import MemoryReader
from tests.support.socket_rig import Answer, RawClient, SocketRig, head


@contextmanager
def pairs(count: int) -> Iterator[list[socket.socket]]:
    """Sending sides of `count` connections that nobody reads from."""
    with ExitStack() as stack:
        sending = []
        for _ in range(count):
            one, other = socket.socketpair()
            stack.enter_context(one)
            stack.enter_context(other)
            one.setblocking(False)
            sending.append(one)
        yield sending


def fill(sock: socket.socket) -> int:
    """How much the kernel takes for somebody who does not read."""
    taken = 0
    try:
        while True:
            taken += sock.send(bytes(16 * KIB))
    except BlockingIOError:
        return taken


def test_large_buffers_are_few_and_go_round() -> None:
    """L9: however many connections there are, large buffers take up no more than their total."""
    buffers = SendBuffers(2 * 2 * LARGE_BYTES)
    with pairs(4) as (first, second, third, fourth):
        for sock in (first, second, third, fourth):
            buffers.start(sock)
        assert fill(fourth) <= 2 * SMALL_BYTES
        assert not buffers.lend_on(first), "nobody wants one"
        assert buffers.grow(first) and buffers.grow(second) and not buffers.grow(third)
        assert fill(first) > 8 * SMALL_BYTES and fill(third) <= 2 * SMALL_BYTES
        assert not buffers.lend_on(first), "what it holds is not read yet"
        assert buffers.lend_on(second) and buffers.grow(third)
        assert fill(second) <= 2 * SMALL_BYTES
        buffers.give_back()  # The first one was closed.
        assert buffers.grow(fourth)


def test_many_deaf_streams_take_up_little(tmp_path: Path) -> None:
    """L9, F58: the kernel's memory for what nobody reads is bounded over all connections; those
    that do read get everything."""
    data = bytes(range(256)) * (16 * KIB)

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", data)
        async with SocketRig(tmp_path, reader, send_buffers_bytes=2 * LARGE_BYTES) as rig:
            with ExitStack() as stack:
                deaf = [stack.enter_context(RawClient(rig.path)) for _ in range(8)]
                for client in deaf:
                    client.send(head("GET /v1/objects/b/k"))
                answer = await rig.client(lambda client: client.ask("GET /v1/objects/b/k"))
                assert answer.body == data

                def waiting() -> list[int]:
                    return [len(c.sock.recv(4 * MIB, socket.MSG_PEEK)) for c in deaf]

                held = sorted(await asyncio.to_thread(waiting))
                assert sum(size > 2 * SMALL_BYTES for size in held) <= 1, held

    uvloop.run(main())


def test_lengthy_answers_wait_for_their_turn(tmp_path: Path) -> None:
    """L9: an explanation that nobody reads is held once, not once for each who asks; the next one
    is told when to come again, and gets its turn then."""
    pages = 2048
    ask = "GET /v1/explain/b/k"

    async def main() -> None:
        reader = MemoryReader()
        reader.put(b"k", bytes(pages * reader.geometry.page_bytes))
        room = {"answers_bytes": 8 * MIB, "turn_seconds": 0.02}
        async with SocketRig(tmp_path, reader, **room) as rig:
            with RawClient(rig.path) as deaf:
                deaf.send(head(ask))
                await asyncio.to_thread(deaf.sock.recv, 1, socket.MSG_PEEK)

                def refused(client: RawClient) -> Answer:
                    answer = client.ask(ask)
                    assert client.ask("GET /v1/info").status == 200, "short ones need no turn"
                    return answer

                answer = await rig.client(refused)
                assert (answer.status, answer.code) == (503, "overloaded")
                assert int(answer.fields["Retry-After"]) >= 1
                assert rig.metric("racer_overloaded_total", budget="answers") == 1
            await rig.connections(0)
            answer = await rig.client(lambda client: client.ask(ask))
            assert answer.status == 200 and len(answer.json["pages"]) == pages

    uvloop.run(main())
