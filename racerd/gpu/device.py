"""One GPU as the daemon uses it: targets in its memory, slabs that cuFile reads, reads of pages.

Layer: gpu; the loop thread only; imports no CUDA. The worker comes and goes (`supervisor`); targets
and slabs that were handed over are handed over again to the next one. While there is none, every
call fails at once with DeviceError `gpu_unavailable` and the reason, so that the host path is taken
without waiting.

Memory that the GPU may still touch is safe to reuse when a call has returned or raised, cancelled
or not: a call ends with the worker's answer, or after the worker's process is gone (R7).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from racerd.errors import RacerError, RequestError
from racerd.gpu.identity import uuid_text
from racerd.gpu.link import WorkerLink
from racerd.gpu.protocol import CloseSlab, ImportTarget, Message, Notice, OpenSlab, ReleaseTarget
from racerd.gpu.reads import PageRead
from racerd.gpu.settings import ArenaShape, GpuSettings, start_message
from racerd.gpu.supervisor import Supervisor, through_cancellation
from racerd.runtime.threads import settled
from racerd.telemetry import Metrics

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class GpuTarget:
    """A client's GPU memory. The descriptor is ours until the target is released."""

    number: int
    size: int
    descriptor: int
    worker: WorkerLink | None = None  # the one that has it imported
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class GpuDevice:
    """One GPU, by UUID (32 hex digits). Use as an async context manager.

    `wait_ready` is for a daemon that must have the GPU; others simply use it and are told.
    """

    def __init__(
        self, uuid: str, settings: GpuSettings, arena: ArenaShape, metrics: Metrics
    ) -> None:
        self.uuid = uuid
        self._settings = settings
        self._arena = arena
        self._metrics = metrics
        self._supervisor = Supervisor(uuid, settings, metrics, self)
        self._slabs: dict[int, int] = {}
        self._targets = 0
        self._cufile = "settings"  # the reason why the driver does not read, or ""
        self._cufile_slabs: dict[int, str] = {}  # the same, of slabs that it does not take

    async def __aenter__(self) -> GpuDevice:
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._supervisor.__aexit__(kind, error, traceback)
        for descriptor in self._slabs.values():
            os.close(descriptor)
        self._slabs.clear()

    # ---- what is told ----

    @property
    def name(self) -> str:
        """The UUID as people and clients write it."""
        return uuid_text(self.uuid)

    @property
    def why_not(self) -> str | None:
        """Why this GPU cannot be used now, in words, or None."""
        why = self._supervisor.why_not
        return None if why is None else f"{why.message} ({why.code})"

    @property
    def retry_after_seconds(self) -> float:
        """When to ask again, where the GPU cannot be used now."""
        return self._supervisor.retry_after_seconds

    @property
    def worker_pid(self) -> int | None:
        """The process that serves or is starting, or None between two."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How often a worker was started anew."""
        return self._supervisor.restarts

    @property
    def cufile_state(self) -> str:
        """`on`, `opening`, or `off: <reason>`."""
        if self._cufile in ("", "opening"):
            return self._cufile or "on"
        return f"off: {self._cufile}"

    def why_not_cufile(self, slab: int) -> str | None:
        """The reason why cuFile would not read this slab, as far as is known here, or None."""
        return self._cufile or self._cufile_slabs.get(slab)

    @property
    def staging_bytes(self) -> int:
        """Device memory for ciphertext in transit: more than that waits its turn in the worker."""
        return self._settings.staging_bytes

    @property
    def slabs(self) -> frozenset[int]:
        """The slabs that were opened here."""
        return frozenset(self._slabs)

    # ---- the worker ----

    async def wait_ready(self) -> None:
        """Waits until the worker serves. Raises DeviceError with the reason where it died."""
        await self._supervisor.wait_ready()

    def retry_now(self) -> None:
        """Ends the pause before the next start of a worker, if there is one."""
        self._supervisor.retry_now()

    def worker_spawned(self, worker: WorkerLink) -> None:
        """See `WorkerUser`."""
        worker.on_notice = self._on_notice
        self._cufile = "settings" if self._settings.cufile == "off" else "opening"
        self._cufile_slabs.clear()
        start = start_message(self.uuid, self._settings, self._arena)
        worker.send(start, self._arena.descriptor)

    def worker_ready(self, worker: WorkerLink) -> None:
        """See `WorkerUser`. Targets are imported again by the next read into them."""
        for number, descriptor in self._slabs.items():
            worker.send(OpenSlab(0, number), descriptor)

    def _on_notice(self, notice: Notice) -> None:
        where = "cuFile" if notice.scope == "driver" else f"cuFile for slab {notice.slab}"
        log = _log.info if notice.state == "on" else _log.warning
        log("%s: %s is %s: %s. %s", self.name, where, notice.state, notice.reason, notice.text)
        if notice.scope == "driver" and notice.seconds:
            self._metrics.cufile_open_seconds.labels(self.uuid).set(notice.seconds)
        off = notice.reason if notice.state == "off" else ""
        if notice.scope == "driver":
            self._cufile = off
        elif off:
            self._cufile_slabs[notice.slab] = off
        if off:
            self._metrics.fallbacks.labels("cufile", notice.reason).inc()

    # ---- targets ----

    async def import_target(self, descriptor: int, size: int) -> GpuTarget:
        """Imports an exported allocation. Takes the descriptor over, also when it raises.

        Raises RequestError `target_…` where the memory is not what it was said to be, DeviceError
        where the GPU cannot be used.
        """
        self._targets += 1
        target = GpuTarget(self._targets, size, descriptor)
        try:
            await self._import(target, self._supervisor.working())
        except BaseException:
            # Cancelled or not, the worker has answered: nothing else uses the descriptor.
            await self._forget(target)
            raise
        return target

    async def _import(self, target: GpuTarget, worker: WorkerLink) -> None:
        async with target.lock:
            if target.worker is worker:
                return
            asking = asyncio.ensure_future(
                worker.ask(
                    lambda request: ImportTarget(request, target.number, target.size),
                    target.descriptor,
                )
            )
            try:
                await asyncio.shield(asking)
            except asyncio.CancelledError:
                await settled(asking)
                if asking.cancelled() or asking.exception() is not None:
                    raise
                target.worker = worker  # It is imported all the same: somebody must release it.
                raise
            target.worker = worker

    async def release_target(self, target: GpuTarget) -> None:
        """Lets the memory go. On return nothing here touches or maps it any more (F89)."""
        await through_cancellation(self._forget(target))

    async def _forget(self, target: GpuTarget) -> None:
        async with target.lock:
            worker, target.worker = target.worker, None
            if target.descriptor >= 0:
                os.close(target.descriptor)
                target.descriptor = -1
            if worker is None:
                return
            await _ask_or_end(worker, lambda request: ReleaseTarget(request, target.number))

    # ---- slabs ----

    def open_slab(self, number: int, descriptor: int) -> None:
        """Lets cuFile read this slab. The descriptor is duplicated."""
        self._slabs[number] = os.dup(descriptor)
        worker = self._supervisor.worker
        if worker is not None:
            worker.send(OpenSlab(0, number), descriptor)

    async def close_slab(self, number: int) -> None:
        """On return no read of the slab runs and nothing holds it open."""
        descriptor = self._slabs.pop(number, None)
        if descriptor is None:
            return
        os.close(descriptor)
        self._cufile_slabs.pop(number, None)
        worker = self._supervisor.worker
        if worker is not None:
            closing = _ask_or_end(worker, lambda request: CloseSlab(request, number))
            await through_cancellation(closing)

    # ---- reads ----

    async def read(self, target: GpuTarget, reads: Sequence[PageRead]) -> list[RacerError | None]:
        """Reads pages into `target`, all at once; returns per read None, or why it failed.

        None means that every frame was verified before it was decrypted into the target. After an
        IntegrityError the frames that failed are zeros in the target. DeviceErrors ask for the
        host path: `cufile_…` for this read, others for this GPU.
        Cancelling: waits until nothing of these reads runs any more.
        """
        jobs = [asyncio.ensure_future(self._read(target, read)) for read in reads]
        # With exceptions: whatever comes of one, memory is not free while another runs.
        all_done: asyncio.Future[Any] = asyncio.gather(*jobs, return_exceptions=True)
        try:
            await asyncio.shield(all_done)
        except asyncio.CancelledError:
            for job in jobs:
                await settled(job)
            raise
        return [job.result() for job in jobs]

    async def _read(self, target: GpuTarget, read: PageRead) -> RacerError | None:
        try:
            if target.descriptor < 0:
                raise RequestError("target_unknown", "the target was released")
            worker = self._supervisor.working()
            await self._import(target, worker)
            await worker.ask(lambda request: read.message(request, target.number))
        except RacerError as error:
            self._count(read, error.code)
            return error
        self._count(read, "ok")
        return None

    def _count(self, read: PageRead, result: str) -> None:
        self._metrics.gpu_pages.labels(self.uuid, result).inc()
        if read.slots:
            return
        if result == "ok":
            self._metrics.cufile_pages.inc()
        elif result.startswith("cufile_"):
            self._metrics.gpu_host_pages.labels(result).inc()


async def _ask_or_end(worker: WorkerLink, make: Callable[[int], Message]) -> None:
    """Has the worker let something go. Where it died, or its driver failed, its process is ended:
    what it held goes with it at the latest."""
    try:
        await worker.ask(make)
    except RacerError:
        worker.end()
        await worker.gone
