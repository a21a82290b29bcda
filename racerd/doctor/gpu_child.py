"""`python -m racerd.doctor.gpu_child`: tries one GPU as the worker will use it. Run by `gpu_try`.

A process of its own, because a driver can hang or crash, and because CUDA stays in whatever process
loaded it. Standard input: an `Order` as JSON. Standard output: a line of JSON for each step that
begins (`begins`) and for each that ended (`step`, and what came of it), so that whoever reads knows
how far it came. Steps do not depend on each other but for the first.

The exported memory of the self-test goes to a second process (`--import`), which writes to it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

from racerd.crypto.epoch_key import EpochKey
from racerd.crypto.sealing import PageOpener, PageSealer
from racerd.errors import DeviceError
from racerd.gpu import build, layout
from racerd.gpu.protocol import ReadPage
from racerd.gpu.worker.batch import BLOCK_BYTES, PAGES_MAX, JobBlock, Place
from racerd.gpu.worker.cufile import CuFileError, make_provider, why_not_to_open
from racerd.gpu.worker.driver import Device, call
from racerd.gpu.worker.kernels import Kernels
from racerd.gpu.worker.memory import DeviceBuffer, ImportedTarget, PinnedBuffer
from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.pages import TAG_BYTES, PageGeometry
from racerd.units import KIB

_PR_SET_PDEATHSIG = 1
_IPC_BYTES = 4 * KIB
_FRAME_BYTES = 64 * KIB
_IMPORT_SECONDS_MAX = 30.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Order:
    """`slabs`: by name, a file or device for cuFile to read the first 4 KiB of; none where cuFile
    is off. `page_bytes`: how much is opened on the GPU."""

    gpu: str
    kernel_cache: str
    cufile: str
    compat_mode: bool
    slabs: dict[str, str]
    page_bytes: int


def _tell(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _step(name: str, work: Callable[[], dict[str, object]], **named: object) -> None:
    _tell(begins=name, **named)
    started = time.monotonic()
    try:
        told = work()
    except (DeviceError, CuFileError, OSError, RuntimeError) as error:
        told = _told_of(_first(error))
    _tell(step=name, seconds=time.monotonic() - started, **named, **told)


def _first(error: BaseException) -> BaseException:
    """What went wrong first: after a sticky error giving things back fails too."""
    while error.__context__ is not None and error.__cause__ is None:
        error = error.__context__
    return error


def _told_of(error: BaseException) -> dict[str, object]:
    if isinstance(error, DeviceError):
        return {"error": error.message, "remedy": error.hint}
    if isinstance(error, CuFileError):
        return {"error": str(error), "remedy": error.meaning.text}
    return {"error": str(error), "remedy": ""}


# --- facts ----------------------------------------------------------------------------------------


def _facts(device: Device) -> dict[str, object]:
    bus = call(cuda.cuDeviceGetPCIBusId, 32, device.ordinal).partition(b"\0")[0].decode()
    return {
        "architecture": device.architecture,
        "memory_bytes": device.memory_bytes(),
        "bus": bus.lower(),
        "driver_cuda": call(cuda.cuDriverGetVersion),
    }


# --- memory between processes ---------------------------------------------------------------------


def _pattern(seed: int) -> bytes:
    return random.Random(seed).randbytes(_IPC_BYTES)


@contextmanager
def _exported(device: Device) -> Iterator[tuple[int, int, int]]:
    """Address, size and descriptor of an allocation as clients make it."""
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = kind
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device.ordinal
    access = cuda.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = int(call(cuda.cuMemGetAllocationGranularity, wanted, minimum))
    with ExitStack() as made:
        handle = call(cuda.cuMemCreate, size, wanted, 0)
        made.callback(call, cuda.cuMemRelease, handle)
        descriptor = int(call(cuda.cuMemExportToShareableHandle, handle, kind, 0))
        made.callback(os.close, descriptor)
        address = int(call(cuda.cuMemAddressReserve, size, 0, 0, 0))
        made.callback(call, cuda.cuMemAddressFree, address, size)
        call(cuda.cuMemMap, address, size, 0, handle, 0)
        made.callback(call, cuda.cuMemUnmap, address, size)
        call(cuda.cuMemSetAccess, address, size, [access], 1)
        yield address, size, descriptor


def _between_processes(device: Device) -> dict[str, object]:
    """Exports memory, has another process import it and write a pattern, and looks at it."""
    seed = random.randrange(1 << 32)
    with _exported(device) as (address, size, descriptor):
        call(cuda.cuMemsetD8, address, 0, _IPC_BYTES)
        command = [sys.executable, "-m", "racerd.doctor.gpu_child", "--import"]
        done = subprocess.run(
            [*command, device.uuid, str(descriptor), str(size), str(seed)],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS_MAX,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"the importing process ended with {done.returncode}: {said}")
        seen = bytearray(_IPC_BYTES)
        call(cuda.cuMemcpyDtoH, seen, address, _IPC_BYTES)
    return {"same": bytes(seen) == _pattern(seed)}


def _import(gpu: str, descriptor: int, size: int, seed: int) -> None:
    """The other process: what the worker does with a client's memory, and a write to it."""
    device = Device.open(gpu)
    device.make_current()
    target = ImportedTarget(device, descriptor, size)
    call(cuda.cuMemcpyHtoD, target.address, _pattern(seed), _IPC_BYTES)
    call(cuda.cuCtxSynchronize)
    target.close()
    device.close()


