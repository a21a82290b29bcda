"""Clients that die by SIGKILL in the middle of something, as processes of their own (R7, F91)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from tests.support.read_rig import content
from tests.support.socket_rig import SocketRig

SIZE = 1_000_000
DATA = content(SIZE)

# What a client does until it is killed: it gets as far as it can, says so, and waits for the end.
PRELUDE = """
import os, signal, sys
from pathlib import Path
from tools.torture.hostile import Connection, head
from tools.torture.hostile_targets import memory
client = Connection(Path(sys.argv[1]))
kept = memory(1_000_000)
fd = kept.__enter__()
def registered():
    return "Racer-Target: " + client.ask("POST /v1/targets", fds=[fd]).json("id")
"""
WAITING = """
print("waiting", flush=True)
signal.pause()
"""
PHASES = {
    "half a head": "client.send(head('GET /v1/objects/b/k')[:20])",
    "a head and a descriptor": "client.send(head('POST /v1/targets')[:20], [fd])",
    "a target": "registered()",
    "a get": "client.send(head('GET /v1/objects/b/k'))",
    "a prefetch": "client.send(head('POST /v1/prefetch/b/k'))",
    "a one-shot read": "client.send(head('POST /v1/host-read/b/k'), [fd])",
    "a read into a target": "client.send(head('POST /v1/host-read/b/k', registered()))",
}
READING = {"a get", "a prefetch", "a one-shot read", "a read into a target"}


@asynccontextmanager
async def dying(rig: SocketRig, script: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A client that has come to where it waits."""
    command = [sys.executable, "-c", PRELUDE + script + WAITING, str(rig.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220  it takes no time
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"waiting\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def mapped_here() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hostile")


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_client_is_noticed_and_its_memory_let_go(tmp_path: Path, phase: str) -> None:
    """R7, F71, F91: the kernel hangs up for the dead; reads end, and mappings with them, while the
    origin still takes its time."""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", DATA)
            async with dying(rig, "client.ask('HEAD /v1/objects/b/k')"):
                pass  # The version is known from here on: reads go straight to the bytes.
            await rig.connections(0)
            rig.origin.hold()
            async with dying(rig, PHASES[phase]) as process:
                if phase in READING:
                    await rig.until(lambda: rig.origin.running > 0)
                if "target" in phase or "one-shot" in phase:
                    assert mapped_here() > 0
                    assert rig.metric("racer_target_mapped_bytes", kind="host") == SIZE
                process.kill()
                await rig.connections(0)
                assert mapped_here() == 0
                assert rig.metric("racer_target_mapped_bytes", kind="host") == 0
                await rig.until(lambda: rig.origin.running == 0)
                assert (rig.origin.cancelled > 0) == (phase in READING)

    uvloop.run(main())


def test_a_client_killed_in_a_body_is_noticed(tmp_path: Path) -> None:
    """R7: also while the daemon waits for it to take more."""
    script = "client.send(head('GET /v1/objects/b/big')); client.sock.recv(1000)"

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"big", bytes(32 << 20))
            async with dying(rig, script) as process:
                process.kill()
                await rig.connections(0)
            await rig.until(lambda: rig.metric("racer_budget_used_bytes", budget="streams") == 0)

    uvloop.run(main())


def test_a_connection_lasts_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    """F91: a forked child that kept the socket keeps the connection and its targets; they go with
    the last process that has it."""
    script = """
registered()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)  # Ends with the parent, which never writes.
    client.sock.close()
    os._exit(0)
os.close(reading)
"""

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            async with dying(rig, script) as process:
                assert rig.metric("racer_targets", kind="host") == 1
                process.kill()
                await rig.connections(0)
            assert rig.metric("racer_targets", kind="host") == 0

    uvloop.run(main())
