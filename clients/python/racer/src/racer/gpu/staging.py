"""Exported memory that is read into and copied from: for arrays that cannot be exported.

Layer: gpu, on `target` and `landing`; thread-safe.
"""

from __future__ import annotations

from racer.cuda.device import Device, Event, Stream
from racer.cuda.memory import DeviceMemory
from racer.deadline import Deadline
from racer.errors import GpuError
from racer.gpu.target import GpuTarget
from racer.landing import SharedSlots
from racer.target import Registrar

STAGING_PART_BYTES = 16 << 20
STAGING_SLOTS = 4


def make_slot(device: Device) -> StagingSlot:
    """Raises GpuError, GpuUnavailable; leaves nothing behind then."""
    memory = DeviceMemory(device, STAGING_PART_BYTES)
    try:
        return StagingSlot(memory)
    except BaseException:
        memory.close()
        raise


def is_full(error: GpuError) -> bool:
    """Whether a slot was not made because the GPU has no room for it."""
    return error.code == "gpu_out_of_memory"


class StagingSlot(GpuTarget):
    """Exported memory that parts are copied out of, and the end of the last such copy."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self._copied = Event(memory.device)

    def id_for(self, endpoint: Registrar, deadline: Deadline) -> str:
        """Asked for when the daemon is about to write here: what is still being copied out of the
        slot is waited for."""
        self.wait_copied()
        return super().id_for(endpoint, deadline)

    def wait_copied(self) -> None:
        self._copied.wait()

    def copy_to(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queues a copy of the first `nbytes`."""
        stream.copy_from_device(address, self.memory.address, nbytes)
        self._copied.record(stream)

    def close(self) -> None:
        super().close()
        self._copied.close()


class StagingRing(SharedSlots[StagingSlot]):
    """Of one GPU, bounded whatever is read."""

    def __init__(self, device: Device) -> None:
        super().__init__(STAGING_PART_BYTES, STAGING_SLOTS)
        self._device = device

    def make(self) -> StagingSlot | None:
        """Raises GpuError, GpuUnavailable where not even one slot can be had."""
        try:
            return make_slot(self._device)
        except GpuError as error:
            if not is_full(error) or not self._made:
                raise
            return None  # Fewer slots are slower, and enough.
