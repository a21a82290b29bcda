"""A GPU that is not there: `GpuDevice` as the layers above see it, opening frames on the host.

For tests of those layers, where a worker process would only be slow. It verifies and decrypts for
real, from arena slots and from slabs; client memory is a memfd named `fakegpu-N`, as on the
stand-in driver. What a test wants to go wrong it says with `failures` and `on_read`.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from racerd.crc64 import crc64
from racerd.errors import DeviceError, IntegrityError, RacerError, RequestError, Retry
from racerd.gpu.identity import uuid_text
from racerd.gpu.node import GpuNode
from racerd.gpu.reads import PageRead
from racerd.gpu.settings import ArenaShape, GpuSettings
from racerd.runtime.arena import FrameArena
from racerd.telemetry import Metrics
from racerd.units import MIB
from tests.support.gpu_rig import gpu_uuid

GRANULARITY = 2 * MIB


class HostGpuTarget:
    """Imported memory. `mapping` is what the "GPU" writes to."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.mapping = mmap.mmap(descriptor, size)
        self.size = size
        self.reading = 0


class HostGpu:
    """Stands for `racerd.gpu.device.GpuDevice`."""

    staging_bytes = 1 * MIB
    retry_after_seconds = 1.0
    worker_pid = None
    restarts = 0

    def __init__(self, index: int, arena: FrameArena | None) -> None:
        """`arena`: whose slots it reads; None where nothing but its memory is used."""
        self.index = index
        self.uuid = gpu_uuid(index)
        self.why_not: str | None = None
        self.cufile: str | None = None  # the reason why cuFile does not read
        self.failures: deque[RacerError] = deque()  # of the next reads
        self.import_failures: deque[RacerError] = deque()
        self.on_read: Callable[[PageRead], Awaitable[None]] | None = None
        self.reads: list[PageRead] = []
        self.targets: set[HostGpuTarget] = set()
        self.pages: Counter[str] = Counter()  # by where their ciphertext came from
        self._arena = arena
        self._slabs: dict[int, int] = {}

    @property
    def name(self) -> str:
        return uuid_text(self.uuid)

    @property
    def cufile_state(self) -> str:
        return "on" if self.cufile is None else f"off: {self.cufile}"

    @property
    def slabs(self) -> frozenset[int]:
        return frozenset(self._slabs)

    def why_not_cufile(self, slab: int) -> str | None:
        return self.cufile

    async def wait_ready(self) -> None:
        if self.why_not is not None:
            raise DeviceError("gpu_absent", self.why_not, native=0, hint="a hint")

    def open_slab(self, number: int, descriptor: int) -> None:
        self._slabs[number] = os.dup(descriptor)

    async def close_slab(self, number: int) -> None:
        os.close(self._slabs.pop(number))

    def close(self) -> None:
        for descriptor in self._slabs.values():
            os.close(descriptor)
        assert not self.targets, "a target was never released"

    async def import_target(self, descriptor: int, size: int) -> HostGpuTarget:
        try:
            await asyncio.sleep(0)
            self._check_import(descriptor, size)
            target = HostGpuTarget(descriptor, size)
        finally:
            os.close(descriptor)
        self.targets.add(target)
        return target

    def _check_import(self, descriptor: int, size: int) -> None:
        if self.import_failures:
            raise self.import_failures.popleft()
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if size % GRANULARITY:
            raise RequestError("target_misaligned", f"{size} bytes", hint="a multiple")
        if not name.startswith("/memfd:fakegpu-"):
            raise RequestError("target_not_gpu_memory", name, hint="export an allocation")
        if not name.startswith(f"/memfd:fakegpu-{self.index}"):
            raise RequestError("target_wrong_gpu", name, hint="name its GPU")
        if os.fstat(descriptor).st_size < size:
            raise RequestError("target_too_small", name, hint="its whole size")

    async def release_target(self, target: HostGpuTarget) -> None:
        assert target.reading == 0, "released while it was read into"
        self.targets.discard(target)
        target.mapping.close()

    async def read(
        self, target: HostGpuTarget, reads: Sequence[PageRead]
    ) -> list[RacerError | None]:
        return [await self._read(target, read) for read in reads]

    async def _read(self, target: HostGpuTarget, read: PageRead) -> RacerError | None:
        self.reads.append(read)
        target.reading += 1
        try:
            cancelled = False
            if self.on_read is not None:
                running = asyncio.ensure_future(self.on_read(read))
                while not running.done():  # The GPU does not stop because somebody leaves.
                    try:
                        await asyncio.shield(running)
                    except asyncio.CancelledError:
                        cancelled = True
            failure = self.failures.popleft() if self.failures else self._open(target, read)
            if cancelled:
                raise asyncio.CancelledError
            return failure
        finally:
            target.reading -= 1

    def _open(self, target: HostGpuTarget, read: PageRead) -> RacerError | None:
        frames = read.frames
        count = len(frames.crcs)
        plain = bytearray()
        bad = ""
        step = len(frames.aad_tails) // count
        for i, cipher in enumerate(self._ciphertext(read)):
            tag = frames.tags[16 * i : 16 * i + 16]
            aad = frames.aad_head + frames.aad_tails[step * i : step * (i + 1)]
            try:
                if crc64(cipher) != frames.crcs[i]:
                    raise InvalidTag
                plain += AESGCM(frames.key).decrypt(
                    frames.nonces[12 * i : 12 * i + 12], cipher + tag, aad
                )
            except InvalidTag:
                bad = bad or ("corrupt_crc" if crc64(cipher) != frames.crcs[i] else "corrupt_tag")
                plain += bytes(len(cipher))
        self.pages["arena" if read.slots else "slab"] += 1
        taken = bytes(plain[read.skip : read.skip + read.take])
        target.mapping[read.offset : read.offset + read.take] = taken
        if bad:
            return IntegrityError(bad, "frames do not verify", retry=Retry.ELSEWHERE)
        return None

    def _ciphertext(self, read: PageRead) -> list[bytes]:
        assert self._arena is not None
        frame_bytes, count = self._arena.frame_bytes, len(read.frames.crcs)
        lengths = [frame_bytes] * (count - 1) + [read.frames.last_bytes]
        if read.slots:
            found = []
            for slot, length in zip(read.slots, lengths, strict=True):
                with self._arena.frame(slot, length) as frame:
                    found.append(bytes(frame[:length]))
            return found
        assert read.slab_offset % 4096 == 0
        size = sum(lengths)
        with mmap.mmap(-1, -(-size // 4096) * 4096) as room:
            got = os.preadv(self._slabs[read.slab], [room], read.slab_offset)
            assert got >= size
            data = room[:size]
        return [data[at : at + frame_bytes] for at in range(0, size, frame_bytes)]


class HostGpuNode(GpuNode):
    """A node with `count` of them; nothing was probed and no process runs."""

    def __init__(self, arena: FrameArena, metrics: Metrics, count: int = 1) -> None:
        shape = ArenaShape(-1, 0, 0, 0, 0)
        super().__init__("auto", GpuSettings(), shape, metrics)
        self.gpus = [HostGpu(index, arena) for index in range(count)]
        devices: dict[str, Any] = {gpu.uuid: gpu for gpu in self.gpus}
        self._devices = devices
        self._names = {gpu.uuid: "Host GPU" for gpu in self.gpus}

    async def __aenter__(self) -> HostGpuNode:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for gpu in self.gpus:
            gpu.close()
