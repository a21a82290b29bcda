"""The caches that are served now: each an origin, a reader and a socket, opened and closed as one.

Layer: below app. Loop thread only. Caches come and go without a restart (R31): a changed one is
closed and opened anew; clients of the others notice nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from racerd.config import CacheSettings
from racerd.errors import RacerError
from racerd.gpu.node import GpuNode
from racerd.origin.factory import make_origin
from racerd.read.reader import CacheReader
from racerd.read.services import ReadServices
from racerd.runtime.threads import WorkerThreads
from racerd.serve.client_socket import ClientSocket
from racerd.serve.doorkeeper import Doorkeeper
from racerd.serve.settings import ClientSocketSettings
from racerd.telemetry import Metrics

_LOG = logging.getLogger(__name__)
_DESCRIBED_MAX = 500
_TARGET_THREADS = 2


@dataclass
class _Open:
    settings: CacheSettings
    socket: ClientSocket
    stack: AsyncExitStack


class Caches:
    """An async context manager; leaving it closes every cache."""

    def __init__(
        self,
        services: ReadServices,
        gpus: GpuNode,
        socket_settings: ClientSocketSettings,
        metrics: Metrics,
    ) -> None:
        self._services = services
        self._gpus = gpus
        self._socket_settings = socket_settings
        self._metrics = metrics
        # Not the threads that open pages: whoever registers memory by the gigabyte, and takes it
        # away again, must not hold up those who read into theirs.
        self._target_threads = WorkerThreads("targets", _TARGET_THREADS)
        self._keeper = Doorkeeper(metrics)
        self._open: dict[str, _Open] = {}
        self._changing = asyncio.Lock()

    async def __aenter__(self) -> Caches:
        await self._target_threads.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            for name in list(self._open):
                await self._close(name)
        finally:
            await self._target_threads.__aexit__(None, None, None)

    def socket_path(self, name: str) -> Path:
        return self._open[name].socket.path

    async def change_to(self, wanted: Mapping[str, CacheSettings]) -> None:
        """Closes what is not wanted (any more, or like this) and opens what is missing.

        At start the first cache that cannot be opened ends the daemon; later it is logged and
        left out, and the others are served.
        """
        async with self._changing:
            first = not self._open
            for name in list(self._open):
                if not _served_alike(wanted.get(name), self._open[name].settings):
                    await self._close(name)
            for name in wanted.keys() - self._open.keys():
                try:
                    await self._start(wanted[name])
                except RacerError as error:
                    if first:
                        raise
                    _LOG.error("cache %s cannot be served: %s", name, error.message)

    async def _start(self, settings: CacheSettings) -> None:
        async with AsyncExitStack() as stack:
            origin = make_origin(
                settings.origin, settings.options, cache=settings.name, metrics=self._metrics
            )
            stack.push_async_callback(asyncio.to_thread, origin.close)
            reader = await stack.enter_async_context(
                CacheReader(settings.name, origin, self._services)
            )
            socket = await stack.enter_async_context(
                ClientSocket(
                    reader,
                    self._socket_settings,
                    metrics=self._metrics,
                    threads=self._target_threads,
                    gpus=self._gpus,
                    keeper=self._keeper,
                )
            )
            self._open[settings.name] = _Open(settings, socket, stack.pop_all())
        _LOG.info("cache %s serves %s at %s", settings.name, settings.origin, socket.path)

    async def _close(self, name: str) -> None:
        await self._open.pop(name).stack.aclose()
        _LOG.info("cache %s is closed", name)

    def describe_connections(self) -> list[dict[str, object]]:
        """The connections of all caches, the longest at the same thing first; a bounded number."""
        found = (one for cache in self._open.values() for one in cache.socket.connections)
        longest = heapq.nlargest(_DESCRIBED_MAX, found, key=lambda one: one.since_seconds)
        return [connection.describe() for connection in longest]

    def describe_door(self) -> dict[str, object]:
        """Whether newcomers are let in, and how many wait."""
        waiting = {name: cache.socket.waiting_count for name, cache in self._open.items()}
        return {"door": self._keeper.describe(), "waiting": waiting}

    async def drain(self, seconds: float) -> None:
        """Refuses new requests everywhere and waits up to `seconds` for those that run."""
        await asyncio.gather(*(cache.socket.drain(seconds) for cache in self._open.values()))


def _served_alike(wanted: CacheSettings | None, now: CacheSettings) -> bool:
    """Whether `now` can stay open. A quota is the store's business."""
    return wanted is not None and replace(wanted, quota_bytes=now.quota_bytes) == now
