"""What `Client.gpu_alloc` returns: `GpuBuffer`.

Layer: gpu, on `target` and `cuda.dlpack`; safe from any thread.
"""

from __future__ import annotations

from typing import Any

from racer.cuda import dlpack
from racer.cuda.device import Device
from racer.cuda.memory import DeviceMemory
from racer.errors import Closed
from racer.gpu.target import GpuTarget


class GpuBuffer:
    """`nbytes` of GPU memory that racerd writes into; made by `Client.gpu_alloc`.

    torch, cupy and numba take it as it is, as bytes, without a copy: `torch.from_dlpack(buffer)`,
    `cupy.from_dlpack(buffer)`, `numba.cuda.as_cuda_array(buffer)`. What was made from it keeps the
    memory, also after `close`; the memory is freed when nobody holds it any more and the daemon has
    said that it let go. Close it when no read into it is running.
    """

    def __init__(self, target: GpuTarget) -> None:
        self._target: GpuTarget | None = target
        self._lent: GpuTarget | None = None
        self.nbytes = target.memory.size
        self.device_id = target.memory.device.ordinal
        self.gpu = target.memory.device.uuid

    @property
    def target(self) -> GpuTarget:
        if self._target is None:
            raise Closed("this GPU memory was closed")
        return self._target

    @property
    def address(self) -> int:
        """The device pointer. Raises Closed after `close`."""
        return self.target.memory.address

    @property
    def closed(self) -> bool:
        return self._target is None

    @property
    def lost(self) -> bool:
        """Whether a read was not answered and the daemon did not say that it let go, so that this
        memory is not read into any more."""
        return self._target is not None and self._target.lost

    # --- lending ----------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Whoever takes it holds this object, and so the memory."""
        self._lent = self.target  # Kept beyond `close`: nobody tells when the array is gone.
        self._lent.lent = True
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the bytes, for DLPack 1 where `max_version` allows it.

        `stream` needs nothing: between reads nothing is queued on this memory. Raises BufferError
        for a copy or another device.
        """
        if copy:
            raise BufferError("this memory is lent, not copied")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this memory is on cuda:{self.device_id}")
        versioned = max_version is not None and max_version[0] >= 1
        target = self.target
        target.lent = True
        return dlpack.lend(target, self.address, self.nbytes, self.device_id, versioned=versioned)

    # --- lifetime ---------------------------------------------------------------------------

    def close(self) -> None:
        """Has the daemons let go, and gives the memory up: it is freed as soon as nothing that was
        made from it is left. Done twice it does nothing."""
        dlpack.sweep()
        target, self._target = self._target, None
        if target is not None:
            target.release()

    def __enter__(self) -> GpuBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def alloc(nbytes: int, device: object) -> GpuTarget:
    """Memory for a buffer. Raises GpuUnavailable, GpuError; leaves nothing behind then."""
    dlpack.sweep()  # What nobody uses any more may be the room that is missing.
    return GpuTarget(DeviceMemory(Device.find(device), nbytes))
