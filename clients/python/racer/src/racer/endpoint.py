"""One cache's daemon, as the client sees it: requests with retries.

Layer: on `pool`; thread-safe. `call` sends a request and returns its answer, or raises what the
answer tells of; what `retry` calls passing is tried again within the deadline. What is learned
about the daemon (page size, whether it takes our memory) is kept here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from racer import messages
from racer.connection import Answer, Connection
from racer.deadline import Deadline
from racer.errors import (
    BadRequest,
    BadUrl,
    ConnectionLost,
    MemoryUnavailable,
    RacerError,
    TargetRefused,
)
from racer.messages import Info
from racer.pool import ConnectionPool
from racer.retry import Retries
from racer.socket_path import SocketPlace, cache_of_path
from racer.wire import Request

T = TypeVar("T")


class Endpoint:
    """The socket of `cache`, found through `place`."""

    def __init__(self, cache: str, place: SocketPlace, connections_max: int) -> None:
        self.cache = cache
        self.pool = ConnectionPool(place, place.path_for(cache), connections_max)
        self.stream_only: RacerError | None = None  # Why host-reads are not tried any more.
        self._said: set[str] = set()
        self._info: Info | None = None
        self._name_checked = place.socket is None or cache_of_path(place.socket) == cache

    def fall_back(self, error: RacerError) -> None:
        """Notes that bytes are streamed because of `error`, and says so once per reason.

        A daemon that refused our memory would refuse it again: it is not asked any more. Memory
        that the system did not have may be there the next time.
        """
        if not isinstance(error, MemoryUnavailable):
            self.stream_only = error
        if error.code in self._said:
            return
        self._said.add(error.code)
        import logging  # Not at the top: it is slow to import, and most processes never fall back.

        logging.getLogger("racer").warning(
            "cache %s: reading over the socket instead of into shared memory: %s [%s]",
            self.cache,
            error,
            error.code,
        )

    def retries(self) -> Retries:
        return Retries(restarts=self.pool.ever_connected)

    def call(
        self, request: Request, deadline: Deadline, *, about: str, idempotent: bool = True
    ) -> Answer:
        """Sends `request` and returns its whole answer. `about` names it in errors."""

        def exchange(connection: Connection) -> Answer:
            answer = connection.exchange(request, deadline)
            if answer.head.status >= 400:
                raise messages.error_of(answer.head, answer.body, about=about)
            return answer

        return self.attempt(exchange, deadline, idempotent=idempotent)

    def attempt(
        self, operation: Callable[[Connection], T], deadline: Deadline, *, idempotent: bool = True
    ) -> T:
        """Runs `operation` on a connection of its own until it succeeds or may not be retried."""
        self.check_name(deadline)
        return self._attempt(operation, deadline, idempotent=idempotent)

    def _attempt(
        self, operation: Callable[[Connection], T], deadline: Deadline, *, idempotent: bool
    ) -> T:
        retries = self.retries()
        while True:
            try:
                with self.pool.lease(deadline) as connection:
                    return operation(connection)
            except RacerError as error:
                if not idempotent and isinstance(error, ConnectionLost) and not error.unsent:
                    raise
                pause = retries.pause_after(error, deadline)
            time.sleep(pause)

    def info(self, deadline: Deadline) -> Info:
        """What the daemon says about itself; asked for once, but for its `state`."""
        if self._info is None:
            self.refresh_info(deadline)
        assert self._info is not None
        return self._info

    def refresh_info(self, deadline: Deadline) -> Info:
        def exchange(connection: Connection) -> Info:
            answer = connection.exchange(messages.info_request(), deadline)
            if answer.head.status >= 400:
                raise messages.error_of(answer.head, answer.body, about="info")
            return messages.read_info(answer.body)

        self._info = self._attempt(exchange, deadline, idempotent=True)
        return self._info

    def check_name(self, deadline: Deadline) -> None:
        """Asks a socket that was given by path whether it serves the cache of the URL.

        Paths of requests do not carry the cache: without this another cache's object of the same
        name would be read.
        """
        if self._name_checked:
            return
        served = self.info(deadline).cache
        if served != self.cache:
            raise BadUrl(
                f"the socket {self.pool.path} serves the cache {served!r}, and the URL names"
                f" {self.cache!r}",
                hint=f"write racer://{served}/…, or use the other cache's socket",
            )
        self._name_checked = True


def is_refusal(error: RacerError) -> bool:
    """Whether `error` says that host-reads do not work here, rather than this read."""
    return isinstance(error, TargetRefused | MemoryUnavailable) or (
        isinstance(error, BadRequest) and error.code in ("unknown_operation", "method_not_allowed")
    )
