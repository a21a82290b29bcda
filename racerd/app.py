"""The composition root: builds everything, starts it, drains it, and ends it in reverse.

Layer: app; the only file that knows everyone. One event loop runs the daemon; blocking work is on
the named threads below. What starts is a context manager, so that a failure half-way, or the end,
closes what was opened and nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import grp
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from racerd import __version__
from racerd.caches import Caches
from racerd.config import Settings, diff
from racerd.crypto.keyring import Keyring
from racerd.errors import ConfigError
from racerd.gpu.node import GpuNode
from racerd.gpu.supervisor import ArenaShape, GpuDevice, GpuSettings
from racerd.origin.factory import why_unusable_now
from racerd.read.services import ReadServices, ReadThreads
from racerd.read.settings import ReadSettings
from racerd.runtime.arena import FrameArena
from racerd.runtime.hardening import forbid_core_dumps, ignore_lease_breaks
from racerd.runtime.logs import set_up_logs
from racerd.runtime.loop_lag import watch_loop_lag
from racerd.runtime.populate import keep_freed_memory
from racerd.runtime.process import allow_many_descriptors, open_descriptors, resident_bytes
from racerd.runtime.threads import WorkerThreads
from racerd.runtime.watch import watch_files
from racerd.serve.diagnostics import Answer, DiagnosticsServer, Page
from racerd.serve.settings import ClientSocketSettings
from racerd.store import Store
from racerd.store.device import DiskError
from racerd.store.disk import DiskReport
from racerd.store.settings import DiskSettings, StoreSettings
from racerd.telemetry import Metrics
from racerd.units import format_bytes

_LOG = logging.getLogger(__name__)
_STUCK_SECONDS = 30.0
_GC_THRESHOLD = 10_000
_SECOND_SIGNAL_STATUS = 1


def run(settings: Settings, reload: Callable[[], Settings], files: Sequence[Path] = ()) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit status.

    `reload` reads the settings anew; a change of one of `files` asks for it, like SIGHUP.
    """
    set_up_logs(settings.log_level, settings.log_format)
    forbid_core_dumps()
    ignore_lease_breaks()
    keep_freed_memory()
    allow_many_descriptors()
    os.umask(0o077)
    return uvloop.run(_serve(Daemon(settings, reload, files)))


async def _serve(daemon: Daemon) -> int:
    async with daemon:
        await daemon.until_told_to_stop()
    return 0


def _read_settings(settings: Settings) -> ReadSettings:
    return ReadSettings(
        plaintext_bytes=settings.plaintext,
        dirty_bytes=settings.dirty,
        share_bytes=settings.share,
        share_idle_seconds=settings.share_idle_seconds,
        request_pages=settings.request_pages,
        connection_pages=settings.connection_pages,
        disk_seconds=settings.disk_seconds,
        write_seconds=settings.write_seconds,
        version_seconds=settings.version_seconds,
    )


def _store_settings(settings: Settings) -> StoreSettings:
    return StoreSettings(
        disks=tuple(DiskSettings(disk.path, disk.size_bytes) for disk in settings.disks),
        free_floor_ratio=settings.free_space_floor,
        write_bytes_per_day=settings.write_bytes_per_day,
        quotas=_quotas(settings),
        checkpoint_seconds=settings.checkpoint_seconds,
        scrub_bytes_per_second=settings.scrub_bytes_per_second,
    )


def _quotas(settings: Settings) -> dict[str, int]:
    return {
        cache.name: cache.quota_bytes
        for cache in settings.caches.values()
        if cache.quota_bytes is not None
    }


def _socket_settings(settings: Settings) -> ClientSocketSettings:
    group = None
    if settings.socket_group is not None:
        try:
            group = grp.getgrnam(settings.socket_group).gr_gid
        except KeyError:
            raise ConfigError(
                [f"socket_group: there is no group {settings.socket_group!r} here"]
            ) from None
    return ClientSocketSettings(
        settings.run_dir,
        mode=settings.socket_mode,
        group=group,
        connections_max=settings.connections_max,
    )


def _gpu_node(settings: Settings, arena: FrameArena, metrics: Metrics) -> GpuNode:
    shape = ArenaShape(
        descriptor=arena.fd,
        size=arena.slot_count * arena.slot_bytes,
        frame_bytes=arena.frame_bytes,
        frames_per_page=settings.geometry.frames_per_page,
        slot_bytes=arena.slot_bytes,
    )
    gpu_settings = GpuSettings(
        staging_bytes=settings.gpu_staging_bytes,
        idle_seconds=settings.gpu_idle_seconds,
        cufile=settings.cufile_provider,
        cufile_threads=settings.cufile_threads,
        compat_mode=settings.cufile_allow_compat_mode,
        kernel_cache="" if settings.kernel_cache is None else str(settings.kernel_cache),
    )
    return GpuNode(settings.gpu, gpu_settings, shape, metrics)


