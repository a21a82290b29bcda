"""A client socket with its reader, and raw clients to poke it with.

`async with SocketRig(folder) as rig:` serves `rig.origin` (a `ScriptedOrigin`) through real read
parts at `rig.path`, or `rig.memory` where it is given a `MemoryReader`. Clients are blocking
sockets driven from threads, as other processes would be; `RawClient` sends exactly the bytes and
descriptors it is told to.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from racerd.read.reader import CacheReader
from racerd.runtime.threads import WorkerThreads
from racerd.serve.client_socket import ClientSocket
from racerd.serve.peer import AccessPolicy
from racerd.serve.reader import Reader
from racerd.serve.settings import ClientSocketSettings
from tests.support.host_gpu import HostGpuNode
from tests.support.memory_reader import MemoryReader
from tests.support.read_rig import ReadRig

T = TypeVar("T")
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class RawClient:
    """One connection. Blocking: call it through `SocketRig.client`, or from a thread."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        try:
            self.sock.connect(os.fspath(path))
        except OSError:
            self.sock.close()
            raise
        self._buffer = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sock.close()

    def send(self, text: str | bytes, fds: list[int] | None = None) -> None:
        data = text.encode("latin-1") if isinstance(text, str) else text
        if not fds:
            self.sock.sendall(data)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = self.sock.sendmsg([data], rights)
        self.sock.sendall(data[sent:])

    def receive(self, *, head_only: bool = False) -> Answer:
        """Reads one whole response. Raises EOFError where the connection ends before it does."""
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        length = 0 if head_only else int(fields["Content-Length"])
        while len(self._buffer) < length:
            self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Answer(int(first.split(" ")[1]), fields, body)

    def receive_cut(self) -> Answer:
        """Reads a response whose body ends before its announced length."""
        while True:
            try:
                self._more()
            except EOFError:
                break
        head, _, body = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        assert len(body) < int(fields["Content-Length"]), "the body is whole"
        self._buffer = b""
        return Answer(int(first.split(" ")[1]), fields, body)

    def ask(
        self,
        line: str,
        *fields: str,
        fds: list[int] | None = None,
    ) -> Answer:
        """Sends `METHOD target` with fields and reads the answer."""
        self.send(head(line, *fields), fds)
        return self.receive(head_only=line.startswith("HEAD"))

    def ended(self) -> bool:
        """Waits for the server to close; False if it sends something instead."""
        try:
            return self._buffer == b"" and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError(f"the connection ended after {self._buffer!r}")
        self._buffer += data


def head(line: str, *fields: str) -> str:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: racer", *fields, "", ""])


class SocketRig:
    """See the module. Leaving it checks that no target, connection or mapped byte is left."""

    def __init__(
        self,
        folder: Path,
        memory: MemoryReader | None = None,
        *,
        cache: str = "cache",
        policy: AccessPolicy | None = None,
        gpus: int = 0,
        **settings: Any,
    ) -> None:
        """`gpus`: how many `HostGpu`s the node has; only with real read parts."""
        self.settings = ClientSocketSettings(folder / "run", **settings)
        self.policy = policy
        self.reads = ReadRig(folder)
        self.origin = self.reads.origin
        self.metrics = self.reads.metrics
        self._cache = cache
        self._gpu_count = gpus
        self._memory = memory
        if memory is not None:
            memory.name = cache
        self._stack = AsyncExitStack()

    @property
    def memory(self) -> MemoryReader:
        assert self._memory is not None
        return self._memory

    async def __aenter__(self) -> SocketRig:
        enter = self._stack.enter_async_context
        reader: Reader
        if self._memory is None:
            reads = await enter(self.reads)
            reader = await enter(CacheReader(self._cache, self.origin, reads.services))
        else:
            reader = self._memory
        if self._gpu_count:
            self.node = HostGpuNode(self.reads.arena, self.metrics, self._gpu_count)
            await enter(self.node)
        threads = await enter(WorkerThreads("targets", 1))
        self._stack.callback(self._check_nothing_is_left)
        self.socket = ClientSocket(
            reader,
            self.settings,
            metrics=self.metrics,
            threads=threads,
            policy=self.policy,
            gpus=self.node if self._gpu_count else None,
        )
        try:
            await enter(self.socket)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.origin.release()
        if self._memory is not None:
            self._memory.release()
        await self._stack.aclose()

    def _check_nothing_is_left(self) -> None:
        assert self.socket.connection_count == 0
        assert self.metric("racer_connections", cache=self._cache) == 0
        for kind in ("host", "gpu"):
            assert self.metric("racer_targets", kind=kind) == 0
            assert self.metric("racer_target_mapped_bytes", kind=kind) == 0

    @property
    def path(self) -> Path:
        return self.socket.path

    async def until(self, true: Callable[[], bool]) -> None:
        """Lets the daemon run until `true()`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0)

    async def connections(self, count: int) -> None:
        """Waits until the daemon has `count` connections."""
        await self.until(lambda: self.socket.connection_count == count)

    async def client(self, talk: Callable[[RawClient], T]) -> T:
        """Runs `talk` with a fresh connection on a thread of its own."""

        def run() -> T:
            with RawClient(self.path) as client:
                return talk(client)

        return await asyncio.to_thread(run)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """A memfd as a client makes one, or with something missing."""

    def __init__(
        self,
        size: int,
        *,
        seals: int = SEALS,
        allocated: int | None = None,
        flags: int = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,
    ) -> None:
        self.size = size
        self.fd = os.memfd_create("test-target", flags)
        os.ftruncate(self.fd, size)
        allocated = size if allocated is None else allocated
        if allocated:
            os.posix_fallocate(self.fd, 0, allocated)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.fd)

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        length = self.size - offset if length is None else length
        with mmap.mmap(self.fd, self.size) as mapping:
            return mapping[offset : offset + length]
