"""Registered targets over a real socket: lifetimes, limits, and memory that is refused."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from pathlib import Path

import pytest
import uvloop

from racerd.errors import RequestError
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import WorkerThreads
from racerd.serve import targets
from racerd.serve.descriptors import ReceivedDescriptor
from racerd.serve.peer import PeerCredentials
from racerd.serve.targets import TargetRegistry
from racerd.telemetry import Metrics
from racerd.wire.messages import RegisterTarget
from tests.support.memory_reader import MemoryReader
from tests.support.read_rig import content
from tests.support.socket_rig import Answer, Memory, RawClient, SocketRig, head

SIZE = 300_000
DATA = content(SIZE)


def memory_reader() -> MemoryReader:
    reader = MemoryReader()
    reader.put(b"k", DATA)
    return reader


def register(client: RawClient, memory: Memory) -> str:
    answer = client.ask("POST /v1/targets", fds=[memory.fd])
    assert answer.status == 201, answer
    return str(answer.json["id"])


def read(client: RawClient, target_id: str, *fields: str) -> Answer:
    return client.ask("POST /v1/host-read/b/k", f"Racer-Target: {target_id}", *fields)


def test_ids_cannot_be_guessed_and_work_on_other_connections(tmp_path: Path) -> None:
    """R1: several connections of one user fill one target."""

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:

            def talk(client: RawClient) -> None:
                with Memory(1 << 20) as memory, RawClient(rig.path) as other:
                    first, second = register(client, memory), register(client, memory)
                    assert len(first) == len(second) == 32 and first != second
                    assert read(other, first, "Racer-Target-Offset: 500000").status == 200
                    assert read(client, second, "Range: bytes=10-19").status == 200
                    assert memory.read(500_000, SIZE) == DATA
                    assert memory.read(0, 10) == DATA[10:20]
                    assert read(other, "0" * 32).code == "target_unknown"
                    # Another connection of the same user may give it back, too.
                    assert other.ask(f"DELETE /v1/targets/{first}").status == 200
                    assert read(client, first).code == "target_unknown"

            await rig.client(talk)

    uvloop.run(main())


def test_a_target_ends_with_its_connection(tmp_path: Path) -> None:
    """R7: whoever else uses it is told, and nothing of it stays mapped."""

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:
            with RawClient(rig.path) as other, Memory(1 << 20) as memory:
                with RawClient(rig.path) as client:
                    target_id = await asyncio.to_thread(register, client, memory)
                    assert (await asyncio.to_thread(read, other, target_id)).status == 200
                    assert rig.metric("racer_target_mapped_bytes", kind="host") == 1 << 20
                await rig.connections(1)
                assert rig.metric("racer_target_mapped_bytes", kind="host") == 0
                assert (await asyncio.to_thread(read, other, target_id)).code == "target_unknown"

    uvloop.run(main())


def test_deleting_cancels_reads_and_waits_for_them(tmp_path: Path) -> None:
    """R7: DELETE answers when nothing touches the memory any more, and not before."""

    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            with (
                RawClient(rig.path) as client,
                RawClient(rig.path) as other,
                Memory(1 << 20) as memory,
            ):
                target_id = await asyncio.to_thread(register, client, memory)
                reader.hold(cling=True)
                reading = asyncio.create_task(asyncio.to_thread(read, other, target_id))
                await reader.arrived.wait()
                deleting = asyncio.create_task(
                    asyncio.to_thread(client.ask, f"DELETE /v1/targets/{target_id}")
                )
                await reader.cancelled.wait()
                # The read was told to stop and still uses the memory: no answer yet.
                assert rig.metric("racer_target_mapped_bytes", kind="host") == 1 << 20
                assert not deleting.done() and not reading.done()
                reader.release()
                assert (await reading).code == "target_unknown"
                assert (await deleting).status == 200
                # Both connections live on.
                assert (await asyncio.to_thread(other.ask, "GET /v1/info")).status == 200
                assert (await asyncio.to_thread(client.ask, "GET /v1/info")).status == 200

    uvloop.run(main())


def test_the_end_of_a_connection_waits_for_reads_of_others(tmp_path: Path) -> None:
    """R7: the mapping stays until the read into it has let go."""

    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as other, Memory(1 << 20) as memory:
                with RawClient(rig.path) as client:
                    target_id = await asyncio.to_thread(register, client, memory)
                    reader.hold(cling=True)
                    reading = asyncio.create_task(asyncio.to_thread(read, other, target_id))
                    await reader.arrived.wait()
                await reader.cancelled.wait()
                assert rig.metric("racer_target_mapped_bytes", kind="host") == 1 << 20
                reader.release()
                assert (await reading).code == "target_unknown"

    uvloop.run(main())


def test_a_client_that_leaves_while_deleting_is_no_trouble(tmp_path: Path) -> None:
    """R7: the release runs to its end."""

    async def main() -> None:
        reader = memory_reader()
        async with SocketRig(tmp_path, reader) as rig:
            with RawClient(rig.path) as other, Memory(1 << 20) as memory:
                with RawClient(rig.path) as client:
                    target_id = await asyncio.to_thread(register, client, memory)
                    reader.hold(cling=True)
                    reading = asyncio.create_task(asyncio.to_thread(read, other, target_id))
                    await reader.arrived.wait()
                    client.send(head(f"DELETE /v1/targets/{target_id}"))
                    await reader.cancelled.wait()
                reader.release()
                assert (await reading).code == "target_unknown"
                await rig.connections(1)
                assert rig.metric("racer_target_mapped_bytes", kind="host") == 0

    uvloop.run(main())


def test_a_connection_holds_a_limited_number(tmp_path: Path) -> None:
    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:

            def talk(client: RawClient) -> None:
                with Memory(4096) as memory:
                    ids = [register(client, memory) for _ in range(64)]
                    refused = client.ask("POST /v1/targets", fds=[memory.fd])
                    assert (refused.status, refused.code) == (503, "targets_too_many")
                    assert int(refused.fields["Retry-After"]) >= 1
                    assert client.ask(f"DELETE /v1/targets/{ids[7]}").status == 200
                    register(client, memory)

            await rig.client(talk)
            assert rig.metric("racer_targets_refused_total", code="targets_too_many") == 1

    uvloop.run(main())


def test_targets_leave_descriptors_to_others(tmp_path: Path) -> None:
    """R5, F26: all connections of a cache together may take an eighth of what the process has."""

    async def main() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (800, hard))
        try:
            async with SocketRig(tmp_path, memory_reader()) as rig:

                def talk(client: RawClient) -> None:
                    with Memory(4096) as memory, RawClient(rig.path) as other:
                        for _ in range(64):
                            register(client, memory)
                        for _ in range(800 // 8 - 64):
                            register(other, memory)
                        refused = other.ask("POST /v1/targets", fds=[memory.fd])
                        assert (refused.status, refused.code) == (503, "targets_too_many")

                await rig.client(talk)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    uvloop.run(main())


def test_targets_that_are_being_opened_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F26: the limit holds for targets that are checked and mapped side by side, on threads."""
    monkeypatch.setattr(targets, "_INLINE_BYTES_MAX", 0)
    clients, limit = 4, 1

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader(), targets_max=limit) as rig:
            ready = threading.Barrier(clients, timeout=30)

            def talk(client: RawClient) -> int:
                with Memory(8 << 20) as memory:
                    ready.wait()
                    status = client.ask("POST /v1/targets", fds=[memory.fd]).status
                    ready.wait()
                    return status

            statuses = await asyncio.gather(*(rig.client(talk) for _ in range(clients)))
            assert sorted(statuses) == [201] * limit + [503] * (clients - limit)

    uvloop.run(main())


