"""`racer://` through fsspec, on the real daemon: what pandas and its like do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import racer
from tests.servers.s3 import KEY, SECRET, moto
from tests.support.safetensors_bytes import model_file, pattern
from tools.daemon_process import DaemonProcess

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

WEIGHTS = pattern(300_000, 1)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    folder = tmp_path / "objects" / "bucket"
    (folder / "a b").mkdir(parents=True)
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(WEIGHTS)
    (folder / "empty").write_bytes(b"")
    (folder / "a b" / "100%?#é").write_bytes(b"odd")
    (folder / "deep" / "er" / "x.txt").write_bytes(b"line 1\nline 2\n")
    (folder / "m.safetensors").write_bytes(model_file({"t": ("F32", [3, 2])})[0])
    arguments = ["--page-bytes=64KiB", "--frame-bytes=16KiB", "--memory=8MiB"]
    arguments += [f"--disk={tmp_path / 'slab'}:64MiB", "--version-seconds=0"]
    caches = {"local": f"file://{tmp_path / 'objects'}"}
    with DaemonProcess(tmp_path, caches=caches, arguments=arguments) as daemon:
        yield daemon


@pytest.fixture
def files(daemon: DaemonProcess) -> Iterator[Any]:
    # By name, so through the entry point; not cached, so that connections end with the test.
    files = fsspec.filesystem("racer", run_dir=daemon.run_dir, skip_instance_cache=True)
    yield files
    files.client.close()


def test_walking(files: Any) -> None:
    """R38: caches, buckets, prefixes and objects, each name good for the next step."""
    assert files.ls("racer://", detail=False) == ["local"]
    assert files.ls("local", detail=False) == ["local/bucket"]
    assert sorted(files.ls("racer://local/bucket/", detail=False)) == [
        "local/bucket/a%20b",
        "local/bucket/deep",
        "local/bucket/empty",
        "local/bucket/m.safetensors",
        "local/bucket/weights.bin",
    ]
    assert files.find("local/bucket/deep") == ["local/bucket/deep/er/x.txt"]
    assert files.glob("local/bucket/*.bin") == ["local/bucket/weights.bin"]
    (odd,) = files.ls("local/bucket/a%20b", detail=False)
    assert odd == "local/bucket/a%20b/100%25%3F%23%C3%A9"
    assert files.cat_file(odd) == b"odd"


def test_names_have_one_spelling(files: Any, tmp_path: Path) -> None:
    """R38: whatever way a path is written, names and patterns agree; what readers of datasets take
    apart is not escaped."""
    for name in ("year=2026,a+b", "é é", "100%[1]*"):
        (tmp_path / "objects/bucket" / name).mkdir()
        (tmp_path / "objects/bucket" / name / "x.txt").write_bytes(name.encode())
    plain, spaced, marked = (
        f"local/bucket/{name}/x.txt"
        for name in ("year=2026,a+b", "%C3%A9%20%C3%A9", "100%25%5B1%5D%2A")
    )
    assert {plain, spaced, marked} < set(files.find("local/bucket"))
    for path, name in (
        ("racer://local/bucket/year%3D2026,a%2bb/x.txt", plain),
        ("local/bucket/year=*/x.txt", plain),
        ("local/bucket/é é/*.txt", spaced),
        ("local/bucket/%c3%a9 é/x.txt", spaced),
        ("local/bucket/100%25%5b1%5d%2a/*", marked),
        ("local/bucket/100*/*", marked),
    ):
        assert files.glob(path) == [name]
    assert files.info("local/bucket/é é/x.txt")["name"] == spaced
    assert files.cat_file("local/bucket/é é/x.txt") == "é é".encode()
    assert files.cat_file(marked) == b"100%[1]*"


def test_info(files: Any) -> None:
    """R3: size and ETag of objects; prefixes are directories; the rest is not there."""
    info = files.info("racer://local/bucket/weights.bin")
    assert (info["type"], info["size"]) == ("file", len(WEIGHTS)) and info["ETag"]
    assert files.checksum("local/bucket/weights.bin") == info["ETag"]
    assert files.ls("local/bucket/weights.bin") == [info]
    for folder in ("", "local", "local/bucket", "local/bucket/deep"):
        assert files.isdir(folder)
    assert files.exists("local/bucket/empty") and not files.exists("local/bucket/nope")
    for missing in ("local/bucket/nope", "local/bucket/dee", "local/none"):
        with pytest.raises(FileNotFoundError):
            files.info(missing)
        with pytest.raises(FileNotFoundError):
            files.ls(missing)
    with pytest.raises(FileNotFoundError):
        files.cat_file("local/bucket/nope")


def test_reading(files: Any, tmp_path: Path) -> None:
    """R3: whole, parts from both ends, seeks, lines, copies to the disk."""
    path = "racer://local/bucket/weights.bin"
    assert files.cat_file(path) == WEIGHTS
    assert files.cat_file(path, 10, 20) == WEIGHTS[10:20]
    assert files.cat_file(path, -10) == WEIGHTS[-10:]
    assert files.cat_file(path, 5, 5) == b"" and files.cat_file("local/bucket/empty") == b""
    with files.open(path, block_size=1000) as file:
        file.seek(-7, 2)
        assert file.read() == WEIGHTS[-7:]
        file.seek(123_456)
        assert file.read(70_000) == WEIGHTS[123_456:193_456]
    with files.open("local/bucket/empty") as file:
        assert file.read() == b""
    with files.open("local/bucket/deep/er/x.txt", "r") as file:
        assert file.readlines() == ["line 1\n", "line 2\n"]
    files.get("local/bucket/deep/", str(tmp_path / "copy/"), recursive=True)
    assert (tmp_path / "copy/er/x.txt").read_bytes() == b"line 1\nline 2\n"


def test_what_cannot_be_known_is_not_denied(files: Any, daemon: DaemonProcess) -> None:
    """L34: without a daemon nothing is said not to be there; there is an error."""
    assert files.isfile("local/bucket/empty") and not files.isfile("local/bucket/deep")
    assert not files.isfile("local/bucket/nope")
    daemon.stop()
    # A client waits for a daemon that is being replaced: not here.
    files = fsspec.filesystem(
        "racer", run_dir=daemon.run_dir, timeout=0.1, skip_instance_cache=True
    )
    for asked in (files.exists, files.isfile, files.isdir, files.glob):
        with pytest.raises(racer.DaemonUnavailable):
            asked("local/bucket/weights.bin")
    files.client.close()


@pytest.mark.parametrize(
    "cache_type",
    ["none", "all", "readahead", "bytes", "blockcache", "background", "first"],
)
def test_every_cache_of_fsspec(files: Any, cache_type: str) -> None:
    """R3: parts of a file, in any order, through whichever cache the caller chose."""
    with files.open("local/bucket/weights.bin", cache_type=cache_type, block_size=70_000) as file:
        for start, stop in ((100_001, 250_000), (299_995, 300_000), (0, 10)):
            file.seek(start)
            assert file.read(stop - start) == WEIGHTS[start:stop]


def test_it_is_read_only(files: Any) -> None:
    """R34: nothing here can write to an origin."""
    with pytest.raises(PermissionError, match="read-only"):
        files.open("local/bucket/new", "wb")
    with pytest.raises(PermissionError, match="read-only"):
        files.rm("local/bucket/weights.bin")
    for folders in (files.makedirs, files.mkdir, files.rmdir):
        with pytest.raises(PermissionError, match="read-only"):
            folders("local/bucket/deep")
    with pytest.raises(IsADirectoryError):
        files.open("local/bucket/deep")


def test_an_open_file_is_one_version(files: Any, tmp_path: Path) -> None:
    """R3, L39: the object changes below an open file: an error, never mixed bytes."""
    with files.open("local/bucket/weights.bin", block_size=1000) as file:
        assert file.read(10) == WEIGHTS[:10]
        (tmp_path / "objects/bucket/weights.bin").write_bytes(bytes(400_000))
        file.seek(200_000)
        with pytest.raises(racer.VersionChanged):
            file.read(10)


def test_it_goes_to_other_processes(files: Any) -> None:
    """R33: a data loader's workers get the file system by pickle."""
    copy = pickle.loads(pickle.dumps(files))
    try:
        assert copy.cat_file("local/bucket/deep/er/x.txt") == b"line 1\nline 2\n"
    finally:
        copy.client.close()


