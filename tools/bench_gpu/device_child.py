"""Bare work on one GPU, in a process of its own: `device_child GPU name|kernels|copy …`.

Prints one line of JSON. Times are by the host's clock around many launches and one wait, so that
launching is a small part; the work itself is what a worker of the daemon does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver as cuda

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.gpu import build, layout
from racerd.gpu.protocol import ReadPage
from racerd.gpu.worker.batch import BLOCK_BYTES, PAGES_MAX, JobBlock, Place
from racerd.gpu.worker.driver import Device, call
from racerd.gpu.worker.kernels import Kernels
from racerd.gpu.worker.memory import DeviceBuffer, PinnedBuffer
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry
from racerd.units import GIB

_SECONDS = 0.5  # Of launches between two looks at the clock, at least.


def name(device: Device) -> dict[str, str]:
    version = call(cuda.cuDriverGetVersion)
    return {
        "name": device.name,
        "architecture": device.architecture,
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
    }


def kernels(device: Device, page_bytes: int, frame_bytes: int, rounds: int) -> dict[int, float]:
    """Bytes of plaintext per second, by pages in a batch."""
    geometry = PageGeometry(page_bytes, frame_bytes)
    with ExitStack() as undo:
        module = Kernels(build.load_module(device.architecture))
        undo.callback(module.close)
        batch = _Batch(geometry, module, undo)
        return {pages: batch.speed(pages, rounds) for pages in (1, 2, 4, PAGES_MAX)}


class _Batch:
    """One sealed page, opened as many times side by side as a batch has pages."""

    def __init__(self, geometry: PageGeometry, kernels: Kernels, undo: ExitStack) -> None:
        self._kernels = kernels
        self._page_bytes = geometry.page_bytes
        self._frame_bytes = geometry.frame_bytes
        self._request, ciphertext = _sealed(geometry)
        self._source = self._kept(undo, DeviceBuffer(len(ciphertext)))
        self._target = self._kept(undo, DeviceBuffer(PAGES_MAX * geometry.page_bytes))
        self._host = self._kept(undo, PinnedBuffer(BLOCK_BYTES))
        secret_bytes = BLOCK_BYTES + PAGES_MAX * layout.RECORD_TABLES_BYTES
        self._secrets = self._kept(undo, DeviceBuffer(secret_bytes))
        self._verdict_bytes = PAGES_MAX * geometry.frames_per_page * layout.VERDICT_BYTES
        self._verdicts = self._kept(undo, DeviceBuffer(self._verdict_bytes))
        call(cuda.cuMemcpyHtoD, self._source.address, ciphertext, len(ciphertext))
        self._stream = call(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        undo.callback(call, cuda.cuStreamDestroy, self._stream)

    @staticmethod
    def _kept(undo: ExitStack, buffer: Any) -> Any:
        undo.callback(buffer.close)
        return buffer

    def speed(self, pages: int, rounds: int) -> float:
        block = JobBlock(self._host.view, self._secrets.address, self._frame_bytes)
        for number in range(pages):
            to = self._target.address + number * self._page_bytes
            block.add(self._request, Place(self._source.address, self._frame_bytes, to))
        call(cuda.cuMemcpyHtoD, self._secrets.address, self._host.address, block.used_bytes)
        call(cuda.cuMemsetD8, self._verdicts.address, 0, self._verdict_bytes)

        def launch() -> None:
            tables = self._secrets.address + BLOCK_BYTES
            self._kernels.prepare_records(self._stream, block.pages, block.keys_address, tables)
            self._kernels.open_frames(
                self._stream,
                block.frames,
                jobs=block.jobs_address,
                keys=block.keys_address,
                tables=tables,
                verdicts=self._verdicts.address,
            )

        seconds = _timed(launch, lambda: call(cuda.cuStreamSynchronize, self._stream), rounds)
        self._check(block.frames)
        return pages * self._page_bytes / seconds

    def _check(self, frames: int) -> None:
        """A speed at which frames were not verified would be the speed of something else."""
        words = bytearray(frames * layout.VERDICT_BYTES)
        call(cuda.cuMemcpyDtoH, words, self._verdicts.address, len(words))
        if any(word != layout.Verdict.OK for word in memoryview(words).cast("I")):
            raise RuntimeError("a frame did not verify")


def _sealed(geometry: PageGeometry) -> tuple[ReadPage, bytes]:
    """A page of random bytes: the request that opens it whole, and its ciphertext."""
    length, count = geometry.page_bytes, geometry.frames_per_page
    version = ObjectVersion(ObjectId("bench", "b", b"k"), '"v"', length)
    page, key = PageId(version, 0), EpochKey(1, os.urandom(32))
    frames = [memoryview(bytearray(geometry.frame_bytes + TAG_BYTES)) for _ in range(count)]
    sealer = PageSealer(page, length, geometry, key)
    sealer.seal_frames(0, memoryview(os.urandom(length)), frames)
    seal = sealer.finish()
    made = PageOpener(page, seal, geometry, key).frame_material(0, count)
    request = ReadPage(
        request=0, target=0, offset=0, skip=0, take=length, last_bytes=made.last_bytes, slots=(),
        slab=0, slab_offset=0, key=made.key, nonces=made.nonces, tags=seal.tags,
        crcs=b"".join(crc.to_bytes(8, "little") for crc in seal.crcs),
        aad_head=made.aad_head, aad_tails=made.aad_tails,
    )  # fmt: skip
    return request, b"".join(bytes(frame[:-TAG_BYTES]) for frame in frames)


def copy(device: Device, page_bytes: int) -> float:
    """Bytes per second of copies of a page's size from pinned memory, one behind the other."""
    del device
    with ExitStack() as undo:
        count = max(1, min(64, GIB // page_bytes // 4))
        source, target = PinnedBuffer(count * page_bytes), DeviceBuffer(count * page_bytes)
        undo.callback(source.close)
        undo.callback(target.close)
        stream = call(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        undo.callback(call, cuda.cuStreamDestroy, stream)

        def launch() -> None:
            for at in range(0, count * page_bytes, page_bytes):
                call(
                    cuda.cuMemcpyHtoDAsync,
                    target.address + at, source.address + at, page_bytes, stream,
                )  # fmt: skip

        seconds = _timed(launch, lambda: call(cuda.cuStreamSynchronize, stream), 3)
        return count * page_bytes / seconds


def _timed(launch: Callable[[], None], wait: Callable[[], None], rounds: int) -> float:
    """Seconds of one `launch`: the best of some rounds, each of launches for half a second."""
    launch()
    wait()
    start = time.perf_counter()
    launch()
    wait()
    many = max(1, int(_SECONDS / max(time.perf_counter() - start, 1e-6)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(many):
            launch()
        wait()
        best = min(best, (time.perf_counter() - start) / many)
    return best


def main() -> None:
    ordinal, what, *arguments = sys.argv[1:]
    call(cuda.cuInit, 0)
    device = Device.open(call(cuda.cuDeviceGetUuid, int(ordinal)).bytes.hex())
    device.make_current()
    parts: dict[str, Callable[..., Any]] = {"name": name, "kernels": kernels, "copy": copy}
    told = parts[what](device, *map(int, arguments))
    device.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
