"""Targets: the memory that clients want bytes in, registered or sent with one read.

Layer: serve, loop thread. A target outlives no lease on it: releasing one cancels the reads that
hold leases and waits until they have let go (R7), and only then is the memory unmapped.

`Landing` is what all kinds of target have in common; the registry opens each kind by its name and
knows nothing else of it. `host` is the one there is.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback as tracebacks
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from racerd.errors import ProtocolError, RacerError, RequestError, ResourceError, Retry
from racerd.runtime.threads import WorkerThreads, settled
from racerd.serve.descriptors import ReceivedDescriptor
from racerd.serve.host_memory import HostMemory
from racerd.serve.peer import PeerCredentials
from racerd.telemetry import Metrics
from racerd.units import MIB

# Checking, mapping and unmapping cost about 10 us a MiB; more than this is no business of the loop.
_INLINE_BYTES_MAX = 16 * MIB


class Landing(Protocol):
    """Memory of a client that reads may fill."""

    @property
    def kind(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...

    def lease(self, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Hands out `length` bytes at `offset` for the block; see `Lease`."""

    async def release(self) -> None:
        """Cancels the leases, waits for them, frees the memory. Runs to its end if cancelled."""


class Lease:
    """The right of one task to touch a part of a target, for the length of a `with` block.

    When the target is released meanwhile, the block is cancelled, and the cancellation comes out
    as RequestError `target_unknown`.
    """

    __slots__ = ("_cancelling", "_revoked", "_target", "_task", "_view")

    def __init__(self, target: HostTarget, view: memoryview) -> None:
        self._target = target
        self._view = view
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._revoked = False

    def __enter__(self) -> memoryview:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._target.leases.add(self)
        return self._view

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        if error is not None:
            _forget_locals(error)
        self._view.release()
        self._target.leases.discard(self)
        self._target.leases_changed()
        if not self._revoked:
            return
        # As asyncio.timeout does: take our cancellation back, unless there is another one.
        ours_alone = self._task.uncancel() <= self._cancelling
        if ours_alone and isinstance(error, asyncio.CancelledError):
            raise target_unknown("the target was released while it was read into") from error

    def revoke(self) -> None:
        assert self._task is not None
        self._revoked = True
        self._task.cancel()


