"""Where a read into GPU memory goes: `GpuPlace`.

Layer: gpu, on `buffer` and `cuda.arrays`.
"""

from __future__ import annotations

from typing import Any

from racer.cuda.arrays import Destination, is_cuda
from racer.gpu.buffer import GpuBuffer
from racer.gpu.target import GpuTarget, target_holding


class GpuPlace:
    """Where a call's bytes go: `nbytes` at `address`, and the exported memory that they lie in, or
    None. A context manager; made on the thread that uses the array, and good after `wait`."""

    def __init__(self, destination: Any) -> None:
        self._opened: Destination | None = None
        if isinstance(destination, GpuBuffer):
            self.target: GpuTarget | None = destination.target
            memory = self.target.memory
            self.device, self.address, self.nbytes = memory.device, memory.address, memory.size
            return
        self._opened = opened = Destination.open(destination)
        self.device, self.address, self.nbytes = opened.device, opened.address, opened.nbytes
        self.target = target_holding(self.address, self.nbytes) if self.nbytes else None

    def wait(self) -> None:
        """Blocks until nothing that was queued for the place before still runs."""
        if self._opened is not None:
            self._opened.wait()
        elif self.target is not None and self.target.lent:
            self.device.synchronize()

    def __enter__(self) -> GpuPlace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()


def is_gpu_destination(value: object) -> bool:
    return isinstance(value, GpuBuffer) or is_cuda(value)
