"""Real clients: processes that export memory with cuda.bindings and pass it by SCM_RIGHTS."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
from types import TracebackType

import pytest

from racerd.units import KIB
from tests.support.gpu_rig import (
    TARGET_BYTES,
    Hold,
    all_ok,
    gpu_rig,
    standin_environment,
)
from tests.support.standin import StandIn

_CLIENT = """
import hashlib, socket, sys
from cuda.bindings import driver as cuda
from racerd.gpu.worker.driver import call
link, size = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
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
socket.send_fds(link, [b"x"], [int(call(cuda.cuMemExportToShareableHandle, handle, kind, 0))])
while (ask := link.recv(64)):
    count = int(ask)
    data = bytearray(count)
    call(cuda.cuMemcpyDtoH, data, address, count)
    link.send(hashlib.sha256(data).hexdigest().encode())
"""


class Client:
    """A process with GPU memory. `descriptor` is the exported allocation, for the daemon to own."""

    def __init__(self, standin: StandIn) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CLIENT, str(theirs.fileno()), str(TARGET_BYTES)],
                env=standin.environment(),
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(60)
        _, [self.descriptor], _, _ = socket.recv_fds(ours, 1, 1)

    def digest(self, count: int) -> str:
        """SHA-256 of the first bytes of the client's memory, as the client's own GPU sees them."""
        self._link.send(str(count).encode())
        return self._link.recv(64).decode()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._link.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(autouse=True)
def _on_the_standin(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    standin_environment(standin, monkeypatch)


def test_a_client_finds_the_bytes_in_its_own_memory(standin: StandIn) -> None:
    """R2, F111: exported in one process, imported, verified and filled in another."""

    async def main() -> None:
        async with gpu_rig() as rig:
            with Client(standin) as client:
                target = await rig.device.import_target(client.descriptor, TARGET_BYTES)
                pages = [rig.page(64 * KIB), rig.page(50_001)]
                reads = [pages[0].read(0), pages[1].read(64 * KIB)]
                assert all_ok(await rig.device.read(target, reads))
                whole = pages[0].plaintext + pages[1].plaintext
                assert client.digest(len(whole)) == hashlib.sha256(whole).hexdigest()
                await rig.device.release_target(target)

    asyncio.run(main())


def test_one_of_two_clients_dies_in_the_middle_of_its_read(
    standin: StandIn, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F91, L33: the memory of a client that died stays until the GPU is done with it; the other
    client gets its bytes."""

    async def main() -> None:
        hold = Hold(tmp_path, monkeypatch)  # type: ignore[arg-type]
        async with gpu_rig() as rig:
            with Client(standin) as first, Client(standin) as second:
                dying = await rig.device.import_target(first.descriptor, TARGET_BYTES)
                living = await rig.device.import_target(second.descriptor, TARGET_BYTES)
                page = rig.page()
                reads = [
                    asyncio.ensure_future(rig.device.read(target, [page.read(0)]))
                    for target in (dying, living)
                ]
                await hold.reached()
                first.process.kill()
                first.process.wait()
                releasing = asyncio.ensure_future(rig.device.release_target(dying))
                hold.lift()
                await releasing
                for read in reads:
                    assert all_ok(await read)
                count = len(page.plaintext)
                assert second.digest(count) == hashlib.sha256(page.plaintext).hexdigest()
                await rig.device.release_target(living)

    asyncio.run(main())