class HostTarget:
    """A mapped memfd. Owns the descriptor and the mapping from `open` to `release`."""

    kind: str = "host"

    def __init__(
        self,
        descriptor: ReceivedDescriptor,
        threads: WorkerThreads,
        metrics: Metrics,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        self._descriptor = descriptor.take()
        self._memory = HostMemory(self._descriptor.fileno(), offset, length)
        self._threads = threads
        self._gauge = metrics.target_bytes.labels(self.kind)
        self._refused = metrics.targets_refused
        self._charged = 0
        self._released = False
        self._quiet: asyncio.Future[None] | None = None
        self.leases: set[Lease] = set()

    @property
    def size_bytes(self) -> int:
        return self._memory.length

    async def open(self) -> HostTarget:
        """Checks and maps the memory. On any failure nothing is left, the descriptor included."""
        try:
            await self._run(self._memory.open)
        except BaseException as error:
            self._memory.close()
            self._descriptor.close()
            if isinstance(error, RacerError):
                self._refused.labels(error.code).inc()
            raise
        self._charged = self._memory.length
        self._gauge.inc(self._charged)
        return self

    def lease(self, offset: int, length: int) -> Lease:
        if self._released:
            raise target_unknown("the target was released")
        return Lease(self, self._memory.view(offset, length))

    def leases_changed(self) -> None:
        if not self.leases and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def release(self) -> None:
        if self._released:
            return
        self._released = True
        task = asyncio.current_task()
        cancelling = 0 if task is None else task.cancelling()
        if self.leases:
            self._quiet = asyncio.get_running_loop().create_future()
            for lease in tuple(self.leases):
                lease.revoke()
            await settled(self._quiet)
        try:
            await self._run(self._memory.close)
        finally:
            self._memory.close()
            self._descriptor.close()
            self._gauge.dec(self._charged)
            self._charged = 0
        if task is not None and task.cancelling() > cancelling:
            raise asyncio.CancelledError  # It came while that must not be interrupted.

    async def _run(self, call: Callable[[], None]) -> None:
        """Runs `call` here, or on a thread where it would hold the loop for long."""
        if self._memory.length_to_map() <= _INLINE_BYTES_MAX:
            call()
        else:
            await self._threads.run(call)


class TargetRegistry:
    """The registered targets of one cache, by id and by the connection that holds them."""

    def __init__(
        self,
        threads: WorkerThreads,
        metrics: Metrics,
        *,
        per_holder_max: int,
        targets_max: int,
    ) -> None:
        self._threads = threads
        self._metrics = metrics
        self._per_holder_max = per_holder_max
        self._targets_max = targets_max
        self._openers: Mapping[str, Callable[[ReceivedDescriptor], Awaitable[Landing]]] = {
            HostTarget.kind: self._open_host,
        }
        self._entries: dict[str, _Entry] = {}
        self._held: defaultdict[Hashable, set[str]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._entries)

    async def register(
        self, kind: str, descriptor: ReceivedDescriptor, holder: Hashable, peer: PeerCredentials
    ) -> tuple[str, Landing]:
        """Opens a target that lives until `release`, or until `release_all` of its holder."""
        try:
            self._check_room(kind, holder)
        except RacerError as error:
            self._metrics.targets_refused.labels(error.code).inc()
            raise
        target = await self._openers[kind](descriptor)
        target_id = secrets.token_hex(16)
        self._entries[target_id] = _Entry(target, holder, peer.uid)
        self._held[holder].add(target_id)
        self._metrics.targets.labels(target.kind).inc()
        return target_id, target

    def one_shot(self, descriptor: ReceivedDescriptor, offset: int, length: int) -> HostTarget:
        """A target of `length` bytes at `offset` that nobody else can name; not opened yet."""
        return HostTarget(descriptor, self._threads, self._metrics, offset=offset, length=length)

    def find(self, target_id: str, peer: PeerCredentials) -> Landing:
        """Returns a target of this user. Raises RequestError `target_unknown`."""
        entry = self._entries.get(target_id)
        if entry is None or entry.uid != peer.uid:
            raise target_unknown("there is no such target of this user in this cache")
        return entry.target

    async def release(self, target_id: str, peer: PeerCredentials) -> None:
        """Returns once nothing touches the target's memory. Raises `target_unknown`."""
        self.find(target_id, peer)
        await self._forget(target_id).release()

    async def release_all(self, holder: Hashable) -> None:
        """Releases what `holder` still holds, all side by side; runs to its end if cancelled."""
        targets = [self._forget(target_id) for target_id in tuple(self._held.get(holder, ()))]
        if targets:
            releasing = asyncio.gather(*(target.release() for target in targets))
            await settled(releasing)

    async def _open_host(self, descriptor: ReceivedDescriptor) -> Landing:
        return await HostTarget(descriptor, self._threads, self._metrics).open()

    def _forget(self, target_id: str) -> Landing:
        entry = self._entries.pop(target_id)
        held = self._held[entry.holder]
        held.discard(target_id)
        if not held:
            del self._held[entry.holder]
        self._metrics.targets.labels(entry.target.kind).dec()
        return entry.target

    def _check_room(self, kind: str, holder: Hashable) -> None:
        if kind not in self._openers:
            raise ProtocolError(
                "bad_request",
                f"there is no target of kind {kind[:20]!r} here",
                hint=f"register a target of kind {' or '.join(self._openers)}",
            )
        held = len(self._held.get(holder, ()))
        if held >= self._per_holder_max or len(self._entries) >= self._targets_max:
            raise ResourceError(
                "targets_too_many",
                f"this connection holds {held} targets, the cache {len(self._entries)}",
                hint="release targets that are not in use, or register one bigger target",
                retry=Retry.SAME,
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    target: Landing
    holder: Hashable
    uid: int


def target_unknown(message: str) -> RequestError:
    return RequestError(
        "target_unknown",
        message,
        hint="a target lasts until it is deleted or its connection ends; register it again",
    )


def _forget_locals(error: BaseException) -> None:
    """Drops the locals of the finished frames that `error` came through: views of a target's
    memory among them, which would keep it mapped for as long as somebody keeps the error."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        tracebacks.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
