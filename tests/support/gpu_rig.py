"""Sealed pages, an arena and a worker on the stand-in driver, for tests of the GPU path.

The supervisor runs in the test's process, which knows no CUDA; its worker inherits the stand-in by
environment. On the stand-in an exported allocation is a memfd, so a test makes one, hands its
descriptor over as a client would, and sees through its own mapping what the "GPU" wrote.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pytest

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.gpu.device import GpuDevice
from racerd.gpu.reads import PageRead, SealedFrames
from racerd.gpu.settings import ArenaShape, GpuSettings
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry, Seal
from racerd.runtime.arena import FrameArena
from racerd.telemetry import Metrics
from racerd.units import KIB, MIB
from tests.support.standin import StandIn

GEOMETRY = PageGeometry(page_bytes=64 * KIB, frame_bytes=16 * KIB)
TARGET_BYTES = 2 * MIB
KEY = EpochKey(1, bytes(range(32)))


def gpu_uuid(index: int) -> str:
    """The UUID of the stand-in's GPU number `index`."""
    return (b"stand-in-gpu" + bytes(3) + bytes([index])).hex()


def settings(**changes: object) -> GpuSettings:
    base = GpuSettings(staging_bytes=MIB, cufile="off")
    return replace(base, **changes)  # type: ignore[arg-type]


class GpuMemory:
    """A client's exported allocation on GPU `index`: `with GpuMemory() as memory`."""

    def __init__(self, index: int = 0, size: int = TARGET_BYTES, name: str | None = None) -> None:
        self.size = size
        self.descriptor = os.memfd_create(name or f"fakegpu-{index}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)

    def __enter__(self) -> GpuMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._map.close()
        os.close(self.descriptor)

    def send(self) -> int:
        """A descriptor for the daemon to own, as SCM_RIGHTS would give it."""
        return os.dup(self.descriptor)

    def bytes(self, start: int, stop: int) -> bytes:
        return self._map[start:stop]

    def fill(self, byte: int) -> None:
        self._map[:] = bytes([byte]) * self.size


class SealedPageInArena:
    """One sealed page: its plaintext, its seal and the arena slots of its frames."""

    def __init__(self, arena: FrameArena, length: int, index: int = 0) -> None:
        version = ObjectVersion(
            ObjectId("local", "models", b"a/shard"), '"v1"', index * GEOMETRY.page_bytes + length
        )
        page = PageId(version, index)
        self.plaintext = random.Random(length + index).randbytes(length)
        count = GEOMETRY.frame_count(length)
        slots = arena.take(count)
        assert slots is not None
        self.slots = slots
        self.frames = [
            arena.frame(slot, GEOMETRY.frame_length(length, i)) for i, slot in enumerate(slots)
        ]
        sealer = PageSealer(page, length, GEOMETRY, KEY)
        sealer.seal_frames(0, memoryview(self.plaintext), self.frames)
        self.seal: Seal = sealer.finish()
        self.opener = PageOpener(page, self.seal, GEOMETRY, KEY)

    @property
    def ciphertext(self) -> bytes:
        return b"".join(bytes(frame[:-TAG_BYTES]) for frame in self.frames)

    def material(self, first: int = 0, count: int | None = None) -> SealedFrames:
        count = self.seal.frame_count - first if count is None else count
        made = self.opener.frame_material(first, count)
        return SealedFrames(
            key=made.key,
            nonces=made.nonces,
            tags=self.seal.tags[first * TAG_BYTES : (first + count) * TAG_BYTES],
            crcs=self.seal.crcs[first : first + count],
            aad_head=made.aad_head,
            aad_tails=made.aad_tails,
            last_bytes=made.last_bytes,
        )

    def read(self, offset: int, skip: int = 0, take: int | None = None) -> PageRead:
        take = len(self.plaintext) - skip if take is None else take
        return PageRead(self.material(), offset, skip, take, slots=tuple(self.slots))

    def read_from(self, slab: int, slab_offset: int, offset: int) -> PageRead:
        return PageRead(
            self.material(), offset, 0, len(self.plaintext), slab=slab, slab_offset=slab_offset
        )

    def release(self) -> None:
        for frame in self.frames:
            frame.release()


class GpuRig:
    """A device with its worker, an arena of 64 slots, and pages sealed into it."""

    def __init__(self, device: GpuDevice, arena: FrameArena, metrics: Metrics) -> None:
        self.device = device
        self.arena = arena
        self.metrics = metrics
        self._pages: list[SealedPageInArena] = []

    def page(self, length: int = GEOMETRY.page_bytes, index: int = 0) -> SealedPageInArena:
        page = SealedPageInArena(self.arena, length, index)
        self._pages.append(page)
        return page

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def release(self) -> None:
        for page in self._pages:
            page.release()


def standin_environment(standin: StandIn, monkeypatch: pytest.MonkeyPatch, **extra: str) -> None:
    """What workers that this test starts inherit."""
    for name, value in standin.environment(**extra).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)


@asynccontextmanager
async def gpu_rig(
    gpu_settings: GpuSettings | None = None, *, gpu: int = 0, ready: bool = True
) -> AsyncIterator[GpuRig]:
    metrics = Metrics()
    with FrameArena(GEOMETRY.frame_bytes, 64 * 20 * KIB) as arena:
        shape = ArenaShape(
            descriptor=arena.fd,
            size=arena.slot_count * arena.slot_bytes,
            frame_bytes=GEOMETRY.frame_bytes,
            frames_per_page=GEOMETRY.frames_per_page,
            slot_bytes=arena.slot_bytes,
        )
        device = GpuDevice(gpu_uuid(gpu), gpu_settings or settings(), shape, metrics)
        rig = GpuRig(device, arena, metrics)
        try:
            async with device:
                if ready:
                    await device.wait_ready()
                yield rig
        finally:
            rig.release()


def driver_calls(log: Path) -> list[tuple[str, str]]:
    """(name, physical device or "-") of each call that a stand-in logged."""
    return [(name, device) for _, name, device in map(str.split, log.read_text().splitlines())]


def all_ok(results: Sequence[object]) -> bool:
    return all(result is None for result in results)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until another process has come so far that `condition` holds."""
    while not condition():  # noqa: ASYNC110  no event reaches across processes
        await asyncio.sleep(0.005)


class Hold:
    """Kernels of the stand-in wait while this is up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = folder / "hold"
        self._file.touch()
        monkeypatch.setenv("FAKECUDA_HOLD", str(self._file))

    async def reached(self) -> None:
        await until(Path(f"{self._file}.reached").exists)

    def lift(self) -> None:
        self._file.unlink()
