"""A blocking HTTP/1.1 client for origin threads: pooled, cancellable, and honest about failures.

Layer: origin. Built on `http.client`, which shows what object-store libraries hide (status,
Content-Range, Content-Encoding, Retry-After), sends request targets exactly as given, and fills
memory of ours without a copy; measured against obstore it is as fast (docs/origins.md).

- Time: one socket read may take `idle_timeout_seconds`; there is no total time-out but the
  deadline. A body that crawls below a floor is given up too (`Pace`).
- Cancelling shuts the socket down, which wakes a thread that waits in the kernel.
- Failures are `Transient` with the stage that failed: dns, connect, tls, idle, reset, short_body.
- A connection goes back to the pool only after its response was read to the end.

Thread-safe; a connection is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from racerd.origin.call import Call
from racerd.origin.failures import Transient, broken_protocol, unavailable

_IDLE_CONNECTIONS_MAX = 32
_IDLE_SECONDS_MAX = 30.0
_DRAIN_BYTES_MAX = 64 * 1024
_READ_BYTES = 64 * 1024  # Taken at first for a body of unknown length; doubled as it fills up.
_PACE_WINDOW_SECONDS = 30.0
_WAKE_BYTES = 1 << 20  # A thread that waits for a body is woken for so many bytes.


@dataclass(frozen=True, slots=True)
class Address:
    """Where a connection goes. Equal addresses may share connections."""

    scheme: str
    host: str
    port: int

    @property
    def text(self) -> str:
        """For messages: `https://host:port`, the default port left out."""
        return f"{self.scheme}://{self.host_field}"

    @property
    def host_field(self) -> str:
        """What the Host field says: the default port is left out."""
        default = {"http": 80, "https": 443}[self.scheme]
        return self._host if self.port == default else self.authority

    @property
    def authority(self) -> str:
        """`host:port`, always with the port."""
        return f"{self._host}:{self.port}"

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `target` is the path and query as they go on the wire, ASCII."""

    method: str
    address: Address
    target: str
    fields: Mapping[str, str] = field(default_factory=dict)