def test_big_targets_do_not_hold_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking and mapping are moved to a thread; the result is the same."""
    monkeypatch.setattr(targets, "_INLINE_BYTES_MAX", 0)

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:

            def talk(client: RawClient) -> None:
                with Memory(1 << 20) as memory, Memory(1 << 20, seals=0) as bad:
                    assert read(client, register(client, memory)).status == 200
                    assert memory.read(0, SIZE) == DATA
                    assert client.ask("POST /v1/targets", fds=[bad.fd]).code == "target_unsealed"
                    one = client.ask("POST /v1/host-read/b/k", fds=[memory.fd])
                    assert one.status == 200

            await rig.client(talk)

    uvloop.run(main())


def test_a_target_belongs_to_a_user() -> None:
    """R8: an id that leaked is of no use to another user of the same cache."""

    async def main() -> None:
        metrics = Metrics()
        mine, theirs = PeerCredentials(1, 1000, 1000), PeerCredentials(2, 1001, 1000)
        async with WorkerThreads("targets", 1) as threads:
            registry = TargetRegistry(threads, metrics, per_holder_max=4, targets_max=4)
            with Memory(4096) as memory, ReceivedDescriptor(os.dup(memory.fd)) as received:
                target_id, target = await registry.register(
                    RegisterTarget("host"), received, "holder", mine, Deadline.after(60)
                )
            assert registry.find(target_id, mine) is target
            with pytest.raises(RequestError, match="no such target"):
                registry.find(target_id, theirs)
            with pytest.raises(RequestError, match="no such target"):
                await registry.release(target_id, theirs)
            await registry.release_all("holder")
            assert len(registry) == 0

    uvloop.run(main())


def test_a_read_that_runs_past_the_target_writes_nothing(tmp_path: Path) -> None:
    """R8: too small, by target and one-shot."""

    async def main() -> None:
        async with SocketRig(tmp_path, memory_reader()) as rig:

            def talk(client: RawClient) -> None:
                with Memory(SIZE) as memory:
                    target_id = register(client, memory)
                    offset = "Racer-Target-Offset: 1"
                    for answer in (
                        read(client, target_id, offset),
                        client.ask("POST /v1/host-read/b/k", offset, fds=[memory.fd]),
                    ):
                        assert (answer.status, answer.code) == (422, "target_too_small")
                    assert not any(memory.read())
                    assert read(client, target_id, "Range: bytes=1-", offset).status == 200
                    assert memory.read(1) == DATA[1:]

            await rig.client(talk)

    uvloop.run(main())
