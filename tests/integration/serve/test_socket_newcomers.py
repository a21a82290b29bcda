"""Connections that come in crowds: those that are there are served meanwhile, newcomers have a
share of the time and turns by who they are, and whoever has left before its turn costs nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from racerd.serve import doorkeeper
from racerd.serve.host_memory import HostMemory
from racerd.units import MIB
from tests.support.socket_rig import Answer, Memory, RawClient, SocketRig, head

CROWD = 12


def test_a_turn_of_the_loop_lets_one_connection_in(tmp_path: Path) -> None:
    """R7: however many come at once, work for those that are there goes on between any two of
    them."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            with ExitStack() as stack:
                for _ in range(CROWD):
                    stack.enter_context(RawClient(rig.path)).send(head("GET /v1/info"))
                counts = [rig.socket.connection_count]
                while counts[-1] < CROWD:
                    await asyncio.sleep(0)
                    counts.append(rig.socket.connection_count)
                steps = {after - before for before, after in pairwise(counts)}
                assert steps <= {0, 1}
            await rig.connections(0)

    uvloop.run(main())


def test_who_has_left_before_its_turn_is_not_served(tmp_path: Path) -> None:
    """R7: what it sent is dropped by the kernel, descriptors included; it is counted."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            before = len(os.listdir("/proc/self/fd"))
            with Memory(4096) as memory:
                for _ in range(CROWD):  # The loop has no turn meanwhile.
                    with RawClient(rig.path) as client:
                        client.send(head("POST /v1/targets"), [memory.fd])
            with RawClient(rig.path) as last:
                last.send(head("GET /v1/info"))
                answer: Answer = await asyncio.to_thread(last.receive)
            assert answer.status == 200
            await rig.connections(0)
            await rig.until(lambda: len(os.listdir("/proc/self/fd")) <= before)
            assert rig.metric("racer_connections_refused_total", reason="left") == CROWD
            assert not rig.metric("racer_descriptors_dropped_total")  # Never received.

    uvloop.run(main())


def shut(rig: SocketRig) -> None:
    """As if an established client were served, and newcomers had had their share."""
    rig.socket.keeper.door.work_began()
    rig.socket.keeper.entered()
    rig.socket.keeper.took(1000.0)


def open_again(rig: SocketRig) -> None:
    rig.socket.keeper.door.work_ended(time.perf_counter() - 1.0)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_newcomers_wait_while_others_are_served(tmp_path: Path) -> None:
    """F73: unread and unserved; then the daemon lets them in by itself."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            shut(rig)
            with RawClient(rig.path) as client:
                client.send(head("GET /v1/info"))
                await turns()
                assert rig.socket.connection_count == 0
                assert rig.metric("racer_newcomers_delayed_total", cache="cache",
                                  reason="door shut") == 1  # fmt: skip
                open_again(rig)
                answer: Answer = await asyncio.to_thread(client.receive)
            assert answer.status == 200
            await rig.connections(0)

    uvloop.run(main())


def test_who_leaves_at_a_shut_door_is_never_served(tmp_path: Path) -> None:
    """R7: nothing of it is read."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            shut(rig)
            for _ in range(CROWD):
                with RawClient(rig.path) as client:
                    client.send(head("GET /v1/info"))
            open_again(rig)
            await rig.until(
                lambda: rig.metric("racer_connections_refused_total", reason="left") == CROWD
            )
            assert not rig.metric(
                "racer_requests_total", cache="cache", operation="info", status="200"
            )

    uvloop.run(main())


_CONNECT = """if True:
    import socket, sys
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[1])
        print("connected", flush=True)
        sys.stdin.read()
"""


def connected_process(path: Path) -> subprocess.Popen[bytes]:
    """Another process, once it has connected; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CONNECT, os.fspath(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_processes_have_turns(tmp_path: Path) -> None:
    """F73: who connects often waits behind itself, and who connects once does not wait for it."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            shut(rig)
            with ExitStack() as stack:
                for _ in range(CROWD):
                    stack.enter_context(RawClient(rig.path))
                other = stack.enter_context(await asyncio.to_thread(connected_process, rig.path))
                open_again(rig)
                await rig.connections(CROWD + 1)
                came = [connection.peer.pid for connection in rig.socket.connections]
                assert came.index(other.pid) == 1
            await rig.connections(0)

    uvloop.run(main())


def test_the_waiting_room_is_bounded(tmp_path: Path) -> None:
    """R8: who finds no place waits in the kernel's backlog, and is let in later all the same."""

    async def main() -> None:
        async with SocketRig(tmp_path, waiting_max=2) as rig:
            shut(rig)
            with ExitStack() as stack:
                for _ in range(CROWD):
                    stack.enter_context(RawClient(rig.path))
                open_again(rig)
                most = 0

                def all_in() -> bool:
                    nonlocal most
                    most = max(most, rig.socket.waiting_count)
                    return rig.socket.connection_count == CROWD

                await rig.until(all_in)
                assert 0 < most <= 2
            await rig.connections(0)

    uvloop.run(main())


def test_who_was_served_long_enough_is_established(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F73: its exchanges, and no newcomer's, shut the door; one that is given up is over."""
    monkeypatch.setattr(doorkeeper, "PRICE_SECONDS", 0.0)

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", bytes(MIB))
            rig.origin.hold()
            door = rig.socket.keeper.door
            with RawClient(rig.path) as client:
                client.send(head("GET /v1/objects/b/k"))
                await rig.until(lambda: any(one.busy for one in rig.socket.connections))
                assert door.working == 0
            await rig.connections(0)
            with RawClient(rig.path) as client:
                await asyncio.to_thread(client.ask, "GET /v1/info")
                [connection] = rig.socket.connections
                await rig.until(lambda: connection.describe()["established"] is True)
                client.send(head("GET /v1/objects/b/k"))
                await rig.until(lambda: door.working == 1)
            await rig.connections(0)
            assert door.working == 0

    uvloop.run(main())


@pytest.mark.parametrize("refused", [False, True])
def test_big_targets_are_freed_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """R7, R8: unmapping gigabytes, and freeing what a dead client leaves behind, takes long: the
    loop does neither, also where the target was refused."""
    threads: list[str] = []
    close = HostMemory.close

    def closing(memory: HostMemory) -> None:
        threads.append(threading.current_thread().name)
        close(memory)

    monkeypatch.setattr(HostMemory, "close", closing)

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            with Memory(4 * MIB, seals=0) if refused else Memory(4 * MIB) as memory:
                answer = await rig.client(
                    lambda client: client.ask("POST /v1/targets", fds=[memory.fd])
                )
            assert answer.status == (422 if refused else 201)
            await rig.connections(0)

    uvloop.run(main())
    assert threads == ["targets-0"]
