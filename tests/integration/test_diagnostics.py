"""The diagnostics server over real TCP."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
import uvloop

from racerd.errors import ConfigError
from racerd.serve.diagnostics import Answer, DiagnosticsServer, Page
from racerd.status import Status
from racerd.telemetry import Metrics


async def _ask(address: str, request: bytes) -> bytes:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def _broken() -> Answer:
    raise RuntimeError("secret detail")


def _pages() -> dict[str, Page]:
    metrics = Metrics()
    return {
        "/healthz": lambda: Answer.text("ok\n"),
        "/readyz": lambda: Answer.json({"ready": False, "waiting_for": ["store"]}, 503),
        "/metrics": lambda: Answer(200, *metrics.exposition()),
        "/broken": _broken,
    }


def _exchange(request: bytes) -> tuple[int, bytes]:
    async def main() -> bytes:
        async with DiagnosticsServer("127.0.0.1", 0, _pages()) as server:
            return await _ask(server.address, request)

    head, _, body = uvloop.run(main()).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_pages_answer() -> None:
    """R42: /healthz, /readyz and /metrics are there."""
    assert _exchange(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") == (200, b"ok\n")
    status, body = _exchange(b"GET /readyz?verbose HTTP/1.1\r\n\r\n")
    assert status == 503
    assert json.loads(body)["waiting_for"] == ["store"]


def test_the_list_of_pages_in_the_docs_is_complete() -> None:
    """R42: whoever looks for a page finds all there are in one place."""
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    for page in Status(Metrics()).pages():
        assert f"| `{page}` |" in text


def test_metrics_have_help_and_the_gpu_counters_though_zero() -> None:
    """R19: the cuFile page counters are present before any GPU was seen."""
    _, body = _exchange(b"GET /metrics HTTP/1.1\r\n\r\n")
    text = body.decode()
    assert "racer_cufile_pages_total 0.0" in text
    assert 'racer_gpu_host_path_pages_total{reason="gpu_off"} 0.0' in text
    assert "# HELP racer_rung_bytes_total" in text


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
        (b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_refusals(request_: bytes, status: int) -> None:
    got, body = _exchange(request_)
    assert got == status
    assert b"secret" not in body


def test_head_has_no_body() -> None:
    status, body = _exchange(b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"")


def test_a_silent_client_does_not_hold_the_server() -> None:
    """Leaving the server ends half-open exchanges at once."""

    async def main() -> None:
        async with DiagnosticsServer("127.0.0.1", 0, _pages()) as server:
            host, port = server.address.rsplit(":", 1)
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /healthz")
            await _ask(server.address, b"GET /healthz HTTP/1.1\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    uvloop.run(main())


def test_an_address_in_use_is_an_error_that_says_what_to_do() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match="--diagnostics HOST:PORT"):
                async with DiagnosticsServer("127.0.0.1", port, {}):
                    pass

    uvloop.run(main())
