"""A directory served over HTTP that counts what was asked of it: proof of what stayed away.

Ranges, strong ETags and If-Match as a well-behaved server has them; slow on demand by a gate, so
that tests can hold a transfer without sleeping.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote_to_bytes


class CountingOrigin:
    """`with CountingOrigin(folder) as origin:` serves `origin.url`, `origin.requests` counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self.ranges: Counter[tuple[str, str]] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.broken = False
        self._lock = threading.Lock()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                origin._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Quiet: the counters say what came."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._server.block_on_close = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def etag(self, data: bytes) -> str:
        return f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        with self._lock:
            self.requests[request.command] += 1
            self.ranges[(request.path, request.headers.get("Range", ""))] += 1
        if request.command == "GET" and not self.gate.is_set():
            self.waiting.release()
            self.gate.wait(30)
        name = unquote_to_bytes(request.path.lstrip("/")).decode()
        path = self.folder / name
        if self.broken:
            self._send(request, 503, b"", {})
        elif not path.is_file():
            self._send(request, 404, b"", {})
        else:
            self._send_object(request, path.read_bytes())

    def _send_object(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        fields = {
            "ETag": self.etag(data),
            "Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        wanted = request.headers.get("If-Match")
        if wanted is not None and wanted != fields["ETag"]:
            self._send(request, 412, b"", fields)
            return
        span = request.headers.get("Range")
        if span is None:
            self._send(request, 200, data, fields)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(request, 206, data[start:stop], fields)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, body: bytes, fields: dict[str, str]
    ) -> None:
        try:
            request.send_response(status)
            for name, value in fields.items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(body)))
            request.send_header("Connection", "close")
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(body)
        except ConnectionError:
            request.close_connection = True  # The daemon gave the transfer up; that is its right.

    def __enter__(self) -> CountingOrigin:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
