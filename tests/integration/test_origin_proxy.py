"""Origins behind a forward proxy: HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as everybody has them."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from racerd.config.origin_options import OriginOptions
from racerd.errors import RacerError
from racerd.ids import ObjectId
from racerd.origin.factory import make_origin
from racerd.origin.protocol import CancelToken
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics
from tests.servers.certificates import make_certificates
from tests.servers.scripted import ScriptedServer

DATA = bytes(range(256)) * 100
OBJECT = ObjectId("cache", "bucket", b"key")


class Tunnels:
    """A proxy that knows CONNECT only, and answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[str] = []
        self._status = status
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Tunnels:
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            target = head.split(b" ")[1].decode()
            self.asked.append(target)
            client.sendall(f"HTTP/1.1 {self._status} Whatever\r\n\r\n".encode())
            if self._status != 200:
                return
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=_pump, args=(server, client))
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def read(url: str, options: OriginOptions = OriginOptions()) -> bytes:  # noqa: B008  a value
    origin = make_origin(url, options, cache="cache", metrics=Metrics())
    try:
        version = origin.head(OBJECT, deadline=Deadline.after(30))
        return bytes(
            origin.fetch(version, 0, len(DATA), deadline=Deadline.after(30), cancel=CancelToken())
        )
    finally:
        origin.close()


def test_plain_http_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: the proxy is asked for the whole URL; names need not resolve here."""
    with ScriptedServer(DATA) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert read("http://models.invalid/base") == DATA
        assert {seen.target for seen in proxy.requests} == {"http://models.invalid/base/bucket/key"}
        assert {seen.fields["host"] for seen in proxy.requests} == {"models.invalid"}


def test_no_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(DATA) as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert read(server.url) == DATA


def test_https_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R30, L6: the proxy sees a name and ciphertext; certificates are checked end to end."""
    certificates = make_certificates(tmp_path)
    with ScriptedServer(DATA, tls=certificates.context) as server, Tunnels() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        trusting = OriginOptions(ca_bundle=str(certificates.ca), retries=0)
        assert read(server.url, trusting) == DATA
        assert proxy.asked == [server.url.partition("//")[2]]
        with pytest.raises(RacerError, match="not trusted"):
            read(server.url, OriginOptions(retries=0))


def test_a_proxy_that_refuses_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: the failure names the proxy and its status."""
    with Tunnels(status=407) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(RacerError, match=r"proxy .* refused with status 407") as caught:
            read("https://models.invalid")
        assert "HTTPS_PROXY" in caught.value.hint
