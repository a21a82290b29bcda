"""GPU memory as a landing for files of a model behind racerd: `GpuLanding`.

Layer: models, on the client and `racer.gpu`; one thread's. Imported where a model is loaded to a
GPU. Size and version of what is read are known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from racer.client import Client
from racer.cuda.device import Device
from racer.cuda.memory import DeviceMemory
from racer.deadline import Deadline
from racer.errors import (
    Closed,
    ConnectionLost,
    DaemonUnavailable,
    GpuError,
    GpuUnavailable,
    MemoryLost,
)
from racer.gpu.buffer import GpuBuffer
from racer.gpu.filling import why_no_gpu
from racer.gpu.place import GpuPlace
from racer.gpu.target import GpuTarget
from racer.models.source import SourceFile
from racer.retry import Retries
from racer.turns import Flag
from racer.urls import RacerUrl

_log = logging.getLogger("racer")


class GpuLanding:
    """`nbytes` on `device`; `cancelled` ends its pauses. `buffer` is another one after a read that
    was not answered: its memory is never used again."""

    def __init__(self, client: Client, device: Device, nbytes: int, cancelled: Flag) -> None:
        self._client = client
        self._device = device
        self._nbytes = nbytes
        self._cancelled = cancelled
        self._buffer: GpuBuffer | None = self._allocated()

    def _allocated(self) -> GpuBuffer:
        return GpuBuffer(GpuTarget(DeviceMemory(self._device, self._nbytes)))

    @property
    def buffer(self) -> GpuBuffer:
        if self._buffer is None:
            raise Closed("this landing was closed")
        return self._buffer

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        """Fills the front of the buffer with [start, stop) of the file; returns bytes by rung."""
        url = RacerUrl.parse_object(file.url)
        retries, deadline = Retries(restarts=True), Deadline.after(self._client.timeout)
        while True:
            if self.buffer.lost:
                self.buffer.close()
                self._buffer = self._allocated()
            try:
                # Nothing is queued on the buffer: the loader waits for its copies out of it.
                with GpuPlace(self.buffer) as place:
                    return self._client.fill_gpu(url, place, start, stop, file.version)
            except (ConnectionLost, MemoryLost, DaemonUnavailable) as error:
                pause = retries.pause_after(error, deadline)
            if self._cancelled.wait(pause):
                raise Closed(f"reading {file.url} was cancelled")

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()


def serves_gpu(client: Client, cache: str, device: object) -> bool:
    """Whether the daemon of `cache` writes into memory of `device`; the log says why not."""
    try:
        lack: GpuError | GpuUnavailable | None = why_no_gpu(
            client.info(cache), Device.find(device).uuid
        )
    except (GpuError, GpuUnavailable) as error:
        lack = error
    if lack is not None:
        _log.warning("loading through host memory: %s [%s]", lack, lack.code)
    return lack is None


def open_landing(client: Client, nbytes: int, device: object, cancelled: Flag) -> GpuLanding | None:
    """None where the GPU has no memory for it; the log says so."""
    try:
        return GpuLanding(client, Device.find(device), nbytes, cancelled)
    except (GpuError, GpuUnavailable) as error:
        _log.warning("a chunk is loaded through host memory: %s [%s]", error, error.code)
        return None
