"""Exported GPU memory that daemons know: `GpuTarget`.

Layer: gpu, on `racer.target` and `cuda`; thread-safe.
"""

from __future__ import annotations

import logging
import weakref
from typing import ClassVar

from racer import requests
from racer.connection import Connection
from racer.cuda.memory import DeviceMemory
from racer.target import Registered
from racer.wire import Request

_log = logging.getLogger("racer")


class GpuTarget(Registered[DeviceMemory]):
    """Exported memory and its registrations. Freed with the last reference to it: consumers of
    capsules and arrays hold it, reads in flight do, a `GpuBuffer` does until it is closed."""

    operation: ClassVar[str] = requests.GPU_READ

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self.lent = False  # Then others may have queued work on it.
        _TARGETS[memory.address] = self

    def register_request(self) -> Request:
        return requests.register_gpu_request(self.memory.device.uuid, self.memory.target_bytes)

    def adopt(self, endpoint: object, connection: Connection, target_id: str) -> str:
        """Takes over a registration that was made elsewhere; returns the id to use."""
        with self._lock:
            known = None if self.memory.closed else self.known_id(endpoint)
            if known is None and not self.memory.closed:
                self._registered[endpoint] = (connection, target_id)
                return target_id
        connection.close()
        self.check()
        assert known is not None
        return known

    def regain(self) -> None:
        """After reads that were given up: the daemon's word that it let go makes the memory good
        again. Without it the memory stays lost."""
        if self._lost and self.release():
            self._lost = False

    def close(self) -> None:
        """Has the daemons let go (they answer when nothing of theirs touches it any more), then
        frees the memory. One that does not answer keeps the physical memory for as long as it has
        it mapped: what it writes late, it writes to nobody's memory."""
        if self._registered and not self.release():
            _log.info("GPU memory was freed though a daemon did not say that it let go of it")
        super().close()

    def __del__(self) -> None:
        if not self.memory.closed:
            self.close()


_TARGETS: weakref.WeakValueDictionary[int, GpuTarget] = weakref.WeakValueDictionary()


def target_holding(address: int, nbytes: int) -> GpuTarget | None:
    """The exported memory of this process that [address, address + nbytes) lies in, if any."""
    for target in list(_TARGETS.values()):
        memory = target.memory
        if memory.address <= address and address + nbytes <= memory.address + memory.size:
            return target
    return None
