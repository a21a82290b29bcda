"""The promises of every origin, kept by each kind against a server of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from racerd.config.origin_options import OriginOptions, Secret
from racerd.origin.factory import make_origin
from racerd.telemetry import Metrics
from tests.contract.origin_contract import BUCKET, OriginContract, Slashes, Store, Subject, fill
from tests.servers.azure import ACCOUNT, ACCOUNT_KEY, azurite
from tests.servers.gcs import fake_gcs
from tests.servers.nginx import nginx
from tests.servers.obstore_rest import no_sockets_left
from tests.servers.s3 import KEY, S3, SECRET, moto, seaweedfs


class Folder:
    """A directory that is written the way it should be: whole files, renamed into place."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, bucket: str, key: bytes, data: bytes) -> None:
        path = self.root / bucket / key.decode()
        if key.endswith(b"/"):
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(".new")
        new.write_bytes(data)
        new.replace(path)

    def delete(self, bucket: str, key: bytes) -> None:
        path = self.root / bucket / key.decode()
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


@dataclass(frozen=True)
class Kind:
    """A running server, and how an origin of its kind is made."""

    store: Store
    url: str
    options: OriginOptions = field(default_factory=OriginOptions)
    lists: bool = True
    slashes: Slashes = "kept"
    names_buckets: bool = False


@contextmanager
def _directory(folder: Path) -> Iterator[Kind]:
    (folder / BUCKET).mkdir()
    yield Kind(Folder(folder), f"file://{folder}", slashes="none", names_buckets=True)


@contextmanager
def _nginx(folder: Path) -> Iterator[Kind]:
    root = folder / "root"
    root.mkdir()
    with nginx(folder / "nginx", root) as server:
        yield Kind(Folder(root), server.url, lists=False, slashes="folded")


def _s3(server: S3, slashes: Slashes) -> Kind:
    options = OriginOptions(
        endpoint=server.url, allow_http=True, region="us-east-1",
        access_key_id=KEY, secret_access_key=Secret(SECRET),
    )  # fmt: skip
    return Kind(server, "s3://", options, slashes=slashes, names_buckets=True)


@contextmanager
def _seaweedfs(folder: Path) -> Iterator[Kind]:
    with seaweedfs(folder, [BUCKET]) as server:
        yield _s3(server, "folded")


@contextmanager
def _moto(folder: Path) -> Iterator[Kind]:
    with moto(folder, [BUCKET]) as server:
        yield _s3(server, "kept")


@contextmanager
def _azurite(folder: Path) -> Iterator[Kind]:
    with azurite(folder, [BUCKET]) as server:
        key = Secret(ACCOUNT_KEY)
        options = OriginOptions(endpoint=server.url, allow_http=True, account_key=key)
        yield Kind(server, f"az://{ACCOUNT}", options)


@contextmanager
def _fake_gcs(folder: Path) -> Iterator[Kind]:
    with fake_gcs(folder, [BUCKET]) as server:
        options = OriginOptions(endpoint=server.url, allow_http=True, anonymous=True)
        yield Kind(server, "gs://", options)


SERVERS = [_nginx, _seaweedfs, _moto, _azurite, _fake_gcs]
KINDS = [
    pytest.param(_directory, id="directory"),
    *(pytest.param(kind, id=kind.__name__[1:], marks=pytest.mark.servers) for kind in SERVERS),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kind]:
    with request.param(tmp_path_factory.mktemp("origin")) as found:
        fill(found.store)
        yield found


@pytest.fixture
def subject(kind: Kind) -> Iterator[Subject]:
    with no_sockets_left():
        origin = make_origin(kind.url, kind.options, cache="cache", metrics=Metrics())
        yield Subject(origin, kind.store, kind.lists, kind.slashes, kind.names_buckets)
        origin.close()


class TestOrigins(OriginContract):
    """Each promise, by each kind."""
