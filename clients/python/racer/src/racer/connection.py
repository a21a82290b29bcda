"""One blocking connection to one socket: an exchange at a time.

Layer: I/O driver of `exchange`. Not thread-safe: whoever took it from the pool has it alone.
Descriptors go with the first byte of the head, as the protocol wants. A connection on which
anything went wrong is closed and never used again; the daemon then cancels what it still ran for
it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

from racer.deadline import Deadline
from racer.errors import Closed, Forked, Overloaded, RacerError
from racer.exchange import (
    RECEIVE_BYTES,
    RIGHTS_BYTES,
    Answer,
    Exchange,
    State,
    lost,
    rights,
)
from racer.socket_path import SocketPlace
from racer.wire import Request, ResponseHead


def connected_socket(place: SocketPlace, path: str) -> socket.socket:
    """Returns a non-blocking socket that is connected to `path`.

    Connecting to a Unix socket does not wait: it succeeds, or raises DaemonUnavailable, or
    Overloaded where the other's accept queue is full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError as error:
        sock.close()
        raise Overloaded(f"racerd does not keep up with connections to {path}") from error
    except OSError as error:
        sock.close()
        raise place.unreachable(path, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


class SocketOwner:
    """What the blocking and the asyncio connection have in common: the socket and its state.

    It exists, therefore it was connected.
    """

    def __init__(self, place: SocketPlace, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._exchange = Exchange(path)
        self._socket: socket.socket | None = connected_socket(place, path)

    @property
    def closed(self) -> bool:
        return self._socket is None

    @property
    def idle(self) -> bool:
        """Whether the last exchange is over, nothing went wrong and another one may start."""
        return self._socket is not None and self._exchange.state is State.IDLE

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

    def shut_down(self) -> None:
        """From any thread: the exchange that another thread has running ends as lost."""
        sock = self._socket
        if sock is not None:
            # Closed meanwhile, by its owner or by the daemon: it has ended all the same.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self.close()

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            if os.getpid() != self._pid:
                raise Forked(f"this connection to {self.path} belongs to the parent process")
            raise Closed(f"the connection to {self.path} was closed")
        return self._socket

    def _finish(self) -> None:
        self._exchange.finish()
        if self._exchange.state is State.CLOSING:
            self.close()


class Connection(SocketOwner):
    """The blocking one."""

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
        remaining = deadline.check()
        head = self._exchange.start(request, deadline.header_ms)
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

    def receive_with_descriptors(self, deadline: Deadline) -> tuple[Answer, list[int]]:
        """Receives the whole answer, and the descriptors that may come with its first byte.

        They are the caller's. Raises ProtocolError where more came than may.
        """
        descriptors: list[int] = []
        try:
            head = self._receive_first(deadline, descriptors) or self.receive_head(deadline)
            answer = Answer(head, self.receive_body(deadline))
            taken, descriptors = descriptors, []
            return answer, taken
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive_first(self, deadline: Deadline, descriptors: list[int]) -> ResponseHead | None:
        """Receives the first bytes of an answer; descriptors come with no others."""
        try:
            sock = self._wait_at_most(deadline)
            data, control, flags, _ = sock.recvmsg(
                RECEIVE_BYTES, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            return self._exchange.feed_first(data, control, flags, descriptors)
        except OSError as error:
            raise self._broken(error, deadline) from error
        except BaseException:
            self.close()
            raise

    def receive_head(self, deadline: Deadline) -> ResponseHead:
        """Receives the head; the body has to be received next, even where it is empty."""
        try:
            while True:
                sock = self._wait_at_most(deadline)
                head = self._exchange.feed(sock.recv(RECEIVE_BYTES))
                if head is not None:
                    return head
        except OSError as error:
            raise self._broken(error, deadline) from error
        except BaseException:
            self.close()
            raise

    def receive_body(self, deadline: Deadline) -> bytes:
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
        self.receive_body_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def receive_body_into(self, view: memoryview, deadline: Deadline) -> None:
        """Receives the whole body into `view`, which is exactly as long.

        Raises ConnectionLost where it ends early: a short body is a failed read, never short data.
        """
        filled = self._exchange.start_body(view)
        try:
            while filled < len(view):
                with view[filled:] as rest:
                    count = self._wait_at_most(deadline).recv_into(rest)
                if not count:
                    raise self._exchange.short(filled)
                filled += count
        except OSError as error:
            raise self._broken(error, deadline) from error
        except BaseException:
            self.close()
            raise
        self._finish()

    def _wait_at_most(self, deadline: Deadline) -> socket.socket:
        sock = self._open_socket()
        remaining = deadline.with_grace().remaining
        if remaining <= 0:
            raise deadline.exceeded()
        sock.settimeout(remaining)
        return sock

    def _broken(self, error: OSError, deadline: Deadline) -> RacerError:
        """Closes the connection; returns what `error` is called from here on."""
        self.close()
        if isinstance(error, TimeoutError):
            return deadline.exceeded()
        return lost(self.path, f"broke: {error.strerror}")