def test_an_open_file_goes_too(files: Any, tmp_path: Path) -> None:
    """R33, L39: at its position, and still as the version that was opened."""
    with files.open("local/bucket/weights.bin", block_size=1000) as file:
        file.seek(100)
        copy = pickle.loads(pickle.dumps(file))
    try:
        assert (copy.tell(), copy.read(5)) == (100, WEIGHTS[100:105])
        (tmp_path / "objects/bucket/weights.bin").write_bytes(bytes(400_000))
        late = pickle.loads(pickle.dumps(copy))
        late.seek(200_000)
        with pytest.raises(racer.VersionChanged):
            late.read(5)
        late.fs.client.close()
    finally:
        copy.fs.client.close()


@pytest.mark.servers
def test_keys_with_empty_parts(tmp_path: Path) -> None:
    """R38: what lies behind "//" is found under its own name; no folder is in itself."""
    environ = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ALLOW_HTTP": "true"}
    with moto(tmp_path / "moto", ["bucket"]) as s3:
        for key in (b"d/x", b"d//y", b"d///z", b"d//e/f", b"d/" + b"/" * 30 + b"g"):
            s3.put("bucket", key, key)
        environ |= {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": s3.url}
        with DaemonProcess(tmp_path / "d", caches={"s3": "s3://"}, environ=environ) as daemon:
            files = fsspec.filesystem("racer", run_dir=daemon.run_dir, skip_instance_cache=True)
            found = files.find("s3/bucket")
            wanted = ["d/x", "d//y", "d///z", "d//e/f", "d/" + "/" * 30 + "g"]
            assert sorted(found) == sorted(f"s3/bucket/{key}" for key in wanted)
            assert files.cat_file("s3/bucket/d//y") == b"d//y"
            files.client.close()


def test_safe_open(daemon: DaemonProcess) -> None:
    """R34, L41: one tensor of a file behind the daemon."""
    url = "racer://local/bucket/m.safetensors"
    with racer.safe_open(url, "numpy", socket=daemon.socket("local")) as file:
        assert file.keys() == ["t"]
        whole = file.get_tensor("t")
        assert whole.tobytes() == pattern(24, 0)
        assert file.get_slice("t")[1:].tobytes() == whole[1:].tobytes()
