"""The one door to cuda.bindings.driver: calls that raise, and which errors are the end.

Layer: gpu worker. Any thread; a thread that calls into the device must have made the context
current (`Device.make_current`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from racerd.errors import DeviceError

# "The context cannot be used (and must be destroyed). All existing device memory allocations from
# this context are invalid and must be reconstructed": CUDA driver API, CUresult. Errors that only
# say that the driver or the context is gone, and "unknown", are treated the same.
_STICKY = frozenset(
    (4, 201, 214, 220, 226, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721, 802, 999)
)

_CODES = {2: "gpu_out_of_memory"}

_HINTS = {
    2: "lower gpu_staging_bytes, or free memory of this GPU",
    46: "another process holds this GPU exclusively, or it was lost: see `nvidia-smi -q`",
    100: "no NVIDIA GPU is visible: check CUDA_VISIBLE_DEVICES and the container's devices",
    101: "this GPU is not visible to racerd: give the daemon all GPUs of the node",
    209: "the kernels are for another GPU: run `python -m racerd.gpu.build` again",
    214: "the GPU's memory has an uncorrectable error: see `nvidia-smi -q -d ECC`, drain the node",
    700: "see the kernel log for the Xid; if it repeats, run the GPU's diagnostics",
    702: "see the kernel log for the Xid; if it repeats, run the GPU's diagnostics",
    719: "see the kernel log for the Xid; if it repeats, run the GPU's diagnostics",
    803: "the driver and its libraries have different versions: restart after the update",
}


class CudaError(DeviceError):
    """A CUDA call failed. `native` is the CUresult; `sticky` errors end the process."""

    def __init__(self, call: str, native: int, name: str) -> None:
        super().__init__(
            "gpu_lost" if native in _STICKY else _CODES.get(native, "gpu_error"),
            f"{call} failed: {name} ({native})",
            native=native,
            hint=_HINTS.get(native, "see the daemon's log"),
        )

    @property
    def sticky(self) -> bool:
        return self.native in _STICKY


def call(function: Any, *arguments: Any) -> Any:
    """Calls `function` of cuda.bindings and returns its result, if any. Raises CudaError."""
    status, *results = function(*arguments)
    if status:
        raise CudaError(function.__name__, int(status), status.name)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU with its primary context retained. `ordinal` is this process's number for it."""

    ordinal: int
    uuid: str
    name: str
    architecture: str
    context: Any

    @classmethod
    def open(cls, uuid: str) -> Device:
        """Finds the GPU with this UUID (32 hex digits) and retains its primary context.

        No other GPU is touched (R18): counting and asking for UUIDs makes no context. Raises
        DeviceError `gpu_absent`, or CudaError.
        """
        try:
            call(cuda.cuInit, 0)
        except RuntimeError as error:  # No libcuda on this machine.
            raise DeviceError(
                "gpu_absent",
                f"the NVIDIA driver library was not found: {error}",
                native=0,
                hint="install the driver, or run the container with the NVIDIA runtime",
            ) from error
        for ordinal in range(call(cuda.cuDeviceGetCount)):
            if call(cuda.cuDeviceGetUuid, ordinal).bytes.hex() == uuid:
                return cls._retain(ordinal, uuid)
        raise DeviceError(
            "gpu_absent", f"no visible GPU has the UUID {uuid}", native=0, hint=_HINTS[101]
        )

    @classmethod
    def _retain(cls, ordinal: int, uuid: str) -> Device:
        attribute = cuda.CUdevice_attribute
        major, minor = (
            call(cuda.cuDeviceGetAttribute, which, ordinal)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        name = call(cuda.cuDeviceGetName, 128, ordinal).partition(b"\0")[0].decode()
        context = call(cuda.cuDevicePrimaryCtxRetain, ordinal)
        return cls(ordinal, uuid, name, f"sm_{major}{minor}", context)

    def make_current(self) -> None:
        """Makes the context current on the calling thread, for the rest of its life."""
        call(cuda.cuCtxSetCurrent, self.context)

    def memory_bytes(self) -> int:
        return int(call(cuda.cuDeviceTotalMem, self.ordinal))

    def close(self) -> None:
        call(cuda.cuDevicePrimaryCtxRelease, self.ordinal)
