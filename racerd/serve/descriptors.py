"""Descriptors that clients send: received, owned, closed once; and the way back.

Layer: serve, loop thread. A received descriptor is never wrapped in a file object and never handed
to the event loop: whoever holds the `ReceivedDescriptor` is the only one that closes the number,
so that it cannot be closed twice and take somebody else's with it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from racerd.wire.descriptors import DESCRIPTORS_PER_HEAD_MAX

RECEIVE_BYTES = 16_384

_INT_BYTES = struct.calcsize("i")
# Room for the cap and no more: the kernel closes what does not fit and says MSG_CTRUNC.
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_PER_HEAD_MAX * _INT_BYTES)


class ReceivedDescriptor:
    """One descriptor from a peer. Closing twice is harmless; not closing is a ResourceWarning."""

    __slots__ = ("_fd", "_used")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._used = False

    def fileno(self) -> int:
        """The descriptor's number. Raises ValueError once it is closed."""
        if self._fd < 0:
            raise ValueError("the descriptor is closed")
        return self._fd

    def take(self) -> ReceivedDescriptor:
        """Moves the descriptor to a new owner; closing this one is harmless from now on."""
        taken = ReceivedDescriptor(self.fileno())
        self._fd = -1
        return taken

    def detach(self) -> int:
        """The bare descriptor, for an owner who does not know this class."""
        fd = self.fileno()
        self._fd = -1
        return fd

    def duplicate(self) -> ReceivedDescriptor:
        """Another descriptor of the same memory, with an owner of its own."""
        self._used = True
        return ReceivedDescriptor(fcntl.fcntl(self.fileno(), fcntl.F_DUPFD_CLOEXEC, 0))

    def close(self) -> bool:
        """Closes the descriptor. Returns whether nobody had taken or used it."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return False
        os.close(fd)
        return not self._used

    def __enter__(self) -> ReceivedDescriptor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            warnings.warn("a received descriptor was not closed", ResourceWarning, stacklevel=2)
            self.close()


@dataclass(frozen=True, slots=True)
class Received:
    """One receive. `data` is empty at the end of the stream."""

    data: bytes
    descriptors: list[ReceivedDescriptor]
    truncated: bool


def receive(sock: socket.socket) -> Received:
    """Takes one chunk off a non-blocking Unix stream socket, with its descriptors.

    Raises BlockingIOError where there is none, OSError where the connection is broken.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    if not ancillary:
        return Received(data, [], bool(flags & socket.MSG_CTRUNC))
    return Received(data, _unpack(ancillary), bool(flags & socket.MSG_CTRUNC))


def control_message(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """What `sendmsg` takes beside the bytes that `descriptors` go with."""
    if not descriptors:
        return []
    rights = struct.pack(f"{len(descriptors)}i", *descriptors)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]


class DescriptorsUnderway:
    """How many descriptors were sent to clients and perhaps not received yet.

    The kernel counts them together against this process's limit of open files, and beyond it
    refuses everybody's. One connection has at most one answer with descriptors underway; `limit`
    bounds what all of them have, but for the first descriptor of an answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    @property
    def room(self) -> int:
        return max(0, self._limit - self._count)

    def sent(self, count: int) -> None:
        self._count += count

    def received(self, count: int) -> None:
        """They were taken, or nobody will take them any more."""
        self._count -= count


def queued_bytes(sock: socket.socket) -> int:
    """What the peer has not taken yet of all that was sent, in kernel memory."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT_BYTES)))[0])


def _unpack(ancillary: Iterable[tuple[int, int, bytes]]) -> list[ReceivedDescriptor]:
    found: list[ReceivedDescriptor] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // _INT_BYTES
            numbers = struct.unpack(f"{count}i", data[: count * _INT_BYTES])
            found.extend(map(ReceivedDescriptor, numbers))
    return found
