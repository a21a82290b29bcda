"""Many clients in one process that all want more than there is, and do as they are told.

Each makes its requests one after the other. Told 503, it waits for as long as `Retry-After` says,
and asks again; it checks every byte. `overload` starts some of these and reads what they write: a
line of JSON now and then with how far each client is, and a last one with what came.
"""

from __future__ import annotations

import array
import asyncio
import json
import mmap
import random
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from tools.torture.hostile import Answer, head
from tools.torture.hostile_targets import memory
from tools.torture.slow_origin import content

_OBJECTS = 2000
_SPAN_BYTES_MAX = 1 << 20
_REPORT_SECONDS = 0.25
_CONNECT_SECONDS = 0.05


@dataclass
class Tally:
    """What came, over all clients of this process."""

    done: list[int]
    told: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    waited_seconds_max: float = 0.0
    finished: list[float] = field(default_factory=list)


class Hungry:
    """One client, with one connection at a time."""

    def __init__(self, path: str, object_bytes: int, number: int, seed: str, tally: Tally) -> None:
        self._path = path
        self._object_bytes = object_bytes
        self._number = number
        self._rng = random.Random(f"{seed}/{number}")
        self._tally = tally
        self._sock: socket.socket | None = None

    async def run(self, slot: int, requests: int) -> None:
        started = time.monotonic()
        try:
            for _ in range(requests):
                asked = time.monotonic()
                await self._until_done()
                self._tally.done[slot] += 1
                waited = time.monotonic() - asked
                self._tally.waited_seconds_max = max(self._tally.waited_seconds_max, waited)
            self._tally.finished.append(time.monotonic() - started)
        finally:
            self._hang_up()

    async def _until_done(self) -> None:
        kind = self._rng.choice(["get", "get", "one-shot", "target", "prefetch"])
        length = self._rng.randrange(1, _SPAN_BYTES_MAX)
        start = self._rng.randrange(self._object_bytes - length)
        key = f"/b/slow/{self._rng.randrange(_OBJECTS)}"
        while True:
            answer = await self._once(kind, key, start, start + length)
            self._tally.told[f"{kind}: {answer.told}"] += 1
            if answer.status in (200, 206):
                self._tally.bytes += length
                return
            pause = 0.1  # The connection ended without an answer, or in the middle of one.
            if answer.status == 503:
                pause = float(answer.fields["Retry-After"])
            elif answer.status:
                self._tally.wrong.append(f"client {self._number}, {kind}: {answer.told}")
                return
            if not answer.status or answer.fields.get("Connection") == "close":
                self._hang_up()
            await asyncio.sleep(pause * (1 + self._rng.random() / 2))

    async def _once(self, kind: str, key: str, start: int, stop: int) -> Answer:
        span = f"Range: bytes={start}-{stop - 1}"
        wanted = content(key, self._object_bytes, start, stop)
        if kind == "get":
            answer = await self._ask(head("GET /v1/objects" + key, span))
            self._check(answer, answer.body, wanted, kind)
            return answer
        if kind == "prefetch":
            return await self._ask(head("POST /v1/prefetch" + key, span))
        with memory(stop - start) as fd:
            if kind == "one-shot":
                answer = await self._ask(head("POST /v1/host-read" + key, span), fd)
            else:
                answer = await self._into_target(key, span, fd)
            with mmap.mmap(fd, stop - start) as view:
                self._check(answer, view, wanted, kind)
        return answer

    async def _into_target(self, key: str, span: str, fd: int) -> Answer:
        registered = await self._ask(head("POST /v1/targets"), fd)
        if registered.status != 201:
            return registered
        target = registered.json("id")
        line = "POST /v1/host-read" + key
        answer = await self._ask(head(line, span, f"Racer-Target: {target}"))
        if answer.status:
            released = await self._ask(head(f"DELETE /v1/targets/{target}"))
            if released.status != 200:
                self._tally.wrong.append(f"client {self._number}: release {released.told}")
        return answer

    def _check(self, answer: Answer, found: bytes | mmap.mmap, wanted: bytes, kind: str) -> None:
        if answer.status in (200, 206) and found[: len(wanted)] != wanted:
            self._tally.wrong.append(f"client {self._number}, {kind}: wrong bytes")

    # --- the connection -----------------------------------------------------------------------

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def _connected(self) -> socket.socket:
        while self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(self._path)
            except BlockingIOError:  # The backlog is full.
                sock.close()
                self._tally.told["connect: backlog full"] += 1
                await asyncio.sleep(_CONNECT_SECONDS * (1 + self._rng.random()))
            else:
                self._sock = sock
        return self._sock

    async def _ask(self, data: bytes, fd: int | None = None) -> Answer:
        """One exchange. Status 0 where the connection ends before the answer does."""
        sock = await self._connected()
        rights = [] if fd is None else [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]  # fmt: skip
        try:
            sock.sendmsg([data], rights)
            return await self._answer(sock)
        except OSError:
            return Answer(0, {}, b"")

    async def _answer(self, sock: socket.socket) -> Answer:
        loop = asyncio.get_running_loop()
        found = bytearray()
        while (end := found.find(b"\r\n\r\n")) < 0:
            more = await loop.sock_recv(sock, 1 << 16)
            if not more:
                return Answer(0, {}, b"")
            found += more
        first, *lines = found[:end].decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        missing = int(fields["Content-Length"]) - (len(found) - end - 4)
        while missing > 0:
            more = await loop.sock_recv(sock, 1 << 18)
            if not more:
                return Answer(0, {}, b"")
            found += more
            missing -= len(more)
        return Answer(int(first.split(" ")[1]), fields, bytes(found[end + 4 :]))


async def _report(tally: Tally) -> None:
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        print(json.dumps({"done": tally.done}), flush=True)


async def _run(path: str, object_bytes: int, seed: str, numbers: range, requests: int) -> None:
    tally = Tally([0] * len(numbers))
    with ExitStack() as stack:
        reporting = asyncio.ensure_future(_report(tally))
        stack.callback(reporting.cancel)
        clients = [Hungry(path, object_bytes, number, seed, tally) for number in numbers]
        await asyncio.gather(*(client.run(slot, requests) for slot, client in enumerate(clients)))
    last = {
        "done": tally.done,
        "told": tally.told,
        "bytes": tally.bytes,
        "wrong": tally.wrong,
        "waited_seconds_max": tally.waited_seconds_max,
        "finished": tally.finished,
    }
    print(json.dumps(last), flush=True)


def main(path: str, object_bytes: str, seed: str, span: str, requests: str) -> None:
    numbers = range(*map(int, span.split(":")))
    asyncio.run(_run(path, int(object_bytes), seed, numbers, int(requests)))


if __name__ == "__main__":
    main(*sys.argv[1:])
