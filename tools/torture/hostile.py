"""A hostile client's connection: exactly the bytes and descriptors that it is told to send.

Blocking, with a limit on every wait. Imports nothing of racerd: an attacker has only the protocol.
"""

from __future__ import annotations

import array
import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 60.0
_FDS_MAX = 253  # The kernel takes no more in one message.


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0 is a connection that ended without an answer."""

    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def told(self) -> str:
        """The status and, of an error, its code: `200`, `422 target_unsealed`, `ended`."""
        if not self.status:
            return "ended"
        return f"{self.status} {self.fields.get('Racer-Error', '')}".strip()

    def json(self, name: str) -> object:
        return json.loads(self.body)[name]


ENDED = Answer(0, {}, b"")


class Connection:
    """One connection. A context manager."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_SECONDS)
        try:
            self._connect(os.fspath(path))
        except BaseException:
            self.sock.close()
            raise
        self._buffer = b""

    def _connect(self, path: str) -> None:
        """A full backlog refuses at once where there is a timeout: as others do, try again."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.sock.connect(path)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sock.close()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends all of `data`, with `fds` on its first byte. False where the daemon hung up."""
        try:
            if fds:
                rights = array.array("i", fds[:_FDS_MAX])
                sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                data = data[sent:]
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def ask(self, line: str, *fields: str, fds: Sequence[int] = ()) -> Answer:
        self.send(head(line, *fields), fds)
        return self.receive(to_head=line.startswith("HEAD "))

    def receive(self, *, to_head: bool = False) -> Answer:
        """One answer; `ENDED` where the connection ends before it is whole."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._more():
                return ENDED
        top, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = top.decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        length = 0 if to_head else int(fields["Content-Length"])
        while len(self._buffer) < length:
            if not self._more():
                return ENDED
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Answer(int(first.split(" ")[1]), fields, body)

    def receive_with_descriptors(self) -> tuple[Answer, list[int]]:
        """One answer, and the descriptors that came with its first bytes; they are the caller's."""
        fds: list[int] = []
        with suppress(ConnectionResetError):
            self._buffer, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 8)
        return self.receive() if self._buffer else ENDED, fds

    def ended(self) -> bool:
        """Waits for the daemon to hang up; False where it sends something instead."""
        return not self._buffer and not self._more()

    def _more(self) -> bool:
        data = b""
        with suppress(ConnectionResetError):
            data = self.sock.recv(1 << 16)
        self._buffer += data
        return bool(data)


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: racer", *fields, "", ""]).encode("latin-1")
