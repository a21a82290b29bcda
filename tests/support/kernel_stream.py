"""A Unix stream as the kernel keeps it: chunks of bytes, some with descriptors.

A read takes bytes of one chunk after the other and stops behind the first that carried
descriptors; they come with the first bytes that are read of it, however few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


class KernelStream:
    """What was sent and not received yet. `send` is one `sendmsg`."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[bytes, list[int]]] = deque()

    def send(self, data: bytes, tokens: Sequence[int] = ()) -> None:
        if data:
            self._chunks.append((data, list(tokens)))

    def receive(self, size: int) -> tuple[bytes, list[int]]:
        """One `recvmsg` into `size` bytes; (b"", []) when nothing is there."""
        data = b""
        while self._chunks and len(data) < size:
            chunk, tokens = self._chunks.popleft()
            room = size - len(data)
            data += chunk[:room]
            if chunk[room:]:
                self._chunks.appendleft((chunk[room:], []))
            if tokens:
                return data, tokens
        return data, []

    def drain(self, sizes: Iterator[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Receives until nothing is left, with the sizes of `sizes`."""
        while self._chunks:
            yield self.receive(next(sizes))
