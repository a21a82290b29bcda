"""Shared memory between real processes: a real daemon, its client, and loads of one model."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import racer
from tests.support.safetensors_bytes import model_file
from tools.daemon_process import DaemonProcess

MIB = 1 << 20
LAYOUT = {
    "wide": ("F32", [2, 5, MIB]),
    "small": ("F32", [10]),
    "long": ("U8", [37 * MIB + 5]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Two shards of about 77 MiB: three shared pieces each."""
    root = tmp_path_factory.mktemp("share")
    folder = root / "models" / "bucket" / "m"
    folder.mkdir(parents=True)
    held: dict[str, bytes] = {}
    for shard in (1, 2):
        layout = {f"{name}{shard}": what for name, what in LAYOUT.items()}
        unpadded = len(model_file(layout)[0]) - sum(map(len, model_file(layout)[1].values()))
        # As the format's own writer pads: else no tensor of floats lies straight.
        content, contents = model_file(layout, seed=shard, header_pad=-unpadded % 8)
        (folder / f"model-{shard:05d}-of-00002.safetensors").write_bytes(content)
        held |= contents
    return root, held


@pytest.fixture
def daemon(model: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Iterator[DaemonProcess]:
    origin = f"file://{model[0] / 'models'}"
    arguments = ["--share-idle-seconds=0.2", "--share=256MiB"]
    with DaemonProcess(tmp_path, caches={"local": origin}, arguments=arguments) as process:
        yield process


def load(daemon: DaemonProcess, **options: Any) -> racer.TensorStream:
    socket = daemon.socket("local")
    return racer.load("racer://local/bucket/m", framework="numpy", socket=socket, **options)


READER = """
import sys, hashlib, racer
stream = racer.load("racer://local/bucket/m", framework="numpy", socket=sys.argv[1])
kept = dict(stream)
print(stream.report.rungs, flush=True)
sys.stdin.readline()
for name in sorted(kept):
    print(name, hashlib.sha256(kept[name].tobytes()).hexdigest(), flush=True)
sys.stdin.readline()
"""


def test_eight_processes_load_and_each_page_is_opened_once(
    daemon: DaemonProcess, model: tuple[Path, dict[str, bytes]]
) -> None:
    """R35, F19: N ranks cost one opening of each page, and all have the right bytes."""
    import hashlib

    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(daemon.socket("local"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline().startswith("{")
        size = sum(path.stat().st_size for path in (model[0] / "models").rglob("*.safetensors"))
        assert daemon.metric("racer_shared_reads_total", result="filled") == 6
        # Headers are read too; what matters is that no page of payload is opened twice.
        served = sum(
            daemon.metric("racer_rung_bytes_total", rung=rung)
            for rung in ("memory", "disk", "origin")
        )
        assert served < 1.2 * size
        assert daemon.metric("racer_rung_bytes_total", rung="shared") >= 7 * 0.99 * size
        wanted = {name: hashlib.sha256(content).hexdigest() for name, content in model[1].items()}
        for reader in readers:
            print(file=reader.stdin, flush=True)
            lines = [reader.stdout.readline().split() for _ in wanted]  # type: ignore[union-attr]
            assert dict(lines) == wanted
        assert daemon.metric("racer_budget_used_bytes", budget="share") >= size
    finally:
        for reader in readers:
            reader.communicate("\n\n")
    wait_until_nothing_is_shared(daemon)


def wait_until_nothing_is_shared(daemon: DaemonProcess) -> None:
    while json.loads(daemon.get("/debug/shares")):
        os.sched_yield()
    assert daemon.metric("racer_budget_used_bytes", budget="share") == 0


def test_what_one_reader_writes_no_other_sees(
    daemon: DaemonProcess, model: tuple[Path, dict[str, bytes]]
) -> None:
    first = dict(load(daemon))
    for array in first.values():
        array[...] = 0
    second = load(daemon)
    assert {name: array.tobytes() for name, array in second} == model[1]
    assert set(second.report.rungs) == {"shared"}


def test_tensors_survive_the_daemon(
    daemon: DaemonProcess, model: tuple[Path, dict[str, bytes]]
) -> None:
    """R7: memory that is mapped is good whatever becomes of who made it."""
    kept = dict(load(daemon))
    daemon.kill()
    assert {name: array.tobytes() for name, array in kept.items()} == model[1]
    daemon.start()
    assert {name: array.tobytes() for name, array in load(daemon)} == model[1]


def test_a_budget_that_is_too_small_shares_what_it_can(
    model: tuple[Path, dict[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R4, F12: kept tensors stay charged; the rest comes into memory of the reader's own."""
    origin = f"file://{model[0] / 'models'}"
    with DaemonProcess(tmp_path, caches={"local": origin}, arguments=["--share=64MiB"]) as daemon:
        stream = load(daemon)
        kept = dict(stream)
        assert {name: array.tobytes() for name, array in kept.items()} == model[1]
        assert daemon.metric("racer_budget_used_bytes", budget="share") <= 64 * MIB
        assert daemon.metric("racer_shares_refused_total", reason="full") > 0
    assert sum("memory of our own" in record.message for record in caplog.records) == 1


def test_a_daemon_that_shares_nothing(model: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    origin = f"file://{model[0] / 'models'}"
    with DaemonProcess(tmp_path, caches={"local": origin}, arguments=["--share=0"]) as daemon:
        stream = load(daemon)
        assert {name: array.tobytes() for name, array in stream} == model[1]
        assert "shared" not in stream.report.rungs
        client = racer.Client(socket=daemon.socket("local"))
        with client, pytest.raises(racer.ShareRefused, match="`share` is 0"):
            client.share("racer://local/bucket/m/model-00001-of-00002.safetensors")


def test_the_client_gives_the_memory_itself(
    daemon: DaemonProcess, model: tuple[Path, dict[str, bytes]]
) -> None:
    name = "model-00001-of-00002.safetensors"
    content = (model[0] / "models" / "bucket" / "m" / name).read_bytes()
    with racer.Client(socket=daemon.socket("local")) as client:
        with client.share(f"racer://local/bucket/m/{name}", 40 * MIB) as shared:
            assert (shared.start, shared.stop) == (32 * MIB, 64 * MIB)
            assert bytes(shared.view) == content[32 * MIB : 64 * MIB]
            mapping = mmap.mmap(shared.fileno(), 100, prot=mmap.PROT_READ)
        assert mapping[:] == content[32 * MIB :][:100]
        mapping.close()
        with pytest.raises(racer.Closed):
            shared.fileno()
        with pytest.raises(racer.RangeNotSatisfiable):
            client.share(f"racer://local/bucket/m/{name}", 1 << 40)
        with pytest.raises(racer.VersionChanged):
            client.share(f"racer://local/bucket/m/{name}", etag='"other"')


def test_huge_pages_are_tried(daemon: DaemonProcess) -> None:
    first = dict(load(daemon))
    kinds = {shown["pages"] for shown in json.loads(daemon.get("/debug/shares"))}
    refused = daemon.metric("racer_fallbacks_total", reason="refused", step="share_huge_pages")
    assert kinds == {"huge"} or refused > 0
    assert all(isinstance(array, np.ndarray) for array in first.values())
