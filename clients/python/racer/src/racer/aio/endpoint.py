"""One cache's daemon for asyncio: connections, and requests with retries.

Layer: on `aio.connection`; one event loop's. The counterpart of `racer.pool` and `racer.endpoint`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from racer import requests
from racer.aio.connection import AsyncConnection
from racer.deadline import Deadline
from racer.endpoint import EndpointState, better_told, question_why
from racer.errors import Closed, ConnectionLost, RacerError
from racer.exchange import Answer
from racer.refusals import error_of
from racer.results import Info
from racer.socket_path import SocketPlace
from racer.wire import Request

T = TypeVar("T")


class AsyncPool:
    """At most `connections_max` connections at a time; who asks for more waits."""

    def __init__(self, place: SocketPlace, path: str, connections_max: int) -> None:
        self.path = path
        self._place = place
        self._room = asyncio.Semaphore(connections_max)
        self._idle: list[AsyncConnection] = []
        self._closed = False

    @asynccontextmanager
    async def lease(self, deadline: Deadline) -> AsyncIterator[AsyncConnection]:
        """A connection for one exchange; it is closed unless it comes back idle."""
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._room.acquire()
        except TimeoutError as error:
            raise deadline.exceeded() from error
        try:
            connection = self._take()
            try:
                yield connection
            finally:
                if connection.idle and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()
        finally:
            self._room.release()

    def _take(self) -> AsyncConnection:
        while self._idle and not self._closed:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        return self.dedicated()

    def dedicated(self) -> AsyncConnection:
        """A new connection that is not counted and is the caller's to close."""
        if self._closed:
            raise Closed("the client was closed")
        return AsyncConnection(self._place, self.path)

    def close(self) -> None:
        """Closes what is idle now, and the rest as it comes back."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class AsyncEndpoint(EndpointState):
    """The socket of `cache`, found through `place`."""

    def __init__(self, cache: str, place: SocketPlace, connections_max: int) -> None:
        super().__init__(cache, place)
        self.pool = AsyncPool(place, self.path, connections_max)

    async def call(
        self, request: Request, deadline: Deadline, *, about: str, idempotent: bool = True
    ) -> Answer:
        """Sends `request` and returns its whole answer. `about` names it in errors."""

        async def exchange(connection: AsyncConnection) -> Answer:
            answer = await connection.exchange(request, deadline)
            if answer.head.status < 400:
                return answer
            error = error_of(answer.head, answer.body, about=about)
            asked = question_why(request, error)
            if asked is not None:
                with contextlib.suppress(RacerError):  # Then the first error stands.
                    error = better_told(error, await connection.exchange(asked, deadline), about)
            raise error

        return await self.attempt(exchange, deadline, idempotent=idempotent)

    async def attempt(
        self,
        operation: Callable[[AsyncConnection], Awaitable[T]],
        deadline: Deadline,
        *,
        idempotent: bool = True,
    ) -> T:
        """Runs `operation` on a connection of its own until it succeeds or may not be retried."""
        await self.check_name(deadline)
        return await self._attempt(operation, deadline, idempotent=idempotent)

    async def _attempt(
        self,
        operation: Callable[[AsyncConnection], Awaitable[T]],
        deadline: Deadline,
        *,
        idempotent: bool,
    ) -> T:
        retries = self.retries()
        while True:
            try:
                async with self.pool.lease(deadline) as connection:
                    self.ever_connected = True
                    return await operation(connection)
            except RacerError as error:
                if not idempotent and isinstance(error, ConnectionLost) and not error.unsent:
                    raise
                pause = retries.pause_after(error, deadline)
            await asyncio.sleep(pause)

    async def info(self, deadline: Deadline) -> Info:
        """What the daemon says about itself; asked for once, so that its `state` may be old."""
        return self._info if self._info is not None else await self.refresh_info(deadline)

    async def refresh_info(self, deadline: Deadline) -> Info:
        async def exchange(connection: AsyncConnection) -> Info:
            return self._learned(await connection.exchange(requests.info_request(), deadline))

        return await self._attempt(exchange, deadline, idempotent=True)

    async def check_name(self, deadline: Deadline) -> None:
        """Asks a socket that was given by its path whether it serves the cache of the URL."""
        if not self._name_checked:
            await self.refresh_info(deadline)
