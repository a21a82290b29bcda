"""Azurite: Microsoft's emulator of Azure Blob storage."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.servers.process import answers, free_port, need, server

ACCOUNT = "devstoreaccount1"
# The emulator's well-known key: public, the same everywhere.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_VERSION = "2021-08-06"


@dataclass(frozen=True)
class Azure:
    """A running server. `put` and `delete` take keys as bytes, exactly as they are."""

    url: str

    def make_container(self, container: str) -> None:
        self._send("PUT", f"/{container}", {"restype": "container"})

    def put(self, container: str, key: bytes, data: bytes) -> None:
        self._send("PUT", f"/{container}/{quote(key)}", {}, data, {"x-ms-blob-type": "BlockBlob"})

    def delete(self, container: str, key: bytes) -> None:
        self._send("DELETE", f"/{container}/{quote(key)}", {})

    def sas(self, permissions: str = "rl") -> str:
        """An account SAS for blobs, valid for a day and expiring."""
        start, end = "2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z"
        parts = [ACCOUNT, permissions, "b", "sco", start, end, "", "https,http", _VERSION, "", ""]
        fields = {
            "sv": _VERSION, "ss": "b", "srt": "sco", "sp": permissions, "st": start, "se": end,
            "spr": "https,http", "sig": _mac("\n".join(parts)),
        }  # fmt: skip
        return urlencode(fields)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: bytes = b"",
        fields: Mapping[str, str] = {},
    ) -> None:
        """Signs by the rules of the Blob service REST reference, "Authorize with Shared Key"."""
        fields = {**fields, "x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        length = str(len(data)) if data else ""
        text = "\n".join(
            [method, "", "", length, "", "", "", "", "", "", "", ""]
            + [f"{name}:{fields[name]}" for name in sorted(fields)]
            + [f"/{ACCOUNT}/{ACCOUNT}{path}"]
            + [f"{name}:{query[name]}" for name in sorted(query)]
        )
        request = urllib.request.Request(
            f"{self.url}{path}" + (f"?{urlencode(query)}" if query else ""),
            data=data if method == "PUT" else None,
            method=method,
            headers={
                **fields,
                "Content-Length": str(len(data)),
                "Content-Type": "",
                "Authorization": f"SharedKey {ACCOUNT}:{_mac(text)}",
            },
        )
        with urllib.request.urlopen(request, timeout=30):
            pass


def _mac(text: str) -> str:
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


@contextlib.contextmanager
def azurite(folder: Path, containers: list[str]) -> Iterator[Azure]:
    """Azurite with `containers` made."""
    cache = Path(os.environ.get("RACER_TEST_CACHE", Path.home() / ".cache" / "racer-tests"))
    program = need(cache / "azurite" / "node_modules" / ".bin" / "azurite-blob", "Azurite")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        program, "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder),
    ]  # fmt: skip
    with server(command, folder / "log", lambda: answers(port)):
        azure = Azure(f"http://127.0.0.1:{port}/{ACCOUNT}")
        for container in containers:
            azure.make_container(container)
        yield azure
