"""The daemon's side of a GPU: starts its worker, asks it, and outlives it.

Layer: gpu; the loop thread only; imports no CUDA. A worker is spawned, never forked. It is started
when first needed and again, with growing pauses, after it died; targets and slabs that were handed
over are handed over again. While there is no worker every call fails at once with DeviceError
`gpu_unavailable` and the reason, so that the host path is taken without waiting.

Memory that the GPU may still touch is safe to reuse when a call has returned or raised, cancelled
or not: a call ends with the worker's answer, or after the worker's process is gone (R7).
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any

from racerd.errors import DeviceError, RacerError, RequestError
from racerd.gpu.identity import uuid_text
from racerd.gpu.link import SILENT, WorkerLink, lost
from racerd.gpu.protocol import (
    CloseSlab,
    Fatal,
    ImportTarget,
    Notice,
    OpenSlab,
    ReadPage,
    ReleaseTarget,
    Start,
)
from racerd.runtime.threads import settled
from racerd.telemetry import Metrics
from racerd.units import MIB

_log = logging.getLogger(__name__)

PAUSE_SECONDS_FIRST = 1.0
PAUSE_SECONDS_MAX = 60.0
HEALTHY_SECONDS = 60.0  # A worker that lived so long starts the pauses anew.


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """`cufile`: off, cuda or kvikio, on `cufile_threads` threads. `kernel_cache`: a folder, or ""
    for the default one.

    `answer_seconds_max`: a worker that owes an answer longer is killed: a hung GPU must not keep
    reads (F66).
    """

    staging_bytes: int = 256 * MIB
    idle_seconds: float = 60.0
    cufile: str = "cuda"
    cufile_threads: int = 4
    compat_mode: bool = False
    cufile_open_seconds_max: float = 30.0
    kernel_cache: str = ""
    start_seconds_max: float = 60.0
    answer_seconds_max: float = 60.0


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The shared arena of sealed frames. The descriptor stays the daemon's."""

    descriptor: int
    size: int
    frame_bytes: int
    frames_per_page: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class SealedFrames:
    """What it takes to open consecutive frames of one page: see `protocol.ReadPage`."""

    key: bytes
    nonces: bytes
    tags: bytes
    crcs: tuple[int, ...]
    aad_head: bytes
    aad_tails: bytes
    last_bytes: int


@dataclass(frozen=True, slots=True)
class PageRead:
    """Bytes [skip, skip + take) of `frames`' plaintext, to `offset` in the target.

    The ciphertext lies in arena `slots`, which the caller keeps until the read ends; or, where
    there are none, in `slab` at `slab_offset` (4 KiB aligned), and cuFile reads it.
    """

    frames: SealedFrames
    offset: int
    skip: int
    take: int
    slots: tuple[int, ...] = ()
    slab: int = -1
    slab_offset: int = 0


