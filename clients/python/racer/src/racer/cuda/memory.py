"""Device memory that another process can be given: `DeviceMemory`.

Layer: `cuda`, on `device`; any thread. Made by cuMemCreate with a POSIX descriptor, mapped for
reading and writing on its own GPU, exported once. What the driver guarantees (CUDA driver API,
"Virtual Memory Management"): the physical memory lives as long as any mapping of it, in any
process, or any descriptor does. So a process that still has it mapped never writes to memory that
was given to somebody else; still, `racer.gpu` frees it only after the daemon let go of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import ExitStack

from racer.cuda.device import Device
from racer.cuda.driver import (
    DEINITIALIZED,
    ON_DEVICE,
    PINNED,
    POSIX_DESCRIPTOR,
    READ_WRITE,
    Access,
    AllocationProperties,
    Driver,
    Location,
)
from racer.errors import GpuError, GpuUnavailable

_log = logging.getLogger("racer")


class DeviceMemory:
    """`size` bytes at `address`, of an allocation of `target_bytes`, exported as `fd`.

    `close` waits for everything that runs on the GPU before it unmaps (cuMemUnmap does not wait).
    """

    def __init__(self, device: Device, size: int) -> None:
        if size <= 0:
            raise ValueError(f"GPU memory of {size} bytes")
        if not device.exports_memory():
            raise GpuUnavailable(
                f"{device} cannot export memory by descriptor",
                code="gpu_export_unsupported",
                hint="racerd reads into host memory, and the bytes are copied from there",
                retry="never",
            )
        self.device = device
        self.size = size
        self._pid = os.getpid()
        with device.current() as api, ExitStack() as undo:
            self._make(api, undo)
            self._undo = undo.pop_all()

    def _make(self, api: Driver, undo: ExitStack) -> None:
        place = Location(ON_DEVICE, self.device.ordinal)
        wanted = AllocationProperties(type=PINNED, handle_types=POSIX_DESCRIPTOR, location=place)
        granularity = ctypes.c_size_t()
        api.cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(wanted), 0)
        total = -(-self.size // granularity.value) * granularity.value
        handle, address, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
        api.cuMemCreate(ctypes.byref(handle), total, ctypes.byref(wanted), 0)
        with ExitStack() as made:
            # Once there is a mapping, it and the descriptor hold the memory.
            made.callback(api.cuMemRelease, handle.value)
            api.cuMemExportToShareableHandle(ctypes.byref(fd), handle.value, POSIX_DESCRIPTOR, 0)
            undo.callback(os.close, fd.value)
            os.set_inheritable(fd.value, False)
            api.cuMemAddressReserve(ctypes.byref(address), total, 0, 0, 0)
            undo.callback(api.cuMemAddressFree, address.value, total)
            api.cuMemMap(address.value, total, 0, handle.value, 0)
            undo.callback(api.cuMemUnmap, address.value, total)
            access = Access(place, READ_WRITE)
            api.cuMemSetAccess(address.value, total, ctypes.byref(access), 1)
        self.fd, self.address, self.target_bytes = fd.value, address.value, total

    @property
    def closed(self) -> bool:
        return self.fd < 0

    @property
    def touched(self) -> bool:
        """GPU memory is there from the start."""
        return True

    def touch(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Frees it; done twice it does nothing. Nobody may use it any more, the daemon included.

        Never raises for what the driver says: a lost context takes its memory with it, and the log
        tells of anything else.
        """
        if getattr(self, "fd", -1) < 0:
            return
        fd, self.fd = self.fd, -1
        if os.getpid() != self._pid:
            os.close(fd)
            return
        try:
            try:
                with self.device.current() as api, self._undo:
                    api.cuCtxSynchronize()
            finally:
                self._undo.close()  # What is left where no context could be made current.
        except GpuError as error:
            if error.native != DEINITIALIZED:  # The process is ending.
                _log.warning("GPU memory on %s was not freed in order: %s", self.device, error)

    def __del__(self) -> None:
        self.close()
