"""One client connection: a raw socket driven by the event loop's readiness callbacks.

Layer: serve, loop thread. The protocol is `racerd.wire.connection`; this moves bytes and
descriptors between it and the socket. The loop's transports are not used: they drop descriptors
without a word, and own sockets that must be closed exactly once.

One task runs a connection from its first byte to its last. Reading stays armed while a request is
carried out: a client that goes away cancels the task, and with it the read, its leases and its
targets (R7). The socket and every descriptor are closed when the task ends, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from racerd.errors import RacerError, ResourceError, Retry
from racerd.runtime.deadline import Deadline, deadline_exceeded
from racerd.serve.answer_room import AnswerRoom
from racerd.serve.descriptors import (
    Received,
    ReceivedDescriptor,
    control_message,
    queued_bytes,
    receive,
)
from racerd.serve.doorkeeper import Doorkeeper, Newcomer
from racerd.serve.operations import Exchange, Operations
from racerd.serve.peer import PeerCredentials
from racerd.serve.responses import Body, Response, error_response
from racerd.serve.send_buffers import SMALL_BYTES
from racerd.serve.serve_metrics import ServeMetrics
from racerd.serve.settings import ClientSocketSettings
from racerd.serve.targets import TargetRegistry
from racerd.wire.connection import (
    EXCESS_BYTES_MAX,
    FLOOD,
    Dropped,
    Event,
    Refused,
    Request,
    ServerConnection,
    State,
)
from racerd.wire.errors import internal_error, outer_error
from racerd.wire.heads import ResponseHead
from racerd.wire.messages import GetInfo, deadline_seconds, parse_message

_LOG = logging.getLogger(__name__)

Work = Request[ReceivedDescriptor] | Refused


class ClientConnection:
    """Serves one accepted socket, which it owns.

    `refusal` is what every request is answered with, where the connection was let in only to be
    told why it is not served.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerCredentials,
        operations: Operations,
        targets: TargetRegistry,
        settings: ClientSocketSettings,
        metrics: ServeMetrics,
        room: AnswerRoom,
        keeper: Doorkeeper,
        *,
        cache: str,
        refusal: RacerError | None = None,
    ) -> None:
        self.peer = peer
        self.cache = cache
        self._sock = sock
        self._operations = operations
        self._targets = targets
        self._settings = settings
        self._metrics = metrics
        self._room = room
        self._door = keeper.door
        self._newcomer = Newcomer(keeper)
        self._established = False
        self._large_buffer = False
        self._label = _Label()
        self._since = time.perf_counter()  # Of the exchange under way, or the end of the last.
        self._ended = False
        self._refusal = refusal
        self._draining = False
        self._wire: ServerConnection[ReceivedDescriptor] = ServerConnection()
        self._task: asyncio.Task[object] | None = None
        self._work: Work | None = None
        self._underway = 0  # Descriptors of the last answer that had any.
        self._answered = False  # The exchange under way has had its whole answer.
        self._waiting: asyncio.Future[None] | None = None
        self._parted: asyncio.Future[None] | None = None
        self._discarded_bytes = 0
        self._deaf = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._on_quiet: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being carried out or answered."""
        return self._wire.state in (State.BUSY, State.BODY)

    @property
    def since_seconds(self) -> float:
        """For how long it has been doing what it does."""
        return time.perf_counter() - self._since

    def describe(self) -> dict[str, object]:
        """What it does, for people: no name of an object, no byte of one."""
        doing = {
            State.IDLE: "waits for a request",
            State.HEAD: "has sent half a head",
            State.BUSY: f"waits for the answer to {self._label.operation}",
            State.BODY: f"is being sent the answer to {self._label.operation}",
            State.CLOSED: "is being closed",
        }[self._wire.state]
        count, size = self._targets.held_by(self)
        return {
            "cache": self.cache,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "client": doing,
            "established": self._established,
            "seconds": round(self.since_seconds, 1),
            "not_taken_bytes": 0 if self._ended else queued_bytes(self._sock),
            "targets": count,
            "target_bytes": size,
        }

    def drain(self, on_quiet: Callable[[], None]) -> None:
        """From now on new requests are refused; `on_quiet` is called when none is under way."""
        self._draining = True
        self._on_quiet = on_quiet
        if self.busy:
            self._wire.close_after_response = True
        else:
            on_quiet()

    async def run(self) -> None:
        """Serves until either side ends the connection. Raises nothing but CancelledError."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        newcomer = self._newcomer
        loop.add_reader(self._sock.fileno(), newcomer.timing(self._on_readable))
        try:
            if await newcomer.timed(self._serve_newcomer()):
                await self._serve_established()
            await self._linger()
        except _PeerGone:
            pass  # Nobody is left to tell; what ran for the peer has ended.
        finally:
            await (self._end() if self._established else newcomer.timed(self._end()))

    async def _serve_newcomer(self) -> bool:
        """Serves until the connection is established. False where its last exchange came before."""
        while await self._exchange():
            if self._newcomer.established:
                return True
        return False

    async def _serve_established(self) -> None:
        """Serves to the end. Nothing is timed any more."""
        self._established = True
        if not self._deaf:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._sock.fileno(), self._on_readable)
        while await self._exchange():
            pass

    async def _exchange(self) -> bool:
        """One exchange. Returns whether another may follow."""
        going_on = await self._answer(await self._next_work())
        if self._on_quiet is not None:
            self._on_quiet()
        return going_on

    async def _end(self) -> None:
        """Closes and releases everything. Runs to its end if cancelled."""
        self._stop_reading()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._follow(self._wire.close())
        self._note_underway(0)
        if isinstance(self._work, Request):
            self._drop(self._work.descriptors)
        # Targets first: to a client, a closed connection means that its memory is its own again.
        await self._targets.release_all(self)
        if self._large_buffer:
            self._room.buffers.give_back()
        self._ended = True
        self._sock.close()
        if self._on_quiet is not None:
            self._on_quiet()

    # Receiving.

    async def _next_work(self) -> Work:
        """Waits for the next head: as long as it takes, unless the connection is refused anyway."""
        if self._work is None:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                if self._refusal is None:
                    await self._waiting
                else:
                    async with asyncio.timeout(self._settings.head_seconds):
                        await self._waiting
            except TimeoutError as error:
                raise _PeerGone from error
            finally:
                self._waiting = None
        work, self._work = self._work, None
        assert work is not None
        return work

    def _on_readable(self) -> None:
        try:
            received = receive(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # Reset: the peer closed without having read everything.
            received = Received(b"", [], truncated=False)
        if self._wire.state is State.CLOSED:
            self._discard(received)
        elif received.data:
            self._follow(
                self._wire.receive(
                    received.data, received.descriptors, truncated=received.truncated
                )
            )
        else:
            self._follow(self._wire.receive_eof())
        self._watch_head()

    def _follow(self, events: list[Event[ReceivedDescriptor]]) -> None:
        for event in events:
            if isinstance(event, Request | Refused):
                self._work = event
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_result(None)
            elif isinstance(event, Dropped):
                self._drop(event.descriptors)
            else:
                self._peer_gone(event.reason)

    def _peer_gone(self, reason: str) -> None:
        if reason == FLOOD:
            self._metrics.connection_refused("flood")
        self._stop_reading()
        assert self._task is not None
        self._task.cancel()

    def _stop_reading(self) -> None:
        if not self._deaf:
            self._deaf = True
            asyncio.get_running_loop().remove_reader(self._sock.fileno())

    def _drop(self, descriptors: Iterable[ReceivedDescriptor]) -> None:
        for descriptor in descriptors:
            if descriptor.close():
                self._metrics.descriptors_dropped.inc()

    def _watch_head(self) -> None:
        """Keeps a timer while, and only while, a head is half received."""
        if self._wire.state is State.HEAD:
            if self._head_timer is None:
                loop = asyncio.get_running_loop()
                seconds = self._settings.head_seconds
                self._head_timer = loop.call_later(seconds, self._on_slow_head)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        self._metrics.connection_refused("slow head")
        seconds = self._settings.head_seconds
        self._follow(
            self._wire.give_up_on_head(f"the head of the request took longer than {seconds:g} s")
        )

    # Answering.

    async def _answer(self, work: Work) -> bool:
        """Carries one exchange out. Returns whether another may follow."""
        if isinstance(work, Refused):
            self._metrics.connection_refused("protocol")
            response = error_response(work.error, head_only=False)
            await self._send_soon(response)
            self._metrics.answered("none", response.head.status, 0.0, 0)
            return False
        started = self._since = time.perf_counter()
        label = self._label = _Label()
        self._answered = False
        established = self._established
        if established:
            self._door.work_began()
        try:
            response = await self._try(work, label)
        finally:
            self._drop(work.descriptors)
            self._since = time.perf_counter()
            if established:
                self._door.work_ended(self._since)
        seconds = self._since - started
        self._metrics.answered(label.operation, response.head.status, seconds, response.payload)
        return self._wire.state is not State.CLOSED

    async def _try(self, request: Request[ReceivedDescriptor], label: _Label) -> Response:
        """Answers `request`, with an error if need be. Raises _PeerGone, CancelledError."""
        try:
            return await self._carry_out(request, label)
        except RacerError as error:
            told = outer_error(error)
            if told is None:
                _LOG.exception("%s failed on cache %s", label.operation, self.cache)
                told = internal_error()
        except _PeerGone:
            raise
        except Exception:  # noqa: BLE001  told to the client as `internal`, logged here once
            _LOG.exception("%s failed on cache %s", label.operation, self.cache)
            told = internal_error()
        response = error_response(told, head_only=request.head.method == "HEAD")
        if self._answered or self._wire.state is not State.BUSY:
            # Part of a body is out. What is missing from it tells the client that it failed. (Or
            # all of it, and letting go of the read failed: what is owed by now is another answer.)
            self._metrics.answered(label.operation, response.head.status, 0.0, 0)
            self._metrics.connection_refused("failed in the body")
            raise _PeerGone
        await self._send_soon(response)
        return response

    async def _carry_out(self, request: Request[ReceivedDescriptor], label: _Label) -> Response:
        self._check_connection_is_served()
        deadline = Deadline.after(deadline_seconds(request.head))
        message = parse_message(request.head, self.cache)
        label.operation = message.operation
        if self._draining and not isinstance(message, GetInfo):
            raise _draining()
        room = self._room.descriptors.room
        exchange = Exchange(self, self.peer, deadline, request.descriptors, room)
        limit = asyncio.timeout(deadline.remaining_seconds())
        try:
            async with limit, self._room.of(message, self, deadline):
                response = await self._operations.handle(message, exchange)
                try:
                    self._check_last_answer_was_taken(response)
                    await self._send(response)
                finally:
                    response.let_go()
                return response
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise deadline_exceeded(f"carrying out {message.operation}") from error

    def _check_last_answer_was_taken(self, response: Response) -> None:
        """The descriptors of one answer at a time are on their way to a client: the kernel counts
        those that nobody takes against all of ours together, and would refuse everybody else's."""
        if response.descriptors and queued_bytes(self._sock):
            raise ResourceError(
                "share_full",
                "the answer before this one was not read yet",
                hint="read each answer before the next request is sent",
                retry=Retry.SAME,
                retry_after_seconds=1.0,
            )
        self._note_underway(len(response.descriptors))

    def _note_underway(self, count: int) -> None:
        """The connection's last answer was taken; `count` descriptors go with the next one."""
        self._room.descriptors.received(self._underway)
        self._underway = count
        self._room.descriptors.sent(count)

    def _check_connection_is_served(self) -> None:
        if self._refusal is not None:
            self._wire.close_after_response = True
            raise self._refusal

    # Sending.

    async def _send_soon(self, response: Response) -> None:
        """Sends an error. Its time is not the request's, which may be over."""
        try:
            async with asyncio.timeout(self._settings.error_seconds):
                await self._send(response)
        except TimeoutError as error:
            raise _PeerGone from error

    async def _send(self, response: Response) -> None:
        """Sends `response` whole, and ends the exchange in the moment its last byte is out."""
        if self._wire.state is not State.BUSY:
            raise _PeerGone
        if response.close or self._draining:
            self._wire.close_after_response = True
        if isinstance(response.body, Body):
            async with aclosing(response.body.rest):
                await self._send_stream(response.head, response.body)
            return
        head = self._wire.respond(response.head)
        self._wire.send_body(len(response.body))
        await self._write([head + response.body], response.descriptors)
        self._end_response()

    async def _send_stream(self, head: ResponseHead, body: Body) -> None:
        if self._large_buffer:
            self._large_buffer = not self._room.buffers.lend_on(self._sock)
        if not self._large_buffer and head.content_length > SMALL_BYTES:
            self._large_buffer = self._room.buffers.grow(self._sock)
        first = self._wire.respond(head)
        left = head.content_length - self._wire.send_body(len(body.first))
        await self._write([first, body.first])
        while left:
            # A stream that ends early, or says too much, is a defect that `_wire` raises for.
            chunk = await anext(body.rest, None)
            if chunk is None:
                break
            left -= self._wire.send_body(len(chunk))
            await self._write([chunk])
        self._end_response()

    def _end_response(self) -> None:
        self._wire.end_response()
        self._answered = True

    async def _write(
        self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int] = ()
    ) -> None:
        """Writes all of `parts`, waiting for the socket as often as it takes.

        `descriptors` go with the first byte, and stay the caller's.
        """
        views = [memoryview(part) for part in parts]
        rights = control_message(descriptors)
        while views:
            try:
                count = self._sock.sendmsg(views, rights)
            except (BlockingIOError, InterruptedError):
                await self._writable()
                continue
            except OSError as error:
                raise _PeerGone from error
            rights = []
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    async def _writable(self) -> None:
        """Waits until the socket takes more.

        Raises _PeerGone where the peer takes nothing of what is queued for it for
        `stall_seconds`, or, while others wait for what this body holds, for `stall_step_seconds`.
        """
        step = self._settings.stall_step_seconds
        still = 0.0
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        queued = queued_bytes(self._sock)
        loop.add_writer(self._sock.fileno(), _resolve, ready)
        try:
            while not (await asyncio.wait([ready], timeout=step))[0]:
                # The kernel says "writable" only when most of the queue is gone: look closer.
                before, queued = queued, queued_bytes(self._sock)
                still = 0.0 if queued < before else still + step
                awaited = still > 0 and self._operations.streams_awaited
                if awaited or still >= self._settings.stall_seconds:
                    self._metrics.connection_refused("slow reader")
                    raise _PeerGone
        finally:
            loop.remove_writer(self._sock.fileno())

    # Parting.

    async def _linger(self) -> None:
        """Lets the peer read the last answer: closing at once would reset the connection where it
        has sent more than was read, and it might never see why it was refused."""
        if self._deaf:
            return
        with suppress(OSError):  # Not connected any more: nothing to wait for either.
            self._sock.shutdown(socket.SHUT_WR)
        self._parted = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.linger_seconds):
                await self._parted

    def _discard(self, received: Received) -> None:
        self._drop(received.descriptors)
        self._discarded_bytes += len(received.data)
        if not received.data or self._discarded_bytes > EXCESS_BYTES_MAX:
            self._stop_reading()
            if self._parted is not None:
                _resolve(self._parted)


class _PeerGone(Exception):
    """The connection cannot carry an answer any more; it ends without another word."""


@dataclass(slots=True)
class _Label:
    """What metrics call an exchange, as soon as that is known."""

    operation: str = "unknown"


def _draining() -> ResourceError:
    return ResourceError(
        "draining",
        "racerd is shutting down on this node",
        hint="try again in a moment, or read from the origin",
        retry=Retry.SAME,
        retry_after_seconds=1.0,
    )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
