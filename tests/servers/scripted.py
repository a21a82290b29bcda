"""An origin that misbehaves on demand: one object over HTTP/1.1, each request answered by script.

Knows nothing of names and signatures, so that plain HTTP, S3, GCS and Azure clients can all be
pointed at it. Requests that no act is queued for are answered well.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

LAST_MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"
REASONS = {200: "OK", 206: "Partial Content"}


@dataclass(frozen=True)
class Seen:
    """A request as it came. Field names are in lower case."""

    method: str
    target: str
    fields: dict[str, str]

    @property
    def span(self) -> tuple[int, int] | None:
        """The range asked for, half-open."""
        text = self.fields.get("range")
        if text is None:
            return None
        first, last = text.removeprefix("bytes=").split("-")
        return int(first), int(last) + 1


@dataclass
class Answer:
    """What goes out. `head` and `body` are written as they are; then the connection may end."""

    status: int
    fields: dict[str, str]
    body: bytes = b""
    # After so many bytes of the body: "close" (FIN), "reset" (RST), "stall" (nothing more).
    stop_after: int | None = None
    then: str = "close"
    # Bytes at a time, and a pause of so many seconds after each.
    drip: tuple[int, float] | None = None

    def without(self, *names: str) -> Answer:
        for name in names:
            self.fields.pop(name, None)
        return self


Act = Callable[["ScriptedServer", Seen], Answer]


@dataclass
class ScriptedServer:
    """`with ScriptedServer(data) as server:` serves at `server.url`."""

    data: bytes
    etag: str = '"v1"'
    tls: ssl.SSLContext | None = None
    requests: list[Seen] = field(default_factory=list)
    acts: deque[Act] = field(default_factory=deque)
    connections: int = 0

    def __enter__(self) -> ScriptedServer:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.stalled = threading.Event()  # Set when an answer stalls.
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        scheme = "http" if self.tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="scripted-accept")
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def release(self) -> None:
        """Ends answers that stall or drip."""
        self._released.set()

    def do(self, *acts: Act) -> None:
        """Queues answers for the next requests, in order."""
        self.acts.extend(acts)

    def well(self, seen: Seen) -> Answer:
        """The right answer to `seen`."""
        size = len(self.data)
        fields = {"ETag": self.etag, "Last-Modified": LAST_MODIFIED, "x-goog-generation": "1"}
        wanted = seen.fields.get("if-match")
        if wanted is not None and wanted != self.etag:
            return Answer(412, {"Content-Length": "0"})
        if seen.span is None:
            return Answer(200, {**fields, "Content-Length": str(size)}, self.data)
        start, stop = seen.span
        if start >= size:
            return Answer(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
        stop = min(stop, size)
        fields |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        fields |= {"Content-Length": str(stop - start)}
        return Answer(206, fields, self.data[start:stop])

    # --- the wire ---------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), name="scripted")
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self.tls is not None:
                plain = connection
                connection = self.tls.wrap_socket(plain, server_side=True)
                with self._lock:
                    self._open = self._open - {plain} | {connection}
            with connection.makefile("rb") as lines:
                while (seen := _read(lines)) is not None:
                    with self._lock:
                        self.requests.append(seen)
                        act = self.acts.popleft() if self.acts else None
                    answer = act(self, seen) if act else self.well(seen)
                    if not self._send(connection, seen, answer):
                        return
        except OSError:
            return  # The client went away.
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _send(self, connection: socket.socket, seen: Seen, answer: Answer) -> bool:
        """Returns whether the connection goes on."""
        lines = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in answer.fields.items()]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        if seen.method == "HEAD":
            return True
        body = answer.body[: answer.stop_after]
        if answer.drip is None:
            connection.sendall(body)
        else:
            step, pause = answer.drip
            for at in range(0, len(body), step):
                connection.sendall(body[at : at + step])
                if self._released.wait(pause):
                    return False
        if answer.stop_after is None:
            return "Content-Length" in answer.fields
        if answer.then == "stall":
            self.stalled.set()
            self._released.wait()
        elif answer.then == "reset":
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return False


def _read(lines: object) -> Seen | None:
    line = lines.readline()  # type: ignore[attr-defined]
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    fields = {}
    while (line := lines.readline().strip()) != b"":  # type: ignore[attr-defined]
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.lower()] = value.strip()
    return Seen(method, target, fields)


# --- acts: what can go wrong ----------------------------------------------------------------


def well(server: ScriptedServer, seen: Seen) -> Answer:
    return server.well(seen)


def status(code: int, **fields: str) -> Act:
    """An error with a short body. Underscores in names of fields are dashes."""
    given = {name.replace("_", "-"): value for name, value in fields.items()}
    return lambda server, seen: Answer(code, {"Content-Length": "4", **given}, b"oops")


def cut(after: int, then: str = "close") -> Act:
    """The right head, and only the first bytes of the body."""

    def act(server: ScriptedServer, seen: Seen) -> Answer:
        answer = server.well(seen)
        answer.stop_after, answer.then = after, then
        return answer

    return act


def changed(**fields: str | None) -> Act:
    """The right answer with other fields (None: without), underscores for dashes."""

    def act(server: ScriptedServer, seen: Seen) -> Answer:
        answer = server.well(seen)
        for name, value in fields.items():
            name = name.replace("_", "-")
            if value is None:
                answer.fields.pop(name, None)
            else:
                answer.fields[name] = value
        return answer

    return act


def whole(server: ScriptedServer, seen: Seen) -> Answer:
    """200 and everything, whatever range was asked for."""
    return server.well(Seen(seen.method, seen.target, {}))


def shifted(by: int) -> Act:
    """206 of another range than was asked for, honestly labelled."""

    def act(server: ScriptedServer, seen: Seen) -> Answer:
        assert seen.span is not None
        first, stop = seen.span
        moved = {**seen.fields, "range": f"bytes={first + by}-{stop + by - 1}"}
        return server.well(Seen(seen.method, seen.target, moved))

    return act


def shortened(to: int) -> Act:
    """206 of the first `to` bytes of the range, honestly labelled."""

    def act(server: ScriptedServer, seen: Seen) -> Answer:
        assert seen.span is not None
        first, stop = seen.span
        less = {**seen.fields, "range": f"bytes={first}-{min(stop, first + to) - 1}"}
        return server.well(Seen(seen.method, seen.target, less))

    return act


def dripped(step: int, pause: float) -> Act:
    """The right answer, `step` bytes at a time."""

    def act(server: ScriptedServer, seen: Seen) -> Answer:
        answer = server.well(seen)
        answer.drip = (step, pause)
        return answer

    return act
