"""libcuda.so.1: calls that raise.

Layer: bottom of `cuda`; any thread. ctypes lets the interpreter lock go while a call runs. A
process that was forked after CUDA was initialised cannot use it: calls raise Forked there.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

from racer.errors import Forked, GpuError, GpuUnavailable

LIBRARY = "libcuda.so.1"

POSIX_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
EXPORTS_DESCRIPTORS: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
ORDINAL_OF_POINTER: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
OUT_OF_MEMORY: Final = 2
DEINITIALIZED: Final = 4

_HINTS: Final = {
    2: "free memory of this GPU, or ask for less",
    46: "another process holds this GPU exclusively, or it was lost: see `nvidia-smi -q`",
    100: "no NVIDIA GPU is visible: check CUDA_VISIBLE_DEVICES and the container's devices",
    101: "this GPU is not visible to the process: check CUDA_VISIBLE_DEVICES",
    700: "the process's CUDA context is lost: see the kernel log for the Xid, and start it again",
    719: "the process's CUDA context is lost: see the kernel log for the Xid, and start it again",
    801: "this GPU, driver or container cannot export memory by descriptor",
    803: "the driver and its libraries have different versions: restart after the update",
}


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", _AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


# The symbols that libcuda exports under these names since CUDA 10.2, with their parameters.
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetDevice": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
}


class Driver:
    """The loaded library, initialised. `driver.cuMemMap(…)` raises GpuError where it fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        """Called once for each function: what it makes is kept as an attribute."""
        versioned = next((n for n in _CALLS if n == name or n.rpartition("_v")[0] == name), name)
        parameters = _CALLS.get(versioned)
        if parameters is None:
            raise AttributeError(name)
        try:
            function = getattr(self._library, versioned)
        except AttributeError:
            raise GpuUnavailable(
                f"this NVIDIA driver has no {name}",
                code="gpu_driver_too_old",
                hint="install a driver for CUDA 11.4 or newer",
            ) from None
        function.argtypes, function.restype = parameters, c_int

        def call(*arguments: Any) -> None:
            self.check_process()
            status = function(*arguments)
            if status:
                raise self._error(name, status)

        setattr(self, name, call)
        return call

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(
                "CUDA was initialised before this process was forked, and does not work here",
                hint="start workers with the method 'spawn', or use the GPU in the parent alone",
            )

    def _error(self, name: str, status: int) -> GpuError:
        text = c_char_p()
        known = self._library.cuGetErrorName(c_int(status), ctypes.byref(text)) == 0
        label = text.value.decode("ascii", "replace") if known and text.value else "an error"
        error = GpuError(
            f"{name} failed: {label} ({status})",
            code="gpu_out_of_memory" if status == OUT_OF_MEMORY else None,
            hint=_HINTS.get(status, ""),
        )
        error.native = status
        return error


_loaded: Driver | None = None
_loading = threading.Lock()


def driver() -> Driver:
    """The driver of this process; loads and initialises it once, which may take seconds.

    Raises GpuUnavailable where there is none, GpuError where it does not start. What failed is
    tried again at the next call.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            try:
                library = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise GpuUnavailable(
                    f"the NVIDIA driver library was not found: {error}",
                    code="gpu_no_driver",
                    hint="install the driver, or run the container with the NVIDIA runtime",
                ) from error
            fresh = Driver(library)
            fresh.cuInit(0)
            _loaded = fresh
        _loaded.check_process()
        return _loaded


def _renew_lock() -> None:
    global _loading
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