@dataclass(eq=False, slots=True)
class GpuTarget:
    """A client's GPU memory. The descriptor is ours until the target is released."""

    number: int
    size: int
    descriptor: int
    worker: WorkerLink | None = None  # the one that has it imported
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _State(Enum):
    STARTING = "starting"
    UP = "up"
    PAUSING = "pausing"


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
        self._worker: WorkerLink | None = None
        self._why_not: Fatal | None = Fatal("gpu_starting", "the GPU's worker is starting", "", 0)
        self._supervision: asyncio.Task[None] | None = None
        self._state = _State.STARTING
        self._changed = asyncio.Event()  # set and replaced with each change of state
        self._wake = asyncio.Event()
        self._told: Fatal | None = None
        self._slabs: dict[int, int] = {}
        self._targets = 0
        self._cufile = "settings"  # the reason why the driver does not read, or ""
        self._cufile_slabs: dict[int, str] = {}  # the same, of slabs that it does not take
        self._next_start = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    async def __aenter__(self) -> GpuDevice:
        self._supervision = asyncio.create_task(self._supervise(), name=f"gpu-{self.uuid}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._supervision is not None
        self._supervision.cancel()
        await settled(self._supervision)
        for descriptor in self._slabs.values():
            os.close(descriptor)
        self._slabs.clear()

    @property
    def why_not(self) -> str | None:
        """Why this GPU cannot be used now, in words, or None."""
        why = self._why_not
        return None if why is None else f"{why.message} ({why.code})"

    @property
    def name(self) -> str:
        """The UUID as people and clients write it."""
        return uuid_text(self.uuid)

    @property
    def retry_after_seconds(self) -> float:
        """When to ask again, where the GPU cannot be used now."""
        return max(1.0, self._next_start - time.monotonic())

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

    @property
    def worker_pid(self) -> int | None:
        """The process that serves or is starting, or None between two."""
        return None if self._process is None else self._process.pid

    def _enter(self, state: _State) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- life of the worker ----

    async def _supervise(self) -> None:
        pause = PAUSE_SECONDS_FIRST
        while True:
            self._enter(_State.STARTING)
            worker = WorkerLink.spawn()
            self._process = worker.process
            try:
                fatal = await self._live(worker)
            finally:
                self._worker = None
                await _through_cancellation(worker.stop())
                self._process = None
            lived = time.monotonic() - worker.started
            pause = PAUSE_SECONDS_FIRST if lived > HEALTHY_SECONDS else pause
            self._why_not = fatal
            self._metrics.gpu_up.labels(self.uuid).set(0)
            self._metrics.gpu_worker_deaths.labels(self.uuid, fatal.code).inc()
            self._tell(fatal, pause)
            self._next_start = time.monotonic() + pause
            self._wake.clear()
            self._enter(_State.PAUSING)
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
            self.restarts += 1

    def _tell(self, fatal: Fatal, pause: float) -> None:
        """Says once what the worker died of: the tries after it say nothing new."""
        level = logging.DEBUG if fatal == self._told else logging.WARNING
        self._told = fatal
        _log.log(
            level, "%s cannot be used: %s (%s); next try in %g s. %s",
            self.name, fatal.message, fatal.code, pause, fatal.hint,
        )  # fmt: skip

    async def _live(self, worker: WorkerLink) -> Fatal:
        """Starts `worker`, serves with it, and returns what it died of."""
        worker.on_notice = self._on_notice
        self._cufile = "settings" if self._settings.cufile == "off" else "opening"
        self._cufile_slabs.clear()
        worker.send(self._start_message(), self._arena.descriptor)
        first: list[asyncio.Future[Any]] = [worker.ready, worker.gone]
        await asyncio.wait(
            first,
            timeout=self._settings.start_seconds_max,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not worker.ready.done():
            worker.end()
            await worker.gone
            return Fatal("gpu_start_timeout", "the GPU's worker did not start in time", "", 0)
        if worker.ready.exception() is None and worker.alive:
            for number, descriptor in self._slabs.items():
                worker.send(OpenSlab(0, number), descriptor)
            self._worker, self._why_not = worker, None
            self._told = None
            self._metrics.gpu_up.labels(self.uuid).set(1)
            self._enter(_State.UP)
        return await self._watch(worker)

    async def _watch(self, worker: WorkerLink) -> Fatal:
        limit = self._settings.answer_seconds_max
        while not worker.gone.done():
            await asyncio.wait([worker.gone], timeout=max(0.05, limit / 4))
            if worker.oldest_wait_seconds() > limit:
                _log.error("%s owes an answer for %g s: its worker is killed", self.name, limit)
                self._worker = None
                worker.end()
        return worker.gone.result()

    def _start_message(self) -> Start:
        settings, arena = self._settings, self._arena
        return Start(
            gpu=self.uuid,
            arena_bytes=arena.size,
            frame_bytes=arena.frame_bytes,
            frames_per_page=arena.frames_per_page,
            slot_bytes=arena.slot_bytes,
            staging_bytes=settings.staging_bytes,
            idle_seconds=settings.idle_seconds,
            kernel_cache=settings.kernel_cache,
            cufile=settings.cufile,
            cufile_threads=settings.cufile_threads,
            compat_mode=settings.compat_mode,
            cufile_open_seconds_max=settings.cufile_open_seconds_max,
        )

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

    def retry_now(self) -> None:
        """Ends the pause before the next start, if there is one."""
        if self._state is _State.PAUSING:
            self._enter(_State.STARTING)
            self._wake.set()

    async def wait_ready(self) -> None:
        """Waits until the worker serves. Raises DeviceError with the reason where it died."""
        while self._worker is None or not self._worker.alive:
            if self._state is _State.PAUSING and self._why_not is not None:
                raise lost(self._why_not)
            await self._changed.wait()

    def _working(self) -> WorkerLink:
        worker = self._worker
        if worker is None or not worker.alive:
            why = self._why_not or (SILENT if worker is None else worker.fatal)
            raise DeviceError(
                "gpu_unavailable",
                f"{self.name} cannot be used now: {why.message}",
                native=why.native,
                hint=why.hint or "the host path is taken meanwhile",
            )
        return worker

    # ---- targets ----

    async def import_target(self, descriptor: int, size: int) -> GpuTarget:
        """Imports an exported allocation. Takes the descriptor over, also when it raises.

        Raises RequestError `target_…` where the memory is not what it was said to be, DeviceError
        where the GPU cannot be used.
        """
        self._targets += 1
        target = GpuTarget(self._targets, size, descriptor)
        try:
            await self._import(target, self._working())
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
        await _through_cancellation(self._forget(target))

    async def _forget(self, target: GpuTarget) -> None:
        async with target.lock:
            worker, target.worker = target.worker, None
            if target.descriptor >= 0:
                os.close(target.descriptor)
                target.descriptor = -1
            if worker is None:
                return
            try:
                await worker.ask(lambda request: ReleaseTarget(request, target.number))
            except RacerError:
                # It died, or its driver failed: the mapping goes with the process at the latest.
                worker.end()
                await worker.gone

    # ---- slabs ----

    def open_slab(self, number: int, descriptor: int) -> None:
        """Lets cuFile read this slab. The descriptor is duplicated."""
        self._slabs[number] = os.dup(descriptor)
        if self._worker is not None and self._worker.alive:
            self._worker.send(OpenSlab(0, number), descriptor)

    async def close_slab(self, number: int) -> None:
        """On return no read of the slab runs and nothing holds it open."""
        descriptor = self._slabs.pop(number, None)
        if descriptor is None:
            return
        os.close(descriptor)
        self._cufile_slabs.pop(number, None)
        worker = self._worker
        if worker is not None and worker.alive:
            await _through_cancellation(worker.ask(lambda request: CloseSlab(request, number)))

    # ---- reads ----

    async def read(self, target: GpuTarget, reads: Sequence[PageRead]) -> list[RacerError | None]:
        """Reads pages into `target`, all at once; returns per read None, or why it failed.

        None means that every frame was verified before it was decrypted into the target. After an
        IntegrityError the frames that failed are zeros in the target. DeviceErrors ask for the
        host path: `cufile_…` for this read, others for this GPU.
        Cancelling: waits until nothing of these reads runs any more.
        """
        jobs = [asyncio.ensure_future(self._read(target, read)) for read in reads]
        try:
            await asyncio.shield(asyncio.gather(*jobs))
        except asyncio.CancelledError:
            for job in jobs:
                await settled(job)
            raise
        return [job.result() for job in jobs]

    async def _read(self, target: GpuTarget, read: PageRead) -> RacerError | None:
        try:
            if target.descriptor < 0:
                raise RequestError("target_unknown", "the target was released")
            worker = self._working()
            await self._import(target, worker)
            await worker.ask(lambda request: _message(request, target.number, read))
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


def _message(request: int, target: int, read: PageRead) -> ReadPage:
    frames = read.frames
    return ReadPage(
        request=request,
        target=target,
        offset=read.offset,
        skip=read.skip,
        take=read.take,
        last_bytes=frames.last_bytes,
        slots=read.slots,
        slab=read.slab,
        slab_offset=read.slab_offset,
        key=frames.key,
        nonces=frames.nonces,
        tags=frames.tags,
        crcs=b"".join(crc.to_bytes(8, "little") for crc in frames.crcs),
        aad_head=frames.aad_head,
        aad_tails=frames.aad_tails,
    )


async def _through_cancellation(work: Awaitable[None]) -> None:
    """Awaits `work` to its end even when cancelled, then raises CancelledError or its error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise
