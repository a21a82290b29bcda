"""Memory of the worker: on the device, pinned on the host, imported from clients.

Layer: gpu worker. Each class acquires in its constructor's counterpart `open` and gives back in
`close`, which is called once and only when no stream and no cuFile read uses the memory any more.
A context must be current on the calling thread, also for `close` (F90).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver as cuda

from racerd.errors import DeviceError
from racerd.gpu.worker.driver import CudaError, Device, call
from racerd.units import format_bytes

_HANDLE_TYPE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class DeviceBuffer:
    """`size` bytes of device memory at `address`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(call(cuda.cuMemAlloc, size))

    def close(self) -> None:
        call(cuda.cuMemFree, self.address)


class PinnedBuffer:
    """`size` bytes of page-locked host memory; `view` is writable and dies with `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(call(cuda.cuMemHostAlloc, size, 0))
        self.view = memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")

    def close(self) -> None:
        self.view.release()
        call(cuda.cuMemFreeHost, self.address)


class SharedArena:
    """The daemon's arena of sealed frames, mapped here and registered as pinned memory.

    The descriptor is taken over and closed. Raises DeviceError `gpu_arena_not_pinned`: 2 or 801
    where the memlock limit or the container forbids it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._map.madvise(mmap.MADV_DONTDUMP)
        # Only an exported buffer keeps the address; it is dropped before the map is closed.
        self._anchor = ctypes.c_ubyte.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        try:
            call(cuda.cuMemHostRegister, self.address, size, 0)
        except CudaError as error:
            self._unmap()
            if error.sticky:
                raise
            raise DeviceError(
                "gpu_arena_not_pinned",
                f"{format_bytes(size)} of the memory tier could not be pinned: {error.message}",
                native=error.native,
                hint="raise the limit of locked memory (LimitMEMLOCK=infinity, --ulimit memlock=-1)"
                " or lower `memory`",
            ) from error

    def close(self) -> None:
        call(cuda.cuMemHostUnregister, self.address)
        self._unmap()

    def _unmap(self) -> None:
        del self._anchor
        self._map.close()


class ImportedTarget:
    """A client's exported allocation, mapped for reading and writing (R2).

    The descriptor is taken over and closed. Refused with DeviceError `target_not_gpu_memory`,
    `target_wrong_gpu`, `target_misaligned` or `target_too_small` (R8); nothing is left behind then.
    """

    def __init__(self, device: Device, descriptor: int, size: int) -> None:
        self.size = size
        self.in_use = 0
        self.closing = False
        try:
            granularity = self._granularity(device)
            if size < 1 or size % granularity:
                raise _refused(
                    "target_misaligned",
                    f"a GPU allocation is a multiple of {granularity} bytes, not {size}",
                )
            handle = self._import(descriptor)
        finally:
            os.close(descriptor)
        with ExitStack() as mapped:
            try:
                self._check_device(device, handle)
                self.address = int(call(cuda.cuMemAddressReserve, size, 0, 0, 0))
                mapped.callback(call, cuda.cuMemAddressFree, self.address, size)
                self._map(handle)
                mapped.callback(call, cuda.cuMemUnmap, self.address, size)
                call(cuda.cuMemSetAccess, self.address, size, [self._access(device)], 1)
            finally:
                # The mapping holds the memory; the handle is not needed once there is one.
                call(cuda.cuMemRelease, handle)
            self._unmap = mapped.pop_all()

    def _map(self, handle: Any) -> None:
        try:
            call(cuda.cuMemMap, self.address, self.size, 0, handle, 0)
        except CudaError as error:
            if error.native != 1:
                raise
            raise _refused(
                "target_too_small", f"the allocation does not have {self.size} bytes"
            ) from error

    @staticmethod
    def _import(descriptor: int) -> Any:
        try:
            return call(cuda.cuMemImportFromShareableHandle, descriptor, _HANDLE_TYPE)
        except CudaError as error:
            if error.sticky:
                raise
            raise _refused(
                "target_not_gpu_memory",
                f"the descriptor is not an exported CUDA allocation: {error.message}",
            ) from error

    @staticmethod
    def _check_device(device: Device, handle: Any) -> None:
        properties = call(cuda.cuMemGetAllocationPropertiesFromHandle, handle)
        if properties.location.id != device.ordinal:
            raise _refused(
                "target_wrong_gpu",
                f"the allocation is not on GPU {device.uuid}, which the request names",
            )

    @staticmethod
    def _granularity(device: Device) -> int:
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = _HANDLE_TYPE
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.ordinal
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(call(cuda.cuMemGetAllocationGranularity, properties, minimum))

    @staticmethod
    def _access(device: Device) -> Any:
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.ordinal
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def close(self) -> None:
        self._unmap.close()


def _refused(code: str, message: str) -> DeviceError:
    return DeviceError(
        code,
        message,
        native=1,
        hint="export a cuMemCreate allocation of the GPU you name, with its whole size",
    )
