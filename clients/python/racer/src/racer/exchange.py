"""The client's half of one connection: one exchange after the other.

Layer: sans-IO, on `wire`; the blocking and the asyncio connection drive it.

    IDLE --start--> ASKED --feed … head--> BODY --finish--> IDLE, or CLOSING where the head said so

Whoever drives it closes the connection on any error and asks nothing of it any more.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from racer.errors import ConnectionLost, MemoryUnavailable, ProtocolError
from racer.wire import BODY_BYTES_MAX, HeadReader, Request, ResponseHead

RECEIVE_BYTES = 64 << 10


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


DESCRIPTORS_MAX = 16  # With one answer.
RIGHTS_BYTES = socket.CMSG_SPACE((DESCRIPTORS_MAX + 1) * array.array("i").itemsize)


def taken(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that a control message brought; they are the caller's to close."""
    found = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


class State(Enum):
    IDLE = "idle"
    ASKED = "asked"
    BODY = "body"
    CLOSING = "closing"


class Exchange:
    """State of the connection to `path`, which is for messages only."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.state = State.IDLE
        self.body_left = 0
        self._reader = HeadReader()
        self._closes = False

    def start(self, request: Request, deadline_ms: int) -> memoryview:
        """Begins an exchange; returns the head to send."""
        assert self.state is State.IDLE, "the last exchange is not over"
        head = memoryview(request.encode(deadline_ms))
        self._reader = HeadReader(to_head=request.method == "HEAD")
        self.state = State.ASKED
        return head

    def feed(self, data: bytes) -> ResponseHead | None:
        """Takes what was received, b"" for the end; returns the head once it is whole."""
        assert self.state is State.ASKED, "nothing was asked"
        if not data:
            where = "in its head" if self._reader.started else "before it was answered"
            raise lost(self.path, f"ended {where}")
        head = self._reader.feed(data)
        if head is not None:
            self.state = State.BODY
            self.body_left = head.content_length
            self._closes = head.closes
        return head

    def feed_first(
        self,
        data: bytes,
        control: Sequence[tuple[int, int, bytes]],
        flags: int,
        descriptors: list[int],
    ) -> ResponseHead | None:
        """As `feed`, for what `recvmsg` gave first; adds its descriptors.

        They are the caller's also where this raises.
        """
        descriptors += taken(control)
        if len(descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"an answer came with more than {DESCRIPTORS_MAX} descriptors")
        if flags & socket.MSG_CTRUNC:
            raise MemoryUnavailable(
                "the descriptors of an answer could not be taken",
                hint="this process is at its limit of open files (ulimit -n)",
            )
        return self.feed(data)

    def whole_body(self) -> bytes | None:
        """The body where it came with the head; None where there is more to receive.

        Raises ProtocolError where it is too large to be kept whole.
        """
        assert self.state is State.BODY
        if self.body_left > BODY_BYTES_MAX:
            raise ProtocolError(f"an answer with a body of {self.body_left:,} bytes")
        rest = self._reader.rest
        return rest if len(rest) == self.body_left else None

    def start_body(self, view: memoryview) -> int:
        """Puts what came with the head into `view`, as long as the body; returns how much."""
        assert self.state is State.BODY and len(view) == self.body_left
        rest = self._reader.rest
        view[: len(rest)] = rest
        return len(rest)

    def short(self, filled: int) -> ConnectionLost:
        """The error for a body that ended early: a failed read, never short data."""
        return lost(self.path, f"ended after {filled:,} of {self.body_left:,} bytes")

    def finish(self) -> None:
        """The body was received."""
        assert self.state is State.BODY
        self.body_left = 0
        self.state = State.CLOSING if self._closes else State.IDLE
