"""The plain path over a real socket: HEAD, GET and host-read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from tests.support.read_rig import content
from tests.support.socket_rig import Memory, RawClient, SocketRig


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_head_get_and_host_read(
    tmp_path: Path, run: Callable[[Coroutine[object, object, None]], None]
) -> None:
    """R1, R3: the bytes of a host-read are in the client's memory, none of them on the socket."""
    data = content(200_000)

    def talk(client: RawClient) -> None:
        answer = client.ask("HEAD /v1/objects/b/k")
        assert answer.status == 200
        assert answer.fields["ETag"] == '"v1"'
        assert answer.fields["Content-Length"] == answer.fields["Racer-Size"] == "200000"
        assert client.ask("GET /v1/objects/b/k").body == data
        part = client.ask("GET /v1/objects/b/k", "Range: bytes=65530-131080")
        assert (part.status, part.body) == (206, data[65530:131081])
        with Memory(1 << 20) as memory:
            answer = client.ask("POST /v1/host-read/b/k", fds=[memory.fd])
            assert answer.status == 200, answer
            assert answer.json["bytes"] == 200_000
            assert memory.read(0, 200_000) == data
            assert not any(memory.read(200_000))

    async def main() -> None:
        async with SocketRig(tmp_path) as rig:
            rig.origin.put(b"k", data)
            await rig.client(talk)

    run(main())