@contextmanager
def _opened_store(settings: Settings, metrics: Metrics) -> Iterator[Store]:
    """Raises ConfigError where another daemon has a slab, as a socket does that one listens on."""
    with ExitStack() as stack:
        try:
            store = stack.enter_context(
                Store(_store_settings(settings), settings.geometry, metrics)
            )
        except DiskError as error:
            raise ConfigError([f"disks: {error.message}; {error.hint}"]) from error
        yield store


class Daemon:
    """One racerd. An async context manager: entered, it serves."""

    def __init__(
        self, settings: Settings, reload: Callable[[], Settings], files: Sequence[Path]
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._reload = reload
        self._files = files
        self._state = "starting"
        self._stop = asyncio.Event()
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._lag_max = 0.0

    async def __aenter__(self) -> Daemon:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        _LOG.info("draining: running reads have %.0f s", self.settings.drain_seconds)
        self._state = "draining"
        self.metrics.ready.set(0)
        await self._caches.drain(self.settings.drain_seconds)
        await self._stack.aclose()
        _LOG.info("stopped")

    # --- start ------------------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> None:
        settings, metrics = self.settings, self.metrics
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, self._told_to_stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._told_to_reload)
        if settings.diagnostics is not None:
            self._diagnostics = await stack.enter_async_context(
                DiagnosticsServer(*settings.diagnostics, self._pages())
            )
        arena = stack.enter_context(FrameArena(settings.frame_bytes, settings.memory))
        # Before anything is made on a disk: `on` may refuse to go on.
        self._gpus = await stack.enter_async_context(_gpu_node(settings, arena, metrics))
        _make_folder(settings.state_dir)
        self._keyring = Keyring.open(settings.key_file)
        self._store = stack.enter_context(_opened_store(settings, metrics))
        threads = ReadThreads(
            open=await stack.enter_async_context(
                WorkerThreads("open", settings.open_threads, spread=True)
            ),
            disk=await stack.enter_async_context(
                WorkerThreads("disk", settings.disk_threads * max(1, len(settings.disks)))
            ),
            origin=await stack.enter_async_context(
                WorkerThreads("origin", settings.origin_threads)
            ),
        )
        self._services = await stack.enter_async_context(
            ReadServices(
                arena=arena,
                threads=threads,
                store=self._store,
                keyring=self._keyring,
                geometry=settings.geometry,
                metrics=metrics,
                settings=_read_settings(settings),
            )
        )
        self._caches = await stack.enter_async_context(
            Caches(self._services, self._gpus, _socket_settings(settings), metrics)
        )
        await self._caches.change_to(settings.caches)
        stack.enter_context(_Scrubbing(self._store))
        self._watch(stack)
        # What is there now stays: the collector need not look at it each time, and need not look
        # at the few objects of a read as often as it does by default.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._state = "ready"
        metrics.ready.set(1)
        print(self._greeting(), flush=True)

    def _watch(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._cancel_tasks)
        self._spawn(watch_loop_lag(self._note_lag))
        self._spawn(self._watch_stuck_flights())
        files = [self.settings.key_file, *self._files]
        self._spawn(watch_files(files, lambda _: self._told_to_reload()))

    def _greeting(self) -> str:
        lines = [f"racerd {__version__}"]
        for cache in self.settings.caches.values():
            lines.append(f"  cache {cache.name}: {self._caches.socket_path(cache.name)}")
            why = why_unusable_now(cache.origin)
            lines.append(f"    origin {cache.origin}{f' ({why})' if why else ''}")
        for report in self._store.reports():
            trouble = f", {report.state}: {report.reason}" if report.reason else ""
            lines.append(f"  disk {report.path}: {format_bytes(report.capacity_bytes)}{trouble}")
        lines.append(f"  memory {format_bytes(self.settings.memory)}")
        lines.append(f"  gpu {self._gpus.describe()}")
        if self.settings.diagnostics is not None:
            lines.append(f"  diagnostics http://{self._diagnostics.address}/metrics")
        first = next(iter(self.settings.caches), None)
        if first is not None:
            lines.append(f"  try: racer ls --run-dir {self.settings.run_dir} racer://{first}/")
        return "\n".join([*lines, "ready"])

    # --- while it serves --------------------------------------------------------------------

    async def until_told_to_stop(self) -> None:
        await self._stop.wait()

    def _told_to_stop(self) -> None:
        self._signals += 1
        if self._signals > 1:
            # Somebody is in a hurry: the store survives this as it survives a crash.
            _LOG.warning("told to stop twice: leaving at once")
            os._exit(_SECOND_SIGNAL_STATUS)
        self._stop.set()

    def _told_to_reload(self) -> None:
        if self._state == "ready":  # Before that settings are fresh; after it they do not matter.
            self._spawn(self._reloaded())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a background task of the daemon failed", exc_info=error)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reloaded(self) -> None:
        await self._reload_keys()
        await self._reload_settings()

    async def _reload_keys(self) -> None:
        try:
            changed = await asyncio.to_thread(self._keyring.reload)
        except ConfigError as error:
            self.metrics.reloads.labels("keys", "refused").inc()
            _LOG.error("the key file was not reloaded, the old keys stay: %s", error.message)
            return
        if changed:
            self.metrics.reloads.labels("keys", "done").inc()
            _LOG.info("keys reloaded: epochs %s", self._keyring.epochs)

    async def _reload_settings(self) -> None:
        try:
            settings = await asyncio.to_thread(self._reload)
            _socket_settings(settings)
        except ConfigError as error:
            self.metrics.reloads.labels("settings", "refused").inc()
            for problem in error.problems:
                _LOG.error("settings were not reloaded: %s", problem)
            return
        change = diff(self.settings, settings)
        if change.restart:
            _LOG.warning("these settings changed and need a restart: %s", ", ".join(change.restart))
        if change.changed:
            _LOG.info("settings reloaded: %s", ", ".join(change.changed))
        if change.settings.caches != self.settings.caches:
            self._store.set_quotas(_quotas(change.settings))
            await self._caches.change_to(change.settings.caches)
        self.settings = change.settings
        logging.getLogger("racerd").setLevel(self.settings.log_level.upper())
        self.metrics.reloads.labels("settings", "done").inc()

    def _note_lag(self, seconds: float) -> None:
        self.metrics.loop_lag_seconds.observe(seconds)
        self._lag_max = max(self._lag_max, seconds)

    async def _watch_stuck_flights(self) -> None:
        """F66: a page that nobody gets for long is said once, with what it waits for."""
        said: set[int] = set()
        while True:
            await asyncio.sleep(_STUCK_SECONDS / 3)
            stuck = self._services.flights.stuck(_STUCK_SECONDS)
            for flight in stuck:
                if id(flight) not in said:
                    _LOG.warning(
                        "%s is being acquired for over %.0f s: at the rung %s, with %d waiting",
                        flight.page.text, _STUCK_SECONDS, flight.rung, flight.waiters,
                    )  # fmt: skip
            said = {id(flight) for flight in stuck}

    # --- what people see --------------------------------------------------------------------

    def _pages(self) -> dict[str, Page]:
        return {
            "/healthz": lambda: Answer.text("ok\n"),
            "/readyz": self._readiness,
            "/metrics": self._exposition,
            "/debug/disks": lambda: Answer.json(
                [asdict(report) for report in self._store.reports()]
                if self._state != "starting"
                else []
            ),
            "/debug/keys": lambda: Answer.json(
                {"active": self._keyring.active.epoch, "epochs": self._keyring.epochs}
                if self._state != "starting"
                else {}
            ),
            "/debug/connections": lambda: Answer.json(
                self._caches.describe_connections() if self._state != "starting" else []
            ),
            "/debug/flights": lambda: Answer.json(
                self._services.flights.describe() if self._state != "starting" else []
            ),
            "/debug/shares": lambda: Answer.json(
                self._services.shares.describe() if self._state != "starting" else []
            ),
        }

    def _readiness(self) -> Answer:
        if self._state != "ready":
            return Answer.json({"ready": False, "waiting_for": [self._state]}, 503)
        # A disk that recovers serves what it has found, and one that is down is in nobody's way: it
        # is said, and keeps nobody out.
        disks = [_disk_state(report) for report in self._store.reports()]
        # The same holds for a GPU: reads into host memory are served without it.
        gpus = [_gpu_state(device) for device in self._gpus.devices.values()]
        why = {"gpu": self._gpus.state, "gpu_why": self._gpus.why}
        return Answer.json({"ready": True, "disks": disks, **why, "gpus": gpus})

    def _exposition(self) -> Answer:
        self.metrics.open_descriptors.set(open_descriptors())
        self.metrics.resident_bytes.set(resident_bytes())
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        self.metrics.loop_lag_max_seconds.set(self._lag_max)
        self._lag_max = 0.0
        body, content_type = self.metrics.exposition()
        return Answer(200, body, content_type)


class _Scrubbing:
    """Looks for rot on a thread of its own while it is entered."""

    def __init__(self, store: Store) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=store.scrub, args=(self._stop,), name="scrub", daemon=True
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def _disk_state(report: DiskReport) -> dict[str, object]:
    return {
        "path": report.path,
        "state": report.state,
        "reason": report.reason,
        "direct_io": report.direct,
        "pages": report.pages,
        "recovering": report.recovering,
        "recovery": asdict(report.recovery),
        "troubles": report.troubles,
    }


def _gpu_state(device: GpuDevice) -> dict[str, object]:
    return {
        "gpu": device.name,
        "why_not": device.why_not,
        "cufile": device.cufile_state,
        "worker": device.worker_pid,
        "restarts": device.restarts,
    }


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [f"state_dir: {folder} cannot be made: {error.strerror}; choose another --state-dir"]
        ) from error
