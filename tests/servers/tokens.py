"""Fakes of the platforms' identity services: each path has an answer, each request is kept."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class TokenServer:
    """`with TokenServer({"/path": answer}) as server:` answers JSON, or text as it is."""

    def __init__(self, answers: Mapping[str, Any], tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length).decode()
                fields = {name.lower(): value for name, value in self.headers.items()}
                server.requests.append((self.command, self.path, fields, body))
                answer = answers.get(self.path.partition("?")[0])
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_PUT = do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.address = f"127.0.0.1:{self._http.server_port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self) -> TokenServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