# --- kernels --------------------------------------------------------------------------------------


def _kernels(device: Device, order: Order) -> dict[str, object]:
    """Compiles the kernels where they are not in the cache yet, as a worker would."""
    folder = Path(order.kernel_cache) if order.kernel_cache else build.default_folder()
    kernels = build.KernelCache(folder)
    cached = kernels.get(device.architecture) is not None
    image = build.load_module(device.architecture, kernels)
    Kernels(image).close()
    return {"cached": cached, "folder": str(folder), "bytes": len(image)}


class _SealedPage:
    """A page of random bytes, sealed as the store seals it, and the job that opens it."""

    def __init__(self, nbytes: int) -> None:
        geometry = PageGeometry(page_bytes=nbytes, frame_bytes=_FRAME_BYTES)
        page = PageId(ObjectVersion(ObjectId("doctor", "gpu", b"page"), '"1"', nbytes), 0)
        self.plaintext = os.urandom(nbytes)
        key = EpochKey(1, os.urandom(32))
        count = geometry.frame_count(nbytes)
        frames = [memoryview(bytearray(_FRAME_BYTES + TAG_BYTES)) for _ in range(count)]
        sealer = PageSealer(page, nbytes, geometry, key)
        sealer.seal_frames(0, memoryview(self.plaintext), frames)
        seal = sealer.finish()
        self.ciphertext = b"".join(bytes(frame[:_FRAME_BYTES]) for frame in frames)
        material = PageOpener(page, seal, geometry, key).frame_material(0, count)
        self.read = ReadPage(
            request=0, target=0, offset=0, skip=0, take=nbytes, slots=(), slab=-1, slab_offset=0,
            last_bytes=material.last_bytes, key=material.key, nonces=material.nonces,
            tags=seal.tags, crcs=b"".join(crc.to_bytes(8, "little") for crc in seal.crcs),
            aad_head=material.aad_head, aad_tails=material.aad_tails,
        )  # fmt: skip


class _Bench:
    """Buffers on the device for one page, and the kernels that open it there."""

    def __init__(self, device: Device, order: Order, page: _SealedPage, owner: ExitStack) -> None:
        folder = Path(order.kernel_cache) if order.kernel_cache else build.default_folder()
        self._page = page
        self._size = len(page.plaintext)
        image = build.load_module(device.architecture, build.KernelCache(folder))
        self._kernels = _owned(owner, Kernels(image))
        self._source = _owned(owner, DeviceBuffer(self._size))
        self._target = _owned(owner, DeviceBuffer(self._size))
        self._host = _owned(owner, PinnedBuffer(BLOCK_BYTES))
        tables = PAGES_MAX * layout.RECORD_TABLES_BYTES
        self._secrets = _owned(owner, DeviceBuffer(BLOCK_BYTES + tables))
        self._block = JobBlock(self._host.view, self._secrets.address, _FRAME_BYTES)
        place = Place(self._source.address, _FRAME_BYTES, self._target.address)
        self._block.add(page.read, place)
        self._verdicts = _owned(owner, DeviceBuffer(4 * self._block.frames))

    def open(self, ciphertext: bytes) -> tuple[list[int], float]:
        """Returns the verdicts, and the seconds from the launch to the end."""
        call(cuda.cuMemcpyHtoD, self._source.address, ciphertext, self._size)
        call(cuda.cuMemcpyHtoD, self._secrets.address, self._host.address, self._block.used_bytes)
        call(cuda.cuMemsetD8, self._verdicts.address, 0, 4 * self._block.frames)
        call(cuda.cuCtxSynchronize)
        started = time.perf_counter()
        tables = self._secrets.address + BLOCK_BYTES
        keys = self._block.keys_address
        self._kernels.prepare_records(0, self._block.pages, keys, tables)
        self._kernels.open_frames(
            0, self._block.frames, jobs=self._block.jobs_address, keys=keys, tables=tables,
            verdicts=self._verdicts.address,
        )  # fmt: skip
        call(cuda.cuCtxSynchronize)
        seconds = time.perf_counter() - started
        words = bytearray(4 * self._block.frames)
        call(cuda.cuMemcpyDtoH, words, self._verdicts.address, len(words))
        return list(memoryview(words).cast("I")), seconds

    def plaintext(self) -> bytes:
        seen = bytearray(self._size)
        call(cuda.cuMemcpyDtoH, seen, self._target.address, self._size)
        return bytes(seen)


