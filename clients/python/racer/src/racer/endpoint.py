"""One cache's daemon, as the client sees it: requests with retries.

Layer: on `pool`; thread-safe. `call` sends a request and returns its answer, or raises what the
answer tells of; what `retry` calls passing is tried again within the deadline. What is learned
about the daemon (page size, whether it takes our memory) is kept here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.errors import (
    BadRequest,
    BadUrl,
    ConnectionLost,
    MemoryUnavailable,
    RacerError,
    TargetRefused,
)
from racer.exchange import Answer
from racer.gpu_rung import GpuRung
from racer.pool import ConnectionPool
from racer.refusals import error_of
from racer.results import Info
from racer.retry import Retries
from racer.socket_path import SocketPlace, cache_of_path
from racer.wire import Request

T = TypeVar("T")


class EndpointState:
    """What is known about the daemon of `cache`: the blocking and the asyncio endpoint share it."""

    def __init__(self, cache: str, place: SocketPlace) -> None:
        self.cache = cache
        self.path = place.path_for(cache)
        self.ever_connected = False
        self.stream_only: RacerError | None = None  # Why host-reads are not tried any more.
        self.gpu_rung = GpuRung(cache)
        self._said: set[str] = set()
        self._info: Info | None = None
        # In a run directory the folder is the cache's name. Paths of requests do not carry it:
        # another cache's object of the same name would be read unnoticed.
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
        return Retries(restarts=self.ever_connected)

    def _learned(self, answer: Answer) -> Info:
        """Reads what the daemon says about itself; raises BadUrl where it is another cache's."""
        if answer.head.status >= 400:
            raise error_of(answer.head, answer.body, about="info")
        info = answers.read_info(answer.body)
        if info.cache != self.cache:
            raise BadUrl(
                f"the socket {self.path} serves the cache {info.cache!r}, and the URL names"
                f" {self.cache!r}",
                hint=f"write racer://{info.cache}/…, or use the other cache's socket",
            )
        self._name_checked = True
        self._info = info
        return info


class Endpoint(EndpointState):
    """The blocking one."""

    def __init__(self, cache: str, place: SocketPlace, connections_max: int) -> None:
        super().__init__(cache, place)
        self.pool = ConnectionPool(place, self.path, connections_max)

    def call(
        self, request: Request, deadline: Deadline, *, about: str, idempotent: bool = True
    ) -> Answer:
        """Sends `request` and returns its whole answer. `about` names it in errors."""

        def exchange(connection: Connection) -> Answer:
            answer = connection.exchange(request, deadline)
            if answer.head.status < 400:
                return answer
            error = error_of(answer.head, answer.body, about=about)
            asked = question_why(request, error)
            if asked is not None:
                with contextlib.suppress(RacerError):  # Then the first error stands.
                    error = better_told(error, connection.exchange(asked, deadline), about)
            raise error

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
                    self.ever_connected = True
                    return operation(connection)
            except RacerError as error:
                if not idempotent and isinstance(error, ConnectionLost) and not error.unsent:
                    raise
                pause = retries.pause_after(error, deadline)
            time.sleep(pause)

    def info(self, deadline: Deadline) -> Info:
        """What the daemon says about itself; asked for once, so that its `state` may be old."""
        return self._info if self._info is not None else self.refresh_info(deadline)

    def refresh_info(self, deadline: Deadline) -> Info:
        def exchange(connection: Connection) -> Info:
            return self._learned(connection.exchange(requests.info_request(), deadline))

        return self._attempt(exchange, deadline, idempotent=True)

    def dedicated(self) -> Connection:
        """See `ConnectionPool.dedicated`."""
        return self.pool.dedicated()

    def check_name(self, deadline: Deadline) -> None:
        """Asks a socket that was given by its path whether it serves the cache of the URL."""
        if not self._name_checked:
            self.refresh_info(deadline)


# What has more than one cause, of which the sentence and the hint of an answer's body tell.
_CODES_WITH_REASONS = ("not_found", "forbidden", "origin_unavailable")


def question_why(request: Request, error: RacerError) -> Request | None:
    """What to ask, once, where `error` came without its reason; None where there is no more to
    learn. The answer to HEAD has no body: to GET of the same object, of a byte at most, it has."""
    if request.method != "HEAD" or error.code not in _CODES_WITH_REASONS:
        return None
    return Request("GET", request.target, (("Range", "bytes=0-0"), *request.fields))


def better_told(error: RacerError, answer: Answer, about: str) -> RacerError:
    """`error` as the answer to `question_why` tells it; where that is about something else, or
    there is no error any more, as it was."""
    if answer.head.status < 400:
        return error
    told = error_of(answer.head, answer.body, about=about)
    return told if told.code == error.code else error


def is_refusal(error: RacerError) -> bool:
    """Whether `error` says that host-reads do not work here, rather than this read."""
    return isinstance(error, TargetRefused | MemoryUnavailable) or (
        isinstance(error, BadRequest) and error.code in ("unknown_operation", "method_not_allowed")
    )
