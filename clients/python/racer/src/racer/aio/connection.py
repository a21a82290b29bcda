"""One asyncio connection: an exchange at a time.

Layer: I/O driver of `exchange`. The event loop's own socket calls cannot send descriptors, so the
socket is ours: every call is tried at once, and waits for the loop's add_reader or add_writer only
where it would block.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from racer.connection import Connection, SocketOwner
from racer.deadline import Deadline
from racer.errors import RacerError
from racer.exchange import RECEIVE_BYTES, RIGHTS_BYTES, Answer, lost, rights
from racer.wire import Request, ResponseHead

T = TypeVar("T")


class AsyncConnection(SocketOwner):
    """Cancelling an exchange closes the connection."""

    async def exchange(
        self, request: Request, deadline: Deadline, descriptors: Sequence[int] = ()
    ) -> Answer:
        """Sends `request` and returns its whole answer, whatever its status."""
        await self.send(request, deadline, descriptors)
        head = await self.receive_head(deadline)
        return Answer(head, await self.receive_body(deadline))

    def into_blocking(self) -> Connection:
        """The same connection for other threads; this one is closed. It has to be idle."""
        assert self.idle
        blocking = Connection.__new__(Connection)
        vars(blocking).update(vars(self))
        self._socket = None
        return blocking

    async def send(
        self, request: Request, deadline: Deadline, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends the head. The descriptors stay the caller's."""
        sock = self._open_socket()
        deadline.check()
        head = self._exchange.start(request, deadline.header_ms)
        sent = 0
        try:
            ancillary = rights(descriptors)
            while sent < len(head):
                call = partial(sock.sendmsg, [head[sent:]], () if sent else ancillary)
                sent += await self._when("w", call, deadline)
        except OSError as error:
            self.close()
            raise lost(self.path, f"broke: {error.strerror}", unsent=sent == 0) from error
        except BaseException:
            self.close()
            raise

    async def receive_with_descriptors(self, deadline: Deadline) -> tuple[Answer, list[int]]:
        """Receives the whole answer, and the descriptors that may come with its first byte.

        They are the caller's. Raises ProtocolError where more came than may.
        """
        descriptors: list[int] = []
        try:
            head = await self._receive_first(deadline, descriptors)
            head = head or await self.receive_head(deadline)
            answer = Answer(head, await self.receive_body(deadline))
            taken, descriptors = descriptors, []
            return answer, taken
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _receive_first(
        self, deadline: Deadline, descriptors: list[int]
    ) -> ResponseHead | None:
        """Receives the first bytes of an answer; descriptors come with no others."""
        call = partial(
            self._open_socket().recvmsg, RECEIVE_BYTES, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        try:
            data, control, flags, _ = await self._when("r", call, deadline)
            return self._exchange.feed_first(data, control, flags, descriptors)
        except OSError as error:
            raise self._broken(error) from error
        except BaseException:
            self.close()
            raise

    async def receive_head(self, deadline: Deadline) -> ResponseHead:
        """Receives the head; the body has to be received next, even where it is empty."""
        sock = self._open_socket()
        try:
            while True:
                data = await self._when("r", partial(sock.recv, RECEIVE_BYTES), deadline)
                head = self._exchange.feed(data)
                if head is not None:
                    return head
        except OSError as error:
            raise self._broken(error) from error
        except BaseException:
            self.close()
            raise

    async def receive_body(self, deadline: Deadline) -> bytes:
        """Receives and returns the body: of an answer that is kept whole, and so bounded."""
        try:
            body = self._exchange.whole_body()
        except BaseException:
            self.close()
            raise
        if body is not None:
            self._finish()
            return body
        buffer = bytearray(self._exchange.body_left)
        await self.receive_body_into(memoryview(buffer), deadline)
        return bytes(buffer)

    async def receive_body_into(self, view: memoryview, deadline: Deadline) -> None:
        """Receives the whole body into `view`, which is exactly as long.

        Raises ConnectionLost where it ends early: a short body is a failed read, never short data.
        """
        sock = self._open_socket()
        filled = self._exchange.start_body(view)
        try:
            while filled < len(view):
                with view[filled:] as rest:
                    count = await self._when("r", partial(sock.recv_into, rest), deadline)
                if not count:
                    raise self._exchange.short(filled)
                filled += count
        except OSError as error:
            raise self._broken(error) from error
        except BaseException:
            self.close()
            raise
        self._finish()

    async def _when(self, direction: str, call: Callable[[], T], deadline: Deadline) -> T:
        """Makes `call` as soon as it does not block. Raises DeadlineExceeded."""
        while True:
            try:
                return call()
            except BlockingIOError:
                pass  # The usual case: the daemon has not answered yet.
            remaining = deadline.with_grace().remaining
            if remaining <= 0:
                raise deadline.exceeded()
            try:
                async with asyncio.timeout(remaining):
                    await self._ready(direction)
            except TimeoutError as error:
                raise deadline.exceeded() from error

    async def _ready(self, direction: str) -> None:
        loop = asyncio.get_running_loop()
        fd = self.fileno()
        future: asyncio.Future[None] = loop.create_future()
        add, remove = (
            (loop.add_reader, loop.remove_reader)
            if direction == "r"
            else (loop.add_writer, loop.remove_writer)
        )
        add(fd, _wake, future)
        try:
            await future
        finally:
            remove(fd)

    def _broken(self, error: OSError) -> RacerError:
        self.close()
        return lost(self.path, f"broke: {error.strerror}")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
