"""Shared memory that daemons know, for asyncio, and a few pieces of it to read through.

Layer: on `aio.endpoint`; one event loop's. The counterpart of `racer.target` and of the ring.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from racer import answers, requests
from racer.aio.connection import AsyncConnection
from racer.aio.endpoint import AsyncEndpoint
from racer.aio.threads import to_end
from racer.deadline import Deadline
from racer.errors import Closed, RacerError, TargetRefused
from racer.memory import SharedMemory
from racer.refusals import error_of
from racer.target import RELEASE_SECONDS, TargetMemory
from racer.transfer import RING_PART_BYTES, RING_SLOTS


class ReadTarget(Protocol):
    """Memory that a read goes into, as far as reading goes."""

    @property
    def operation(self) -> str: ...

    @property
    def memory(self) -> Any: ...

    @property
    def lost(self) -> bool: ...

    def check(self) -> None: ...

    def give_up(self) -> None: ...

    def can_be_touched(self, error: RacerError) -> bool: ...

    async def id_for(self, endpoint: AsyncEndpoint, deadline: Deadline) -> str: ...

    def forget(self, endpoint: AsyncEndpoint, target_id: str) -> None: ...


class AsyncTarget(TargetMemory[SharedMemory]):
    """Owns `memory` and its registrations."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory)
        self._lock = asyncio.Lock()
        self._registered: dict[AsyncEndpoint, tuple[AsyncConnection, str]] = {}

    @property
    def registered(self) -> bool:
        """Whether some daemon knows this memory already."""
        return bool(self._registered)

    @classmethod
    async def allocate(cls, size: int, *, populate: bool = False) -> AsyncTarget:
        """Makes the memory on a thread: gigabytes take a while. Raises MemoryUnavailable."""
        return cls(
            await to_end(lambda: SharedMemory.allocate(size, populate=populate), SharedMemory.close)
        )

    async def id_for(self, endpoint: AsyncEndpoint, deadline: Deadline) -> str:
        """The id under which `endpoint` knows this memory; registers it where it does not."""
        async with self._lock:
            self.check()
            known = self._registered.get(endpoint)
            if known is not None:
                connection, target_id = known
                if connection.is_fresh():
                    return target_id
                connection.close()
                del self._registered[endpoint]
            await endpoint.check_name(deadline)
            try:
                registered = await self._register(endpoint, deadline)
            except TargetRefused as error:
                if not self.can_be_touched(error):
                    raise
                await to_end(self.memory.touch)
                registered = await self._register(endpoint, deadline)
            self._registered[endpoint] = registered
            return registered[1]

    async def _register(
        self, endpoint: AsyncEndpoint, deadline: Deadline
    ) -> tuple[AsyncConnection, str]:
        connection = endpoint.pool.dedicated()
        try:
            answer = await connection.exchange(
                requests.register_request(), deadline, [self.memory.fd]
            )
            if answer.head.status >= 400:
                raise error_of(answer.head, answer.body, about="registering memory")
            return connection, answers.read_target_id(answer.body, self.memory.target_bytes)
        except BaseException:
            connection.close()
            raise

    def forget(self, endpoint: AsyncEndpoint, target_id: str) -> None:
        """The daemon does not know `target_id` (any more)."""
        known = self._registered.get(endpoint)
        if known is not None and known[1] == target_id:
            del self._registered[endpoint]
            known[0].close()

    async def release(self) -> None:
        """Has the daemons let go of the memory, which stays."""
        registered, self._registered = self._registered, {}
        try:
            for connection, target_id in registered.values():
                if connection.is_fresh():
                    deadline = Deadline.after(RELEASE_SECONDS)
                    await connection.exchange(requests.release_request(target_id), deadline)
        except RacerError:
            return  # The end of the connection releases the target as well.
        finally:
            for connection, _ in registered.values():
                connection.close()

    def close_now(self) -> None:
        """Gives the memory up; the daemons let go when they see the connections end."""
        registered, self._registered = self._registered, {}
        for connection, _ in registered.values():
            connection.close()
        self.memory.close()


class AsyncRing:
    """Up to `slots` targets of `slot_bytes`, made when they are needed and kept."""

    def __init__(self, slot_bytes: int = RING_PART_BYTES, slots: int = RING_SLOTS) -> None:
        self.slot_bytes = slot_bytes
        self._room = asyncio.Semaphore(slots)
        self._targets: list[AsyncTarget] = []
        self._closed = False

    async def take(self, deadline: Deadline) -> AsyncTarget:
        """A slot, waiting for it up to `deadline`. Raises MemoryUnavailable, Closed."""
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._room.acquire()
        except TimeoutError as error:
            raise deadline.exceeded() from error
        try:
            if self._closed:
                raise Closed("the client was closed")
            if self._targets:
                return self._targets.pop()
            return await AsyncTarget.allocate(self.slot_bytes)
        except BaseException:
            self._room.release()
            raise

    def has_room(self) -> bool:
        """Whether `take` would not wait."""
        return not self._room.locked()

    def give_back(self, target: AsyncTarget) -> None:
        self._room.release()
        if self._closed or target.lost or target.memory.closed:
            target.close_now()
        else:
            self._targets.append(target)

    def close(self) -> None:
        """Frees the slots, those in use as they come back."""
        self._closed = True
        for target in self._targets:
            target.close_now()
        self._targets.clear()
