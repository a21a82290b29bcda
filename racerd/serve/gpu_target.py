"""Targets of kind `gpu`: a client's exported CUDA allocation, imported by its GPU's worker.

Layer: serve, loop thread; no CUDA here. It is imported once and mapped in the worker until it is
released: by the client, at its connection's end, or at its death (F91). `release` returns when the
worker has unmapped it, which is what lets an exporter free (F89).
"""

from __future__ import annotations

from racerd.errors import RacerError, RequestError, ResourceError
from racerd.gpu.device import GpuDevice, GpuTarget
from racerd.gpu.node import GpuNode
from racerd.read.gpu_disk import GpuDestination
from racerd.read.gpu_pages import as_told, wait_ready
from racerd.runtime.deadline import Deadline
from racerd.serve.descriptors import ReceivedDescriptor
from racerd.serve.leases import Lease, Leases
from racerd.telemetry import Metrics


class GpuRange:
    """A part of a target, for as long as its lease: `destination` is what a read takes."""

    __slots__ = ("destination",)

    def __init__(self, destination: GpuDestination) -> None:
        self.destination = destination

    def release(self) -> None:
        """A read has ended when its task has: there is nothing else to end."""


class GpuMemory:
    """An imported allocation, from `open` to `release`."""

    kind: str = "gpu"

    def __init__(self, gpus: GpuNode | None, gpu: str, size_bytes: int, metrics: Metrics) -> None:
        """`gpu` is the UUID that the client gave, as text."""
        self._gpus = gpus
        self.gpu = gpu
        self.size_bytes = size_bytes
        self._gauge = metrics.target_bytes.labels(self.kind)
        self._refused = metrics.targets_refused
        self._leases = Leases()
        self._imported: tuple[GpuDevice, GpuTarget] | None = None

    async def open(self, descriptor: ReceivedDescriptor, deadline: Deadline) -> GpuMemory:
        """Imports the allocation behind `descriptor`, which is taken over.

        Waits for a worker that is starting. Raises RequestError `gpu_unknown`, `target_…`;
        ResourceError `gpu_unavailable`, `gpu_lost`, `gpu_out_of_memory`. On any failure nothing
        is left, the descriptor included.
        """
        try:
            with descriptor.take() as taken:
                device = self._device()
                await wait_ready(device, deadline)
                try:
                    # The device owns the descriptor from here on.
                    target = await device.import_target(taken.detach(), self.size_bytes)
                except RacerError as error:
                    raise as_told(device, error) from error
        except RacerError as error:
            self._refused.labels(error.code).inc()
            raise
        self._imported = (device, target)
        self._gauge.inc(self.size_bytes)
        return self

    def _device(self) -> GpuDevice:
        if self._gpus is None:
            raise ResourceError(
                "gpu_unavailable", "racerd uses no GPU on this node", hint="read into host memory"
            )
        return self._gpus.device(self.gpu)

    def lease(self, offset: int, length: int) -> Lease[GpuRange]:
        self._leases.check()
        if length > self.size_bytes - offset:
            raise RequestError(
                "target_too_small",
                f"{length} bytes do not fit at {offset} of a target of {self.size_bytes}",
                hint="register a larger allocation, or read a smaller Range",
            )
        assert self._imported is not None
        return Lease(self._leases, GpuRange(GpuDestination(*self._imported, offset, length)))

    async def release(self) -> None:
        """See `Landing.release`."""
        if not await self._leases.end():
            return
        assert self._imported is not None
        device, target = self._imported
        try:
            await device.release_target(target)
        finally:
            self._gauge.dec(self.size_bytes)
