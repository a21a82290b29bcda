"""How much kernel memory the answers of one cache's connections may take up.

Layer: serve, loop thread. What was sent and not read yet lies in the kernel, charged to this
process's container: a large buffer makes a stream fast, and a thousand clients that ask and do not
read would make a thousand large buffers a gigabyte. So every connection starts with a small one,
and as many as fit into the total get a large one while they stream; the others are slower, no more.
"""

from __future__ import annotations

import socket

from racerd.serve.descriptors import queued_bytes
from racerd.units import KIB, MIB

# The kernel doubles what it is told, for its own overhead, and charges up to that.
_KERNEL_FACTOR = 2
SMALL_BYTES = 32 * KIB
LARGE_BYTES = 1 * MIB


class SendBuffers:
    """The buffers of one cache's connections; `total_bytes` bounds the large ones together."""

    def __init__(self, total_bytes: int) -> None:
        self._left = total_bytes // (_KERNEL_FACTOR * LARGE_BYTES)
        self._wanted = False  # Somebody streams without a large one.

    def start(self, sock: socket.socket) -> None:
        """Gives a new connection its small buffer."""
        _set(sock, SMALL_BYTES)

    def grow(self, sock: socket.socket) -> bool:
        """Gives `sock` a large buffer if there is one left; it has it until `give_back`."""
        if not self._left:
            self._wanted = True
            return False
        self._left -= 1
        _set(sock, LARGE_BYTES)
        return True

    def lend_on(self, sock: socket.socket) -> bool:
        """Between two answers: takes a large buffer back if others want one and it is empty."""
        if not self._wanted or queued_bytes(sock):
            return False
        _set(sock, SMALL_BYTES)
        self.give_back()
        return True

    def give_back(self) -> None:
        """A connection with a large buffer has none any more, or is about to be closed."""
        self._left += 1
        self._wanted = False


def _set(sock: socket.socket, size: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