def split_url(url: str) -> tuple[Address, str]:
    """Returns the address and the request target of an http(s) URL. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http:// or https:// URL with a host")
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme, parts.hostname, port), target


class Pace:
    """Gives up on a body that flows, but so slowly that it will never be of use (F58)."""

    def __init__(self, bytes_per_second_min: int) -> None:
        self._floor = bytes_per_second_min
        self._since = time.monotonic()
        self._bytes = 0

    def add(self, count: int) -> bool:
        """Counts received bytes; returns False once a whole window was below the floor."""
        self._bytes += count
        elapsed = time.monotonic() - self._since
        if elapsed < _PACE_WINDOW_SECONDS:
            return True
        steady = self._bytes >= self._floor * elapsed
        self._since, self._bytes = time.monotonic(), 0
        return steady


class Response:
    """A response whose head was read. Valid inside `HttpClient.exchange` only."""

    def __init__(self, raw: http.client.HTTPResponse, connection: _Connection, call: Call) -> None:
        self._raw = raw
        self._connection = connection
        self._call = call
        self._buffer_is_empty = False
        self.status = raw.status

    def field(self, name: str) -> str | None:
        """The value of a field, or None. Repeated fields are joined by commas."""
        return self._raw.getheader(name)

    @property
    def content_length(self) -> int | None:
        """What the head says of the body's length (also for HEAD), None where it does not."""
        text = self.field("Content-Length")
        return int(text) if text is not None and text.isascii() and text.isdigit() else None

    def receive_into(self, buffer: memoryview) -> int:
        """Reads some bytes, at most `len(buffer)`; 0 at the end of the body.

        Raises Transient `idle`, `reset` or `short_body`, and what `Call.check` raises.
        """
        self._call.check()
        with self._connection.failures(self._call):
            count = self._receive(buffer)
        if count == 0 and self._raw.length:
            raise Transient(
                "short_body", unavailable("the body ended early", self._connection.address.text)
            )
        return count

    def _receive(self, buffer: memoryview) -> int:
        raw, connection = self._raw, self._connection
        if raw.chunked or raw.length is None:
            connection.set_timeout(self._call)
            data = raw.read1(len(buffer))
            buffer[: len(data)] = data
            return len(data)
        wanted = min(len(buffer), raw.length)
        if wanted == 0:
            return 0
        if self._buffer_is_empty:
            count = connection.receive(buffer[:wanted], self._call, body_bytes=raw.length)
        else:
            # What came behind the head first; then at most one system call, straight into the
            # caller's memory. HTTPResponse.readinto would loop until it is full and hide the pace.
            connection.set_timeout(self._call)
            count = raw.fp.readinto1(buffer[:wanted])
            self._buffer_is_empty = wanted > io.DEFAULT_BUFFER_SIZE
        raw.length -= count
        return count

    def read(self, bytes_max: int) -> bytes:
        """Returns the whole body if it is not longer than `bytes_max`, else its head."""
        buffer = bytearray(min(bytes_max, _READ_BYTES))
        filled = 0
        while True:
            if filled == len(buffer):
                if filled == bytes_max:
                    break
                buffer.extend(bytes(min(filled, bytes_max - filled)))
            with memoryview(buffer)[filled:] as room:
                count = self.receive_into(room)
            if not count:
                break
            filled += count
        return bytes(memoryview(buffer)[:filled])

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request: all was read, both sides agree."""
        return not self._raw.will_close and (self._raw.length == 0 or self._raw.isclosed())

    def close(self) -> None:
        self._raw.close()

    def finish(self) -> bool:
        """Reads what little is left and ends the response; returns `reusable`."""
        if 0 < (self._raw.length or 0) <= _DRAIN_BYTES_MAX:
            self.read(_DRAIN_BYTES_MAX)
        reusable = self.reusable
        self._raw.close()
        return reusable


class _Connection:
    """One connection. Owned by one thread while in use; closed exactly once."""

    def __init__(self, address: Address, client: HttpClient, call: Call) -> None:
        self.address = address
        self.idle_since = 0.0
        self._timeout_seconds: float | None = None  # None: blocking, the kernel keeps the time.
        self._kernel_seconds: float | None = None
        self._wake_bytes = 1
        self._client = client
        self._http = http.client.HTTPConnection(address.host, address.port)
        self._socket = self._connect(call)
        self._http.sock = self._socket

    def _connect(self, call: Call) -> socket.socket:
        proxy = self._client.proxy_for(self.address)
        where = proxy or self.address
        sock = self._dial(where, call)
        try:
            with call.cancel.on_cancel(lambda: _shut(sock)):
                if proxy and self.address.scheme == "https":
                    self._open_tunnel(sock, proxy, call)
                if self.address.scheme == "https":
                    # Handshaking later keeps `sock` the one that cancelling shuts.
                    sock = self._client.tls.wrap_socket(
                        sock, server_hostname=self.address.host, do_handshake_on_connect=False
                    )
                    self._handshake(sock, call)
        except BaseException:
            sock.close()
            raise
        return sock

    def _dial(self, where: Address, call: Call) -> socket.socket:
        call.check()
        try:
            found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Transient(
                "dns",
                unavailable(
                    f"{where.host} cannot be resolved ({error.strerror or error})",
                    self.address.text,
                    hint="check the name, and the DNS settings of this node or pod",
                ),
            ) from error
        problem = OSError("no address")
        for family, kind, protocol, _, sockaddr in found:
            sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                sock.settimeout(self._seconds(call, self._client.connect_timeout_seconds))
                with call.cancel.on_cancel(partial(_shut, sock)):
                    sock.connect(sockaddr)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError as error:
                sock.close()
                call.check()
                problem = error
        raise Transient(
            "connect",
            unavailable(
                f"connecting to {where.host} port {where.port} failed ({_why(problem)})",
                self.address.text,
                hint="check that the origin is up and that a firewall or network policy allows it",
            ),
        ) from problem

    def _handshake(self, sock: ssl.SSLSocket, call: Call) -> None:
        sock.settimeout(self._seconds(call, self._client.connect_timeout_seconds))
        try:
            sock.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise unavailable(
                f"its TLS certificate is not trusted ({error.verify_message})",
                self.address.text,
                hint="set the cache's `ca_bundle` to the private CA;"
                f" now in use: {self._client.ca_text}",
            ) from error
        except OSError as error:
            call.check()
            raise Transient(
                "tls", unavailable(f"the TLS handshake failed ({_why(error)})", self.address.text)
            ) from error

    def _open_tunnel(self, sock: socket.socket, proxy: Address, call: Call) -> None:
        sock.settimeout(self._seconds(call, self._client.connect_timeout_seconds))
        host = self.address.authority
        try:
            sock.sendall(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("ascii"))
            answer = http.client.HTTPResponse(sock, method="CONNECT")
            answer.begin()
            answer.close()
        except (OSError, http.client.HTTPException) as error:
            call.check()
            raise Transient(
                "connect", unavailable(f"the proxy {proxy.text} failed", self.address.text)
            ) from error
        if answer.status != 200:
            raise unavailable(
                f"the proxy {proxy.text} refused with status {answer.status}",
                self.address.text,
                hint="check HTTPS_PROXY and NO_PROXY of the daemon",
            )

    def _seconds(self, call: Call, limit: float) -> float:
        return max(0.001, min(limit, call.deadline.remaining_seconds()))

    def set_timeout(self, call: Call) -> None:
        """The next socket operation ends by the idle time-out or the deadline, what is first."""
        self._set_timeout(self._seconds(call, self._client.idle_timeout_seconds))

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._timeout_seconds:  # Setting it is a system call.
            self._socket.settimeout(seconds)
            self._timeout_seconds = seconds

    def receive(self, buffer: memoryview, call: Call, *, body_bytes: int) -> int:
        """Fills `buffer`, or most of it, unless the stream, the idle time-out or the deadline ends
        before. `body_bytes`: what is left of the body, `buffer` included.

        Returns what came; raises TimeoutError if nothing did. In as little of the interpreter as
        can be: after each call into the kernel a thread has to get its lock again.
        """
        seconds = self._seconds(call, self._client.idle_timeout_seconds)
        if isinstance(self._socket, ssl.SSLSocket):
            return self._receive_records(buffer, seconds)
        # Data below the mark wakes nobody: the mark is not for the last bytes of a body.
        marked = min(len(buffer), body_bytes - _WAKE_BYTES)
        self._set_wake_bytes(_WAKE_BYTES if marked > 0 else 1)
        return self._receive_whole(buffer[:marked] if marked > 0 else buffer, seconds)

    def _set_wake_bytes(self, count: int) -> None:
        """From how many bytes on the kernel says that there is something to receive.

        By default each segment wakes the thread that waits for it: at 2 GB/s that takes a quarter
        of the time of receiving. The kernel keeps the mark below what its buffer holds, and a
        stream that ends, breaks or runs into a time-out wakes in any case.
        """
        if count != self._wake_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count

    def _receive_whole(self, buffer: memoryview, seconds: float) -> int:
        """One system call. The socket is in blocking mode meanwhile, and the kernel keeps the
        time: MSG_WAITALL needs that."""
        if self._timeout_seconds is not None:
            self._socket.settimeout(None)
            self._timeout_seconds = None
        if seconds != self._kernel_seconds:
            whole, fraction = divmod(seconds, 1.0)
            timeval = struct.pack("ll", int(whole), int(fraction * 1_000_000) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._kernel_seconds = seconds
        try:
            return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None

    def _receive_records(self, buffer: memoryview, seconds: float) -> int:
        """TLS gives a record of at most 16 KiB at a time."""
        self._set_timeout(seconds)
        stop_at = time.monotonic() + seconds
        receive, filled = self._socket.recv_into, 0
        while filled < len(buffer) and time.monotonic() < stop_at:
            try:
                count = receive(buffer[filled:])
            except TimeoutError:
                if filled:
                    break
                raise
            if count == 0:
                break
            filled += count
        return filled

    def send(self, request: Request, call: Call) -> Response:
        """Sends a request without body and reads the response's head."""
        self.set_timeout(call)
        target = request.target
        if request.address.scheme == "http" and self._client.proxy_for(request.address):
            target = request.address.text + target
        with self.failures(call):
            connection = self._http
            connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", request.address.host_field)
            for name, value in request.fields.items():
                connection.putheader(name, value)
            connection.endheaders()
            return Response(connection.getresponse(), self, call)

    @contextlib.contextmanager
    def failures(self, call: Call) -> Iterator[None]:
        """Translates what a socket and http.client raise, once."""
        where = self.address.text
        try:
            yield
        except TimeoutError as error:
            call.check()
            seconds = self._client.idle_timeout_seconds
            raise Transient("idle", unavailable(f"no byte for {seconds:g} s", where)) from error
        except (OSError, http.client.RemoteDisconnected) as error:
            call.check()  # A cancelled call closed the socket itself.
            raise Transient(
                "reset", unavailable(f"the connection broke ({_why(error)})", where)
            ) from error
        except (http.client.IncompleteRead, http.client.BadStatusLine) as error:
            call.check()
            raise Transient("short_body", unavailable("the answer is cut off", where)) from error
        except (http.client.HTTPException, ValueError) as error:
            call.check()
            raise broken_protocol(f"malformed HTTP ({type(error).__name__})", where) from error

    def broken(self) -> bool:
        """Whether the server closed an idle connection, or sent what nobody asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0)) or time.monotonic() - self.idle_since > _IDLE_SECONDS_MAX

    def shut(self) -> None:
        """Wakes the thread that reads or writes here; the connection is then of no use."""
        _shut(self._socket)

    def close(self) -> None:
        self._http.close()


class HttpClient:
    """Connections to the hosts of one origin. Close it after the last call ended."""

    def __init__(
        self,
        *,
        ca_bundle: str | None = None,
        connect_timeout_seconds: float = 5.0,
        idle_timeout_seconds: float = 20.0,
    ) -> None:
        self.tls = ssl.create_default_context()
        if ca_bundle is not None:
            self.tls.load_verify_locations(cafile=ca_bundle)
        self.ca_text = f"the system's CAs{f' and {ca_bundle}' if ca_bundle else ''}"
        self.connect_timeout_seconds = connect_timeout_seconds
        self.idle_timeout_seconds = idle_timeout_seconds
        self._proxies = urllib.request.getproxies()
        self._idle: defaultdict[Address, list[_Connection]] = defaultdict(list)
        self._lock = threading.Lock()

    def proxy_for(self, address: Address) -> Address | None:
        """The proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for `address`, if any."""
        url = self._proxies.get(address.scheme)
        if url is None or urllib.request.proxy_bypass(f"{address.host}:{address.port}"):
            return None
        return split_url(url if "://" in url else f"http://{url}")[0]

    @contextlib.contextmanager
    def exchange(self, request: Request, call: Call) -> Iterator[Response]:
        """Sends `request` and yields the response; redirects are left to the caller."""
        call.check()
        connection = self._take(request.address) or _Connection(request.address, self, call)
        keep = False
        try:
            with call.cancel.on_cancel(connection.shut):
                response = connection.send(request, call)
                try:
                    yield response
                    keep = response.finish()
                finally:
                    response.close()
        finally:
            if keep and not call.cancel.cancelled:
                self._give(connection)
            else:
                connection.close()

    def _take(self, address: Address) -> _Connection | None:
        while True:
            with self._lock:
                idle = self._idle[address]
                connection = idle.pop() if idle else None
            if connection is None or not connection.broken():
                return connection
            connection.close()

    def _give(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            idle = self._idle[connection.address]
            idle.append(connection)
            surplus = idle.pop(0) if len(idle) > _IDLE_CONNECTIONS_MAX else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        with self._lock:
            connections = [c for idle in self._idle.values() for c in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()


def _shut(sock: socket.socket) -> None:
    # The base class's shutdown: that of SSLSocket would also take the TLS layer away, and a thread
    # that reads at this moment would go on with ciphertext.
    with contextlib.suppress(OSError):  # It may be unconnected, or closed by the other side.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _why(error: Exception) -> str:
    """A few words for people, without addresses or payload."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
