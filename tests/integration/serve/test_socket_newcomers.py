"""Connections that come in crowds: those that are there are served meanwhile, and whoever has left
before its turn costs nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

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
