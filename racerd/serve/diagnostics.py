"""Diagnostics over HTTP: health, readiness, metrics and what is in flight.

Layer: serve. Runs on the loop thread. A page is a function that returns an `Answer`; the server
knows no page by name. Read-only, GET and HEAD, one exchange per connection; bounded in head size,
time and connections, so that a scraper that hangs costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any

from racerd.errors import ConfigError

_LOG = logging.getLogger(__name__)
_HEAD_BYTES_MAX = 8192
_EXCHANGE_SECONDS_MAX = 10.0
_CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """One page. `body` is sent as it is."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, text: str, status: int = 200) -> Answer:
        return cls(status, text.encode())

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        body = json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
        return cls(status, body, "application/json")


Page = Callable[[], Answer]


class DiagnosticsServer:
    """Serves `pages` (path to page) on a TCP address. An async context manager."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.host = host
        self.port = port
        self.pages = dict(pages)
        self._server: asyncio.Server | None = None
        self._exchanges: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """`host:port` that is really listened on (port 0 asks the kernel for one)."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def __aenter__(self) -> DiagnosticsServer:
        try:
            self._server = await asyncio.start_server(
                self._connected, self.host, self.port, limit=_HEAD_BYTES_MAX
            )
        except OSError as error:
            raise ConfigError(
                [
                    f"diagnostics: cannot listen on {self.host}:{self.port}:"
                    f" {error.strerror or error}; choose another"
                    " address with --diagnostics HOST:PORT, or --diagnostics off"
                ]
            ) from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._exchanges:
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._exchanges.add(task)
        try:
            if len(self._exchanges) <= _CONNECTIONS_MAX:
                async with asyncio.timeout(_EXCHANGE_SECONDS_MAX):
                    await self._exchange(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            _LOG.debug("diagnostics client went away: %r", error)
        except asyncio.CancelledError:
            _LOG.debug("diagnostics exchange ended by shutdown")
        finally:
            self._exchanges.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            self._write(
                writer, Answer.text("the request head is too large\n", 431), head_only=False
            )
            return
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.rpartition(" ")[0].partition("?")[0]
        self._write(writer, self._answer(method, path), head_only=method == "HEAD")
        await writer.drain()

    def _answer(self, method: str, path: str) -> Answer:
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD\n", fields={"Allow": "GET, HEAD"})
        page = self.pages.get(path)
        if page is None:
            known = "".join(f"{name}\n" for name in sorted(self.pages))
            return Answer.text(known, 200 if path == "/" else 404)
        try:
            return page()
        except Exception:  # noqa: BLE001  one page's defect must not take the others along
            _LOG.exception("the diagnostics page %s failed", path)
            return Answer.text("this page failed; the log has the trace\n", 500)

    @staticmethod
    def _write(writer: asyncio.StreamWriter, answer: Answer, *, head_only: bool) -> None:
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        fields = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "Connection": "close",
            "Cache-Control": "no-store",
            **answer.fields,
        }
        lines += [f"{name}: {value}" for name, value in fields.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if not head_only:
            writer.write(answer.body)
