"""The composition root: builds everything, starts it, drains it, and ends it in reverse.

Layer: app; the only file that knows how everyone is made. One event loop runs the daemon; blocking
work is on the named threads below. What starts is a context manager, so that a failure half-way, or
the end, closes what was opened and nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from racerd.caches import Caches
from racerd.config import Settings, diff
from racerd.crypto.keyring import Keyring
from racerd.errors import ConfigError
from racerd.gpu.node import GpuNode
from racerd.part_settings import (
    arena_shape,
    gpu_settings,
    quotas,
    read_settings,
    socket_settings,
    store_settings,
)
from racerd.read.services import ReadServices, ReadThreads
from racerd.runtime.arena import FrameArena
from racerd.runtime.hardening import forbid_core_dumps, ignore_lease_breaks
from racerd.runtime.logs import set_up_logs
from racerd.runtime.loop_lag import watch_loop_lag
from racerd.runtime.populate import keep_freed_memory
from racerd.runtime.process import allow_many_descriptors
from racerd.runtime.threads import WorkerThreads
from racerd.runtime.watch import watch_files
from racerd.serve.diagnostics import DiagnosticsServer
from racerd.status import Parts, Status, greeting
from racerd.store import Store
from racerd.store.device import DiskError
from racerd.telemetry import Metrics

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


@contextmanager
def _opened_store(settings: Settings, metrics: Metrics) -> Iterator[Store]:
    """Raises ConfigError where another daemon has a slab, as a socket does that one listens on."""
    with ExitStack() as stack:
        try:
            store = stack.enter_context(Store(store_settings(settings), settings.geometry, metrics))
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
        self._status = Status(self.metrics)
        self._stop = asyncio.Event()
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def __aenter__(self) -> Daemon:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        _LOG.info("draining: running reads have %.0f s", self.settings.drain_seconds)
        self._status.state = "draining"
        self.metrics.ready.set(0)
        try:
            await self._parts.caches.drain(self.settings.drain_seconds)
        finally:
            await self._stack.aclose()
        _LOG.info("stopped")

    # --- start ------------------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> None:
        settings, metrics = self.settings, self.metrics
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signal_number, self._told_to_stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._told_to_reload)
        diagnostics = None
        if settings.diagnostics is not None:
            server = DiagnosticsServer(*settings.diagnostics, self._status.pages())
            diagnostics = (await stack.enter_async_context(server)).address
        arena = stack.enter_context(FrameArena(settings.frame_bytes, settings.memory))
        # Before anything is made on a disk: `on` may refuse to go on.
        gpus = await stack.enter_async_context(
            GpuNode(settings.gpu, gpu_settings(settings), arena_shape(settings, arena), metrics)
        )
        _make_folder(settings.state_dir)
        keyring = Keyring.open(settings.key_file)
        store = stack.enter_context(_opened_store(settings, metrics))
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
        services = await stack.enter_async_context(
            ReadServices(
                arena=arena,
                threads=threads,
                store=store,
                keyring=keyring,
                geometry=settings.geometry,
                metrics=metrics,
                settings=read_settings(settings),
            )
        )
        caches = await stack.enter_async_context(
            Caches(services, gpus, socket_settings(settings), metrics)
        )
        await caches.change_to(settings.caches)
        self._parts = self._status.parts = Parts(keyring, store, services, gpus, caches)
        stack.enter_context(_Scrubbing(store))
        self._watch(stack)
        # What is there now stays: the collector need not look at it each time, and need not look
        # at the few objects of a read as often as it does by default.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._status.state = "ready"
        metrics.ready.set(1)
        print(greeting(settings, self._parts, diagnostics=diagnostics), flush=True)

    def _watch(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._cancel_tasks)
        self._spawn(watch_loop_lag(self._status.note_lag))
        self._spawn(self._watch_stuck_flights())
        files = [self.settings.key_file, *self._files]
        self._spawn(watch_files(files, lambda _: self._told_to_reload()))

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
        # Before it is ready settings are fresh; afterwards they do not matter.
        if self._status.state == "ready":
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
        async with self._reloading:  # What was read later is what counts.
            await self._reload_keys()
            await self._reload_settings()

    async def _reload_keys(self) -> None:
        try:
            changed = await asyncio.to_thread(self._parts.keyring.reload)
        except ConfigError as error:
            self.metrics.reloads.labels("keys", "refused").inc()
            _LOG.error("the key file was not reloaded, the old keys stay: %s", error.message)
            return
        if changed:
            self.metrics.reloads.labels("keys", "done").inc()
            _LOG.info("keys reloaded: epochs %s", self._parts.keyring.epochs)

    async def _reload_settings(self) -> None:
        try:
            settings = await asyncio.to_thread(self._reload)
            socket_settings(settings)
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
            self._parts.store.set_quotas(quotas(change.settings))
            await self._parts.caches.change_to(change.settings.caches)
        self.settings = change.settings
        logging.getLogger("racerd").setLevel(self.settings.log_level.upper())
        self.metrics.reloads.labels("settings", "done").inc()

    async def _watch_stuck_flights(self) -> None:
        """F66: a page that nobody gets for long is said once, with what it waits for."""
        said: set[int] = set()
        while True:
            await asyncio.sleep(_STUCK_SECONDS / 3)
            stuck = self._parts.services.flights.stuck(_STUCK_SECONDS)
            for flight in stuck:
                if id(flight) not in said:
                    _LOG.warning(
                        "%s is being acquired for over %.0f s: at the rung %s, with %d waiting",
                        flight.page.text, _STUCK_SECONDS, flight.rung, flight.waiters,
                    )  # fmt: skip
            said = {id(flight) for flight in stuck}


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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [f"state_dir: {folder} cannot be made: {error.strerror}; choose another --state-dir"]
        ) from error
