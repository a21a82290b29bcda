"""Targets: the memory that clients want bytes in, registered or sent with one read.

Layer: serve, loop thread. A target outlives no lease on it: releasing one cancels the reads that
hold leases and waits until they have let go (R7), and only then is the memory unmapped.

`Landing` is what all kinds of target have in common; the registry opens each kind by its name and
knows nothing else of it. `host` is here, `gpu` in `gpu_target`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from racerd.errors import ProtocolError, RacerError, RequestError, ResourceError, Retry
from racerd.gpu.node import GpuNode
from racerd.runtime.deadline import Deadline
from racerd.runtime.threads import WorkerThreads, settled
from racerd.serve.descriptors import ReceivedDescriptor
from racerd.serve.gpu_target import GpuMemory
from racerd.serve.host_memory import HostMemory
from racerd.serve.leases import Lease, Leases, target_unknown
from racerd.serve.peer import PeerCredentials
from racerd.telemetry import Metrics
from racerd.units import MIB
from racerd.wire.messages import RegisterTarget

# Checking, mapping, unmapping and freeing cost 0.1 to 0.5 ms a MiB: more than this is no business
# of the loop.
_INLINE_BYTES_MAX = 1 * MIB


class Landing(Protocol):
    """Memory of a client that reads may fill."""

    @property
    def kind(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...

    def lease(self, offset: int, length: int) -> AbstractContextManager[Any]:
        """Hands out `length` bytes at `offset` for the block, as the kind has them; see `Lease`."""

    async def release(self) -> None:
        """Cancels the leases, waits for them, frees the memory. Runs to its end if cancelled."""


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
        self._leases = Leases()

    @property
    def size_bytes(self) -> int:
        return self._memory.length

    async def open(self) -> HostTarget:
        """Checks and maps the memory. On any failure nothing is left, the descriptor included."""
        try:
            await self._run(self._memory.open)
        except BaseException as error:
            await self._let_go()
            if isinstance(error, RacerError):
                self._refused.labels(error.code).inc()
            raise
        self._charged = self._memory.length
        self._gauge.inc(self._charged)
        return self

    def lease(self, offset: int, length: int) -> Lease[memoryview]:
        self._leases.check()
        return Lease(self._leases, self._memory.view(offset, length))

    async def release(self) -> None:
        task = asyncio.current_task()
        cancelling = 0 if task is None else task.cancelling()
        if not await self._leases.end():
            return
        try:
            await self._let_go()
        finally:
            self._gauge.dec(self._charged)
            self._charged = 0
        if task is not None and task.cancelling() > cancelling:
            raise asyncio.CancelledError  # It came while that must not be interrupted.

    async def _let_go(self) -> None:
        """Unmaps, and closes the descriptor: where the client has gone, that frees its memory, page
        by page. Runs to its end if cancelled, and raises CancelledError then."""
        if self._is_small():
            self._free()
            return
        freeing = self._threads.submit(self._free).future
        try:
            await asyncio.shield(freeing)
        except asyncio.CancelledError:
            await settled(freeing)
            raise

    def _free(self) -> None:
        self._memory.close()
        self._descriptor.close()

    async def _run(self, call: Callable[[], None]) -> None:
        """Runs `call` here, or on a thread where it would hold the loop for long."""
        if self._is_small():
            call()
        else:
            await self._threads.run(call)

    def _is_small(self) -> bool:
        return self._memory.length_to_map() <= _INLINE_BYTES_MAX


_Opener = Callable[[RegisterTarget, ReceivedDescriptor, Deadline], Awaitable[Landing]]


class TargetRegistry:
    """The registered targets of one cache, by id and by the connection that holds them."""

    def __init__(
        self,
        threads: WorkerThreads,
        metrics: Metrics,
        *,
        per_holder_max: int,
        targets_max: int,
        gpus: GpuNode | None = None,
    ) -> None:
        """`gpus`: None refuses targets of kind `gpu` as a node without one does."""
        self._threads = threads
        self._metrics = metrics
        self._per_holder_max = per_holder_max
        self._targets_max = targets_max
        self._gpus = gpus
        self._openers: Mapping[str, _Opener] = {
            HostTarget.kind: self._open_host,
            GpuMemory.kind: self._open_gpu,
        }
        self._entries: dict[str, _Entry] = {}
        self._opening = 0
        self._held: defaultdict[Hashable, set[str]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._entries)

    def held_by(self, holder: Hashable) -> tuple[int, int]:
        """How many targets `holder` has, and their bytes together."""
        held = [self._entries[target_id].target for target_id in self._held.get(holder, ())]
        return len(held), sum(target.size_bytes for target in held)

    async def register(
        self,
        wanted: RegisterTarget,
        descriptor: ReceivedDescriptor,
        holder: Hashable,
        peer: PeerCredentials,
        deadline: Deadline,
    ) -> tuple[str, Landing]:
        """Opens a target that lives until `release`, or until `release_all` of its holder."""
        try:
            self._check_room(wanted.kind, holder)
        except RacerError as error:
            self._metrics.targets_refused.labels(error.code).inc()
            raise
        self._opening += 1  # Counts already: many may be opened side by side.
        try:
            target = await self._openers[wanted.kind](wanted, descriptor, deadline)
        finally:
            self._opening -= 1
        target_id = secrets.token_hex(16)
        self._entries[target_id] = _Entry(target, holder, peer.uid)
        self._held[holder].add(target_id)
        self._metrics.targets.labels(target.kind).inc()
        return target_id, target

    def one_shot(self, descriptor: ReceivedDescriptor, offset: int, length: int) -> HostTarget:
        """A target of `length` bytes at `offset` that nobody else can name; not opened yet."""
        return HostTarget(descriptor, self._threads, self._metrics, offset=offset, length=length)

    def find(self, target_id: str, peer: PeerCredentials, *, kind: str | None = None) -> Landing:
        """Returns a target of this user. Raises RequestError `target_unknown`; where it is of
        another `kind` than is needed, `target_wrong_kind`."""
        entry = self._entries.get(target_id)
        if entry is None or entry.uid != peer.uid:
            raise target_unknown("there is no such target of this user in this cache")
        if kind is not None and entry.target.kind != kind:
            raise RequestError(
                "target_wrong_kind",
                f"the target is of kind {entry.target.kind}, this reads into one of kind {kind}",
                hint=f"use {entry.target.kind}-read for it",
            )
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

    async def _open_host(
        self, wanted: RegisterTarget, descriptor: ReceivedDescriptor, deadline: Deadline
    ) -> Landing:
        return await HostTarget(descriptor, self._threads, self._metrics).open()

    async def _open_gpu(
        self, wanted: RegisterTarget, descriptor: ReceivedDescriptor, deadline: Deadline
    ) -> Landing:
        memory = GpuMemory(self._gpus, wanted.gpu, wanted.size_bytes, self._metrics)
        return await memory.open(descriptor, deadline)

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
        taken = len(self._entries) + self._opening
        if held >= self._per_holder_max or taken >= self._targets_max:
            raise ResourceError(
                "targets_too_many",
                f"this connection holds {held} targets, the cache {taken}",
                hint="release targets that are not in use, or register one bigger target",
                retry=Retry.SAME,
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    target: Landing
    holder: Hashable
    uid: int
