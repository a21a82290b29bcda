"""A client of racerd with GPU memory, on whatever CUDA driver this process has. Run as a child.

Arguments: the name of a scenario, and its own as JSON. Standard output: what the scenario returned,
as JSON, with `left`: what of the GPU the process still held at its end. The bytes in GPU memory
are looked at by copies, as a program would: host code cannot touch them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import racer
from racer.cuda import dlpack
from racer.cuda.device import Device
from racer.gpu import staging

Scenario = Callable[..., dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}
_said: list[str] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# --- what a program does with GPU memory ----------------------------------------------------------

_LIBRARY = "libcuda.so.1"


def bytes_on_gpu(device: Device, address: int, nbytes: int) -> bytes:
    """A copy of device memory."""
    library = ctypes.CDLL(_LIBRARY)
    data = (ctypes.c_char * nbytes)()
    with device.current():
        status = library.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
    if status:
        error = racer.GpuError("the test cannot look at GPU memory")
        error.native = status
        raise error
    return bytes(data)


def digest(device: Device, address: int, nbytes: int) -> str:
    return hashlib.sha256(bytes_on_gpu(device, address, nbytes)).hexdigest()


class Array:
    """An array of some other library's, in memory that cannot be exported (cuMemAlloc).

    `interface` is "dlpack", "dlpack-1" or "cuda"; it remembers the stream that it was ordered
    before, and how often it was given back.
    """

    def __init__(self, nbytes: int, interface: str, ordinal: int = 0) -> None:
        self.device = Device.numbered(ordinal)
        self.nbytes = nbytes
        self.library = ctypes.CDLL(_LIBRARY)
        address = ctypes.c_uint64()
        with self.device.current():
            assert self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
            self.fill(address.value, 0xEE)
        self.address = address.value
        self.streams: list[int | None] = []
        if interface == "cuda":
            self.__cuda_array_interface__ = {
                "shape": (nbytes // 2,), "typestr": "<u2", "strides": None,
                "data": (self.address, False), "version": 2,
            }  # fmt: skip
        else:
            self.__dlpack__ = self._capsule
            self.__dlpack_device__ = lambda: (dlpack.CUDA, ordinal)
            self.versioned = interface == "dlpack-1"

    def fill(self, address: int, byte: int) -> None:
        status = self.library.cuMemsetD8_v2(
            ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(self.nbytes)
        )
        assert status == 0, status

    def _capsule(self, *, stream: int | None = None, **options: Any) -> object:
        if "max_version" in options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        current = ctypes.c_int(-1)
        self.library.cuCtxGetDevice(ctypes.byref(current))
        # Owners order their stream of the current GPU, and torch refuses another one than its own.
        assert current.value == self.device.ordinal
        self.streams.append(stream)
        return dlpack.lend(
            self, self.address, self.nbytes, self.device.ordinal, versioned=self.versioned
        )

    def digest(self, nbytes: int | None = None, offset: int = 0) -> str:
        count = self.nbytes - offset if nbytes is None else nbytes
        return digest(self.device, self.address + offset, count)

    def free(self) -> None:
        """A context that is lost gives nothing back."""
        with contextlib.suppress(racer.GpuError), self.device.current():
            self.library.cuMemFree_v2(ctypes.c_uint64(self.address))


class Consumer:
    """Takes a DLPack capsule as a framework does: its memory lives until `drop`."""

    def __init__(self, buffer: Any, **options: Any) -> None:
        self.borrowed = dlpack.Borrowed(buffer.__dlpack__(**options))
        tensor = self.borrowed.tensor
        self.device = Device.numbered(tensor.device_id)
        self.address: int = tensor.data + tensor.byte_offset
        self.nbytes = dlpack.nbytes_of(tensor)

    def digest(self) -> str:
        return digest(self.device, self.address, self.nbytes)

    def drop(self) -> None:
        self.borrowed.close()


# --- scenarios ------------------------------------------------------------------------------------


@scenario
def direct(url: str, nbytes: int, device: object = 0, offset: int = 0) -> dict[str, Any]:
    """A read into memory of `gpu_alloc`, twice."""
    with racer.Client(timeout=30) as client, client.gpu_alloc(nbytes, device) as buffer:
        counts = [client.read_into(url, buffer, offset) for _ in range(2)]
        place = buffer.target.memory
        return {
            "counts": counts,
            "gpu": buffer.gpu,
            "digest": digest(place.device, buffer.address, counts[0]),
        }


@scenario
def staged(url: str, nbytes: int, interface: str, ordinal: int = 0) -> dict[str, Any]:
    """A read into an array that is not exportable, twice."""
    array = Array(nbytes, interface, ordinal)
    try:
        with racer.Client(timeout=30) as client:
            counts = [client.read_into(url, array) for _ in range(2)]
            return {
                "counts": counts,
                "digest": array.digest(counts[0]),
                "rest": array.digest(offset=counts[0]) if counts[0] < nbytes else "",
                "ordered": [stream not in (None, -1, 0) for stream in array.streams],
            }
    finally:
        array.free()


@scenario
def direct_async(url: str, nbytes: int, device: object = 0, offset: int = 0) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with (
            racer.AsyncClient(timeout=30) as client,
            await client.gpu_alloc(nbytes, device) as buffer,
        ):
            counts = [await client.read_into(url, buffer, offset) for _ in range(2)]
            place = buffer.target.memory
            return {
                "counts": counts,
                "gpu": buffer.gpu,
                "digest": digest(place.device, buffer.address, counts[0]),
            }

    return asyncio.run(main())


@scenario
def staged_async(url: str, nbytes: int, interface: str, ordinal: int = 0) -> dict[str, Any]:
    array = Array(nbytes, interface, ordinal)

    async def main() -> dict[str, Any]:
        async with racer.AsyncClient(timeout=30) as client:
            counts = [await client.read_into(url, array) for _ in range(2)]
            return {
                "counts": counts,
                "digest": array.digest(counts[0]),
                "rest": array.digest(offset=counts[0]) if counts[0] < nbytes else "",
                "ordered": [stream not in (None, -1, 0) for stream in array.streams],
            }

    try:
        return asyncio.run(main())
    finally:
        array.free()


@scenario
def cancelled(url: str, nbytes: int, interface: str, after: str) -> dict[str, Any]:
    """A call is cancelled when the file `after` is there; nothing writes to the array later."""
    array = Array(nbytes, interface)

    async def main() -> dict[str, Any]:
        async with racer.AsyncClient(timeout=30) as client:
            reading = asyncio.ensure_future(client.read_into(url, array))
            while not os.path.exists(after):  # noqa: ASYNC110 ASYNC240 - made by another process
                await asyncio.sleep(0.001)
            reading.cancel()
            await asyncio.sleep(0)
            os.close(os.open(f"{after}.cancelled", os.O_CREAT | os.O_WRONLY))
            outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
            then = array.digest()
            array.device.synchronize()
            await client.read(url, 0, 10)
            quiet = array.digest() == then
            await client.read_into(url, array)
            return {
                "outcome": type(outcome).__name__, "quiet": quiet, "digest": array.digest()
            }  # fmt: skip

    try:
        return asyncio.run(main())
    finally:
        array.free()


@scenario
def lifetimes(url: str, nbytes: int) -> dict[str, Any]:
    """Consumers outlive the buffer and the client; the memory goes with the last of them."""
    told: dict[str, Any] = {}
    with racer.Client(timeout=30) as client:
        buffer = client.gpu_alloc(nbytes)
        plain = Consumer(buffer)
        versioned = Consumer(buffer, stream=1, max_version=(1, 0))
        interface = buffer.__cuda_array_interface__
        unused = buffer.__dlpack__()
        del unused
        client.read_into(url, buffer)
        told["same"] = plain.address == versioned.address == interface["data"][0]
        # An array that was made from the buffer is read into like the buffer itself.
        view = Array.__new__(Array)
        view.__cuda_array_interface__ = interface
        told["view"] = client.read_into(url, view)
        buffer.close()
        buffer.close()
    told["digests"] = [plain.digest(), versioned.digest()]
    told["held"] = held()
    plain.drop()
    told["after one"] = versioned.digest()
    versioned.drop()
    told["with the buffer"] = held()["mappings"]
    del buffer
    gc.collect()
    told["at the end"] = held()["mappings"]
    return told


@scenario
def many_threads(urls: list[str], nbytes: int, interface: str) -> dict[str, Any]:
    """Several threads read into arrays of their own through one ring."""
    arrays = [Array(nbytes, interface) for _ in urls]
    errors: list[str] = []
    with racer.Client(timeout=60) as client:

        def work(url: str, array: Array) -> None:
            try:
                client.read_into(url, array)
            except Exception as error:  # noqa: BLE001 - told to the test
                errors.append(repr(error))

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(urls, arrays, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mapped = held()["mappings"]
    digests = [array.digest() for array in arrays]
    for array in arrays:
        array.free()
    return {"digests": digests, "errors": errors, "mapped": mapped}


@scenario
def alloc_only(nbytes: int, device: object = 0) -> dict[str, Any]:
    with racer.Client() as client, client.gpu_alloc(nbytes, device) as buffer:
        return {"nbytes": buffer.nbytes, "gpu": buffer.gpu, "device": buffer.device_id}


@scenario
def torch_tensor(url: str, count: int, dtype: str, device: str) -> dict[str, Any]:
    """A read into a parameter: one with a gradient, on a GPU that is not the current one."""
    from tests.support import fake_torch

    fake_torch.install()
    place = fake_torch.device(device)
    tensor = fake_torch.empty((count,), dtype=getattr(fake_torch, dtype), device=place)
    tensor.requires_grad = True
    with racer.Client(timeout=30) as client:
        told: dict[str, Any] = {"count": client.read_into(url, tensor)}
        told["digest"] = hashlib.sha256(tensor.tobytes()).hexdigest()
        tensor.contiguous = False
        try:
            client.read_into(url, tensor)
        except TypeError as error:
            told["refused"] = str(error)
    return told


@scenario
def load(url: str, device: str, staging_bytes: int, early: int = 0) -> dict[str, Any]:
    """Loads a model to a GPU, and leaves after `early` tensors where that is not 0."""
    from tests.support import fake_torch

    fake_torch.install()
    tensors = {}
    with racer.load(url, device=device, staging_bytes=staging_bytes, in_flight=2) as stream:
        for name, tensor in stream:
            assert tensor.device == device
            tensors[name] = tensor  # Not looked at yet, which would wait for the GPU.
            if len(tensors) == early:
                break
        rungs = dict(stream.report.rungs)
    digests = {name: hashlib.sha256(tensor.tobytes()) for name, tensor in tensors.items()}
    return {"digests": {name: d.hexdigest() for name, d in digests.items()}, "rungs": rungs}


@scenario
def forked(url: str, nbytes: int) -> dict[str, Any]:
    """A child of a process with GPU memory: it is told, and takes nothing with it when it ends."""
    told: dict[str, Any] = {}
    array = Array(nbytes, "dlpack")
    with racer.Client(timeout=30) as client, client.gpu_alloc(nbytes) as buffer:
        client.read_into(url, buffer)
        client.read_into(url, array)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            outcomes = []
            for destination in (buffer, array, bytearray(nbytes)):
                try:
                    outcomes.append(client.read_into(url, destination))
                except racer.RacerError as error:
                    outcomes.append(type(error).__name__)
            buffer.close()
            client.close()
            os.write(writing, json.dumps(outcomes).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told["child"] = json.loads(pipe.read())
        told["status"] = os.waitpid(pid, 0)[1]
        client.read_into(url, buffer)
        told["digest"] = digest(array.device, buffer.address, nbytes)
    array.free()
    return told


@scenario
def faults(of: str, plan: list[tuple[str, int, int]], **arguments: Any) -> dict[str, Any]:
    """Runs scenario `of` once for each (call, code, nth), each in a fork that loads the driver."""
    return {f"{name}:{code}:{nth}": _forked(of, name, code, nth, arguments)
            for name, code, nth in plan}  # fmt: skip


def _forked(of: str, name: str, code: int, nth: int, arguments: dict[str, Any]) -> Any:
    """The driver is loaded by the child alone: it reads then what it is to do wrong."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.environ["FAKECUDA_FAIL"] = f"{name}:{code}:{nth}"
        _said.clear()
        os.write(writing, json.dumps(run(of, arguments)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(told) if status == 0 else {"status": status}


# --- the process ----------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """What of the stand-in's memory this process has mapped and open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "mappings": sum("memfd:fakegpu" in line for line in maps),
        "descriptors": sum("memfd:fakegpu" in name for name in names),
        "sockets": sum("socket:" in name for name in names),
        "threads": threading.active_count() - 1,
    }


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _said.append(record.getMessage())


def run(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        told["result"] = SCENARIOS[name](**arguments)
    except racer.RacerError as error:
        told["error"] = {
            "type": type(error).__name__, "code": error.code, "text": str(error),
            "native": getattr(error, "native", 0),
        }  # fmt: skip
        error.__traceback__ = error.__context__ = None
    gc.collect()
    told["left"] = {what: count for what, count in held().items() if count}
    told["said"] = _said
    return told


def main() -> None:
    logging.getLogger("racer").addHandler(_Said())
    staging.STAGING_PART_BYTES = 2 << 20  # So that small objects have many parts.
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
