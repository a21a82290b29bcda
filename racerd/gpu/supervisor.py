"""The life of a GPU's worker: it is started, watched, ended, and started again.

Layer: gpu; the loop thread only; imports no CUDA. A worker is spawned, never forked. It is started
at once and again, with growing pauses, after it died or where it cannot be started; one that owes
an answer for too long is killed. While there is no worker, `working` fails at once with the reason,
so that nobody waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Protocol

from racerd.errors import DeviceError
from racerd.gpu.identity import uuid_text
from racerd.gpu.link import SILENT, WorkerLink, lost
from racerd.gpu.protocol import Fatal
from racerd.gpu.settings import GpuSettings
from racerd.runtime.threads import settled
from racerd.telemetry import Metrics

_log = logging.getLogger(__name__)

PAUSE_SECONDS_FIRST = 1.0
PAUSE_SECONDS_MAX = 60.0
HEALTHY_SECONDS = 60.0  # A worker that lived so long starts the pauses anew.


class _State(Enum):
    STARTING = "starting"
    UP = "up"
    PAUSING = "pausing"


class WorkerUser(Protocol):
    """Who needs the worker: it is told of each new one."""

    def worker_spawned(self, worker: WorkerLink) -> None:
        """Sends what a worker needs first of all."""

    def worker_ready(self, worker: WorkerLink) -> None:
        """Hands over what the one before had, before anybody asks the new one."""


class Supervisor:
    """Of the worker of one GPU, by UUID (32 hex digits). An async context manager."""

    def __init__(
        self, uuid: str, settings: GpuSettings, metrics: Metrics, user: WorkerUser, *,
        spawn: Callable[[], WorkerLink] = WorkerLink.spawn,
    ) -> None:  # fmt: skip
        self.restarts = 0
        self.why_not: Fatal | None = Fatal("gpu_starting", "the GPU's worker is starting", "", 0)
        self._uuid = uuid
        self._settings = settings
        self._metrics = metrics
        self._user = user
        self._spawn = spawn
        self._worker: WorkerLink | None = None
        self._pid: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._state = _State.STARTING
        self._changed = asyncio.Event()  # set and replaced with each change of state
        self._wake = asyncio.Event()
        self._told: Fatal | None = None
        self._next_start = 0.0

    async def __aenter__(self) -> Supervisor:
        self._task = asyncio.create_task(self._supervise(), name=f"gpu-{self._uuid}")
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await settled(self._task)

    # ---- for who uses the worker ----

    @property
    def worker(self) -> WorkerLink | None:
        """The worker that serves, or None."""
        return self._worker if self._worker is not None and self._worker.alive else None

    @property
    def pid(self) -> int | None:
        """The process that serves or is starting, or None between two."""
        return self._pid

    @property
    def retry_after_seconds(self) -> float:
        """When to ask again, where there is no worker now."""
        return max(1.0, self._next_start - time.monotonic())

    def working(self) -> WorkerLink:
        """The worker that serves. Raises DeviceError `gpu_unavailable` with the reason."""
        if (worker := self.worker) is not None:
            return worker
        why = self.why_not or (SILENT if self._worker is None else self._worker.fatal)
        raise DeviceError(
            "gpu_unavailable",
            f"{uuid_text(self._uuid)} cannot be used now: {why.message}",
            native=why.native,
            hint=why.hint or "the host path is taken meanwhile",
        )

    async def wait_ready(self) -> None:
        """Waits until a worker serves. Raises DeviceError with the reason where it died."""
        while self.worker is None:
            if self._state is _State.PAUSING and self.why_not is not None:
                raise lost(self.why_not)
            await self._changed.wait()

    def retry_now(self) -> None:
        """Ends the pause before the next start, if there is one."""
        if self._state is _State.PAUSING:
            self._enter(_State.STARTING)
            self._wake.set()

    # ---- life of a worker ----

    def _enter(self, state: _State) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _supervise(self) -> None:
        pause = PAUSE_SECONDS_FIRST
        while True:
            self._enter(_State.STARTING)
            started = time.monotonic()
            fatal = await self._life()
            lived = time.monotonic() - started
            pause = PAUSE_SECONDS_FIRST if lived > HEALTHY_SECONDS else pause
            self.why_not = fatal
            self._metrics.gpu_up.labels(self._uuid).set(0)
            self._metrics.gpu_worker_deaths.labels(self._uuid, fatal.code).inc()
            self._tell(fatal, pause)
            self._next_start = time.monotonic() + pause
            self._wake.clear()
            self._enter(_State.PAUSING)
            try:
                # Not `wait_for`: Python 3.11's swallows a cancellation that comes with the wake.
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
            self.restarts += 1

    def _tell(self, fatal: Fatal, pause: float) -> None:
        """Says once what the worker died of: the tries after it say nothing new."""
        level = logging.DEBUG if fatal == self._told else logging.WARNING
        self._told = fatal
        _log.log(
            level, "%s cannot be used: %s (%s); next try in %g s. %s",
            uuid_text(self._uuid), fatal.message, fatal.code, pause, fatal.hint,
        )  # fmt: skip

    async def _life(self) -> Fatal:
        """A worker from its start to its end; returns what it died of."""
        try:
            worker = self._spawn()
        except OSError as error:
            return _not_started(error)
        self._pid = worker.process.pid
        try:
            return await self._serve(worker)
        except OSError as error:  # No descriptor was left to hand over what it needs.
            return _not_started(error)
        finally:
            self._worker = None
            await through_cancellation(worker.stop())
            self._pid = None

    async def _serve(self, worker: WorkerLink) -> Fatal:
        self._user.worker_spawned(worker)
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
            self._user.worker_ready(worker)
            self._worker, self.why_not = worker, None
            self._told = None
            self._metrics.gpu_up.labels(self._uuid).set(1)
            self._enter(_State.UP)
        return await self._watch(worker)

    async def _watch(self, worker: WorkerLink) -> Fatal:
        limit = self._settings.answer_seconds_max
        while not worker.gone.done():
            await asyncio.wait([worker.gone], timeout=max(0.05, limit / 4))
            if worker.oldest_wait_seconds() > limit:
                name = uuid_text(self._uuid)
                _log.error("%s owes an answer for %g s: its worker is killed", name, limit)
                self._worker = None
                worker.end()
        return worker.gone.result()


def _not_started(error: OSError) -> Fatal:
    return Fatal(
        "gpu_worker_not_started",
        f"the GPU's worker cannot be started: {error.strerror}",
        "see the limits of processes, open files and memory of racerd's service",
        error.errno or 0,
    )


async def through_cancellation(work: Awaitable[None]) -> None:
    """Awaits `work` to its end even when cancelled, then raises CancelledError or its error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise
