"""A real daemon on the stand-in driver, and clients of its `gpu-read`.

`GpuClient` is one connection that registers "GPU memory" of the stand-in (a memfd) and reads into
it, in the test's process. `ClientProcess` is a process with real `cuda.bindings`, which exports
memory and checks what its own GPU sees.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from racerd.gpu.identity import uuid_text
from tests.support.gpu_rig import TARGET_BYTES, GpuMemory, gpu_uuid
from tests.support.socket_rig import Answer, RawClient
from tests.support.standin import StandIn
from tools.daemon_process import DaemonProcess

SMALL = (
    "--page-bytes=64KiB",
    "--frame-bytes=16KiB",
    "--memory=16MiB",
    "--gpu-staging-bytes=1MiB",
    "--scrub-bytes-per-second=0",
)


def gpu_name(index: int = 0) -> str:
    """The UUID of the stand-in's GPU number `index`, as clients write it."""
    return uuid_text(gpu_uuid(index))


def eventually(true: Callable[[], bool], what: Callable[[], str] | str) -> None:
    """Waits for a state of another process. Bounded; the wait is not what is tested."""
    deadline = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)


@contextlib.contextmanager
def gpu_daemon(
    standin: StandIn, folder: Path, url: str, *arguments: str, slab: Path | None = None,
    gpu: str = "auto", **environ: str,
) -> Iterator[DaemonProcess]:  # fmt: skip
    """racerd on the stand-in. The slab lies in `folder` unless `slab` says where."""
    disk = f"--disk={slab or folder / 'slab'}:64MiB"
    daemon = DaemonProcess(
        folder,
        caches={"local": url},
        arguments=[*SMALL, disk, *arguments, f"--gpu={gpu}"],
        environ=standin.environment(**environ),
    )
    with daemon:
        yield daemon


def readiness(daemon: DaemonProcess) -> dict[str, Any]:
    return dict(json.loads(daemon.get("/readyz")))


def gpu_ready(daemon: DaemonProcess, *, cufile: str = "on") -> None:
    """Waits until every GPU serves and its cuFile driver is in the state that `cufile` says."""

    def ready() -> bool:
        told = readiness(daemon)
        states = [gpu["cufile"].partition(":")[0] for gpu in told["gpus"]]
        return told["gpu"] == "ready" and all(state == cufile for state in states)

    eventually(ready, lambda: f"{readiness(daemon)}\n{daemon.log}")


class GpuClient:
    """One connection with a target of kind `gpu`, unless `register` is False."""

    def __init__(
        self, daemon: DaemonProcess, *, gpu: int = 0, size: int = TARGET_BYTES,
        register: bool = True,
    ) -> None:  # fmt: skip
        self.memory = GpuMemory(gpu, size)
        self.raw = RawClient(daemon.socket("local"))
        self.raw.sock.settimeout(120)
        self.id = ""
        if register:
            answer = self.register(gpu_name(gpu), size)
            assert answer.status == 201, answer
            self.id = answer.json["id"]

    def __enter__(self) -> GpuClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.raw.sock.close()
        self.memory.__exit__(None, None, None)

    def register(self, gpu: str, size: int, descriptor: int | None = None) -> Answer:
        return self.raw.ask(
            "POST /v1/targets",
            "Racer-Target-Kind: gpu",
            f"Racer-Gpu: {gpu}",
            f"Racer-Target-Bytes: {size}",
            fds=[self.memory.descriptor if descriptor is None else descriptor],
        )

    def send_read(self, path: str, *fields: str, offset: int = 0) -> None:
        lines = [
            f"POST /v1/gpu-read/{path} HTTP/1.1",
            "Host: racer",
            f"Racer-Target: {self.id}",
            f"Racer-Target-Offset: {offset}",
            *fields,
            "",
            "",
        ]
        self.raw.send("\r\n".join(lines))

    def read(self, path: str, *fields: str, offset: int = 0) -> Answer:
        self.send_read(path, *fields, offset=offset)
        return self.raw.receive()

    def release(self) -> Answer:
        return self.raw.ask(f"DELETE /v1/targets/{self.id}")


_CLIENT = """
import array, hashlib, json, socket, sys
from cuda.bindings import driver as cuda
from racerd.gpu.worker.driver import call

path, gpu, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
call(cuda.cuInit, 0)
call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, 0))
properties = cuda.CUmemAllocationProp()
properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
properties.requestedHandleTypes = kind
properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
handle = call(cuda.cuMemCreate, size, properties, 0)
address = call(cuda.cuMemAddressReserve, size, 0, 0, 0)
call(cuda.cuMemMap, address, size, 0, handle, 0)
access = cuda.CUmemAccessDesc()
access.location = properties.location
access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
call(cuda.cuMemSetAccess, address, size, [access], 1)
exported = int(call(cuda.cuMemExportToShareableHandle, handle, kind, 0))
sock = socket.socket(socket.AF_UNIX)
sock.connect(path)
stream = sock.makefile("rb")

def ask(line, *fields, fds=()):
    head = "\\r\\n".join([line + " HTTP/1.1", "Host: racer", *fields, "", ""]).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([head], rights)
    status = int(stream.readline().split()[1])
    length = 0
    while (line := stream.readline()) != b"\\r\\n":
        name, _, value = line.decode().partition(":")
        if name == "Content-Length":
            length = int(value)
    return status, json.loads(stream.read(length))

status, target = ask("POST /v1/targets", "Racer-Target-Kind: gpu", "Racer-Gpu: " + gpu,
                     "Racer-Target-Bytes: %d" % size, fds=[exported])
assert status == 201, target
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name, start, stop = json.loads(line)
    call(cuda.cuMemsetD8, address, 0xEE, size)
    call(cuda.cuCtxSynchronize)
    status, told = ask("POST /v1/gpu-read/" + name, "Racer-Target: " + target["id"],
                       "Range: bytes=%d-%d" % (start, stop - 1))
    data = bytearray(stop - start)
    call(cuda.cuMemcpyDtoH, data, address, stop - start)
    print(json.dumps({"status": status, "told": told,
                      "digest": hashlib.sha256(data).hexdigest()}), flush=True)
assert ask("DELETE /v1/targets/" + target["id"])[0] == 200
call(cuda.cuMemUnmap, address, size)
call(cuda.cuMemRelease, handle)
"""


class ClientProcess:
    """A process with GPU memory of its own, registered with the daemon."""

    def __init__(
        self, standin: StandIn, daemon: DaemonProcess, size: int = TARGET_BYTES, gpu: int = 0
    ) -> None:
        socket = str(daemon.socket("local"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, socket, gpu_name(gpu), str(size)],
            env=standin.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ClientProcess:
        assert self.told() == {"ready": True}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.process.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(60)
        self.process.stdout.close()
        if kind is None:
            assert status in (0, -9)

    def told(self) -> dict[str, Any]:
        """The answer to the oldest question that has none yet."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client process ended"
        return dict(json.loads(line))

    def ask(self, path: str, start: int, stop: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([path, start, stop]) + "\n")
        self.process.stdin.flush()

    def read(self, path: str, start: int, stop: int) -> dict[str, Any]:
        """Has it read a range into its GPU memory; status, answer, and what its own GPU sees."""
        self.ask(path, start, stop)
        return self.told()
