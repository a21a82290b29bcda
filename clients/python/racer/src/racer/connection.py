"""One blocking connection to one socket: an exchange at a time.

Layer: I/O driver of `wire`. Not thread-safe: whoever took it from the pool has it alone.
Descriptors go with the first byte of the head, as the protocol wants. A connection on which
anything went wrong is closed and never used again; the daemon then cancels what it still ran for
it.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from racer.deadline import Deadline
from racer.errors import Closed, ConnectionLost, Forked, Overloaded, ProtocolError
from racer.socket_path import SocketPlace
from racer.wire import BODY_BYTES_MAX, HeadReader, Request, ResponseHead

_RECEIVE_BYTES = 64 << 10


class Answer(NamedTuple):
    """A whole answer whose body was kept."""

    head: ResponseHead
    body: bytes


def lost(path: str, what: str, *, unsent: bool = False) -> ConnectionLost:
    """The error for a connection that ended: `what` completes "the connection to … "."""
    error = ConnectionLost(
        f"the connection to {path} {what}",
        hint="racerd stopped, restarted or gave the read up: see its log",
    )
    error.unsent = unsent
    return error


def rights(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """The control message that carries `descriptors`."""
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]


class Connection:
    """Opened by the constructor: it exists, therefore it was connected."""

    def __init__(self, place: SocketPlace, path: str, deadline: Deadline) -> None:
        self.path = path
        self._pid = os.getpid()
        self._reader: HeadReader | None = None
        self._body_left = 0
        self._closes = False
        self._socket: socket.socket | None = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(deadline.check())
            sock.connect(path)
        except TimeoutError as error:
            sock.close()
            raise deadline.exceeded() from error
        except BlockingIOError as error:
            # A Unix socket with a timeout does not wait for room in the other's accept queue.
            sock.close()
            raise Overloaded(f"racerd does not keep up with connections to {path}") from error
        except OSError as error:
            sock.close()
            raise place.unreachable(path, error) from error
        except BaseException:
            sock.close()
            raise
        self._socket = sock

    # --- state ------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._socket is None

    @property
    def idle(self) -> bool:
        """Whether the last exchange is over, nothing went wrong and another one may start."""
        return self._socket is not None and self._reader is None and not self._closes

    def is_fresh(self) -> bool:
        """Whether the idle connection still stands: open at the other side, and silent."""
        if not self.idle:
            return False
        assert self._socket is not None
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # Closed by the daemon, or it speaks without being asked.

    def fileno(self) -> int:
        return self._open_socket().fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            if os.getpid() != self._pid:
                raise Forked(f"this connection to {self.path} belongs to the parent process")
            raise Closed(f"the connection to {self.path} was closed")
        return self._socket

    # --- one exchange -----------------------------------------------------------------------

    def exchange(
        self, request: Request, deadline: Deadline, descriptors: Sequence[int] = ()
    ) -> Answer:
        """Sends `request` and returns its whole answer, whatever its status.

        Raises ConnectionLost, ProtocolError or DeadlineExceeded; the connection is closed then.
        """
        self.send(request, deadline, descriptors)
        return self.receive(deadline)

    def send(self, request: Request, deadline: Deadline, descriptors: Sequence[int] = ()) -> None:
        """Sends the head. The descriptors stay the caller's."""
        sock = self._open_socket()
        assert self._reader is None, "the last exchange is not over"
        remaining = deadline.check()
        head = memoryview(request.encode(deadline.header_ms))
        self._reader = HeadReader(to_head=request.method == "HEAD")
        sent = 0
        try:
            sock.settimeout(remaining)
            sent = sock.sendmsg([head], rights(descriptors))
            if sent < len(head):
                sock.sendall(head[sent:])
        except TimeoutError as error:
            self.close()
            raise deadline.exceeded() from error
        except OSError as error:
            self.close()
            # A Unix socket whose other end is closed takes nothing: the daemon saw no byte.
            raise lost(self.path, f"broke: {error.strerror}", unsent=sent == 0) from error
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: Deadline) -> Answer:
        """Receives the whole answer to what was sent."""
        head = self.receive_head(deadline)
        return Answer(head, self.receive_body(deadline))

    def receive_head(self, deadline: Deadline) -> ResponseHead:
        """Receives the head; the body has to be received next, even where it is empty."""
        reader = self._reader
        assert reader is not None, "nothing was asked"
        try:
            while True:
                data = self._receive(deadline)
                if not data:
                    self.close()
                    where = "in its head" if reader.started else "before it was answered"
                    raise lost(self.path, f"ended {where}")
                head = reader.feed(data)
                if head is not None:
                    break
        except BaseException:
            self.close()
            raise
        self._closes = head.closes
        self._body_left = head.content_length
        return head

    def receive_body(self, deadline: Deadline) -> bytes:
        """Receives and returns the body: of an answer that is kept whole, and so bounded."""
        if self._body_left > BODY_BYTES_MAX:
            self.close()
            raise ProtocolError(f"an answer with a body of {self._body_left:,} bytes")
        if self._reader is not None and len(self._reader.rest) == self._body_left:
            body = self._reader.rest
            self._finish()
            return body
        buffer = bytearray(self._body_left)
        self.receive_body_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def receive_body_into(self, view: memoryview, deadline: Deadline) -> None:
        """Receives the whole body into `view`, which is exactly as long.

        Raises ConnectionLost where it ends early: a short body is a failed read, never short data.
        """
        assert self._reader is not None and len(view) == self._body_left
        rest = self._reader.rest
        filled = len(rest)
        view[:filled] = rest
        try:
            while filled < len(view):
                count = self._receive_into(view[filled:], deadline)
                if not count:
                    raise lost(self.path, f"ended after {filled:,} of {len(view):,} bytes")
                filled += count
        except BaseException:
            self.close()
            raise
        self._finish()

    def _finish(self) -> None:
        self._reader = None
        self._body_left = 0
        if self._closes:
            self.close()

    def _receive(self, deadline: Deadline) -> bytes:
        sock = self._open_socket()
        try:
            sock.settimeout(self._wait_seconds(deadline))
            return sock.recv(_RECEIVE_BYTES)
        except TimeoutError as error:
            raise deadline.exceeded() from error
        except ConnectionError as error:
            raise lost(self.path, f"broke: {error.strerror}") from error

    def _receive_into(self, view: memoryview, deadline: Deadline) -> int:
        sock = self._open_socket()
        try:
            sock.settimeout(self._wait_seconds(deadline))
            return sock.recv_into(view)
        except TimeoutError as error:
            raise deadline.exceeded() from error
        except ConnectionError as error:
            raise lost(self.path, f"broke: {error.strerror}") from error

    @staticmethod
    def _wait_seconds(deadline: Deadline) -> float:
        return deadline.with_grace().check()
