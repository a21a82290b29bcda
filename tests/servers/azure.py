"""Azurite: Microsoft's emulator of Azure Blob storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from obstore.store import AzureStore

from tests.servers.process import answers, free_port, need, server

ACCOUNT = "devstoreaccount1"
# The emulator's well-known key: public, the same everywhere.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class Azure:
    url: str

    def store(self, container: str) -> AzureStore:
        """A store that may write, for filling the container."""
        return AzureStore(
            container,
            account_name=ACCOUNT,
            account_key=ACCOUNT_KEY,
            endpoint=self.url,
            client_options={"allow_http": True},
        )


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
            _make_container(azure, container)
        yield azure


def _make_container(azure: Azure, container: str) -> None:
    """obstore cannot make containers: the signed PUT that the service's REST reference gives."""
    import base64
    import hashlib
    import hmac
    import urllib.request
    from email.utils import formatdate

    date, version = formatdate(usegmt=True), "2021-08-06"
    path = f"/{ACCOUNT}/{ACCOUNT}/{container}"
    text = "\n".join(
        ["PUT", "", "", "", "", "", "", "", "", "", "", "",
         f"x-ms-date:{date}", f"x-ms-version:{version}", path, "restype:container"]
    )  # fmt: skip
    mac = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"{azure.url}/{container}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
        },
    )
    with urllib.request.urlopen(request, timeout=30):
        pass