def _owned(owner: ExitStack, thing: Any) -> Any:
    owner.callback(thing.close)
    return thing


def _decrypt(device: Device, order: Order) -> dict[str, object]:
    """Opens a page, compares every byte, and sees that a flipped bit is refused."""
    page = _SealedPage(order.page_bytes)
    with ExitStack() as owner:
        bench = _Bench(device, order, page, owner)
        rounds = [bench.open(page.ciphertext) for _ in range(_ROUNDS)]
        right = all(word == layout.Verdict.OK for words, _ in rounds for word in words)
        same = right and bench.plaintext() == page.plaintext
        broken = bytes([page.ciphertext[0] ^ 1]) + page.ciphertext[1:]
        words, _ = bench.open(broken)
    refused = words[0] != layout.Verdict.OK and all(w == layout.Verdict.OK for w in words[1:])
    best = min(seconds for _, seconds in rounds)
    return {"same": same, "refused": refused, "bytes": len(page.plaintext), "best_seconds": best}


# --- cuFile ---------------------------------------------------------------------------------------


def _cufile(order: Order) -> None:
    """Opens the driver, and reads from each slab into GPU memory."""
    provider = None

    def open_driver() -> dict[str, object]:
        nonlocal provider
        if (reason := why_not_to_open()) is not None:
            raise DeviceError("cufile_off", reason, native=0, hint=_PROC_MODULES)
        opening = make_provider(order.cufile)
        opening.open(compat_mode=order.compat_mode)
        provider = opening
        return {}

    _step("cufile", open_driver)
    if provider is None:
        return
    for name, file in order.slabs.items():
        _step("cufile-read", partial(_read_slab, provider, file), slab=name)
    provider.close()


_PROC_MODULES = "run racerd where /proc/modules can be read (not hidden by the container's runtime)"


def _read_slab(provider: Any, slab: str) -> dict[str, object]:
    with ExitStack() as owner:
        descriptor = os.open(slab, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        owner.callback(os.close, descriptor)
        buffer = _owned(owner, DeviceBuffer(_IPC_BYTES))
        provider.register_memory(buffer.address, _IPC_BYTES)
        owner.callback(provider.deregister_memory, buffer.address)
        handle = provider.register_file(descriptor)
        owner.callback(provider.deregister_file, handle)
        count = provider.read(handle, buffer.address, _IPC_BYTES, 0)
        seen = bytearray(_IPC_BYTES)
        call(cuda.cuMemcpyDtoH, seen, buffer.address, _IPC_BYTES)
    with open(slab, "rb") as file:
        return {"same": count == _IPC_BYTES and bytes(seen) == file.read(_IPC_BYTES)}


# --- the process ----------------------------------------------------------------------------------


def _try(order: Order) -> None:
    opened: list[Device] = []

    def open_device() -> dict[str, object]:
        device = Device.open(order.gpu)
        device.make_current()
        opened.append(device)
        return _facts(device)

    _step("context", open_device)
    if not opened:
        return
    device = opened[0]
    _step("ipc", lambda: _between_processes(device))
    _step("kernels", lambda: _kernels(device, order))
    _step("decrypt", lambda: _decrypt(device, order))
    if order.cufile != "off":
        _cufile(order)
    device.close()


def main() -> int:
    # Whoever asked may be killed while a driver hangs.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parser = argparse.ArgumentParser(prog="python -m racerd.doctor.gpu_child")
    parser.add_argument("--import", nargs=4, dest="imported", metavar="X", default=None)
    options = parser.parse_args()
    if options.imported is not None:
        gpu, *numbers = options.imported
        try:
            _import(gpu, *map(int, numbers))
        except DeviceError as error:
            sys.stderr.write(f"{error.message}\n")
            return 1
        return 0
    _try(Order(**json.load(sys.stdin)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
