"""Faults of disks and keys as an operator meets them: /readyz, /debug, the log, `racer explain`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import racer
from racerd.crypto.keyring import drop_epoch, rotate_key_file
from racerd.store.geometry import SUPERBLOCK_OFFSETS
from tests.support.counting_origin import CountingOrigin
from tools.daemon_process import DaemonProcess

SIZE = 1_000_003
DATA = random.Random(1).randbytes(SIZE)
URL = "racer://local/models/weights.bin"


def eventually(true: Callable[[], bool], what: str) -> None:
    """Waits for a state of another process. Bounded; the wait is not what is tested."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk, because tmpfs has no direct I/O."""
    made = Path(tempfile.mkdtemp(prefix="racer-told-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[CountingOrigin]:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.bin").write_bytes(DATA)
    with CountingOrigin(tmp_path) as counting:
        yield counting


def daemon_on(folder: Path, url: str, *arguments: str) -> DaemonProcess:
    small = ["--page-bytes=64KiB", "--frame-bytes=16KiB", "--memory=8MiB"]
    slab = f"--disk={folder / 'slab'}:64MiB"
    return DaemonProcess(folder, caches={"local": url}, arguments=[*small, slab, *arguments])


def explained(daemon: DaemonProcess) -> str:
    """What the command `racer explain` prints."""
    command = [sys.executable, "-m", "racer.cli", "explain", URL]
    socket = f"--socket={daemon.socket('local')}"
    done = subprocess.run([*command, socket], capture_output=True, text=True, check=True)
    return done.stdout


def disk_told(daemon: DaemonProcess) -> dict[str, object]:
    (disk,) = json.loads(daemon.get("/debug/disks"))
    return dict(disk)


def test_a_newer_slab_is_left_alone_and_reads_go_through(
    folder: Path, origin: CountingOrigin
) -> None:
    """R23, F35: the daemon starts, serves from the origin, and says what to do."""
    daemon = daemon_on(folder, origin.url)
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        client.prefetch(URL)
        well = disk_told(daemon)
        assert well["troubles"] == [] and well["state"] == "normal" and well["pages"] == 16
    with (folder / "slab").open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset + 16)
            file.write(b"\x09")
    before = (folder / "slab").read_bytes()
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        assert "has a newer format than this racerd knows" in daemon.started_text
        assert "start the newer racerd again, or give this one another path" in daemon.log
        assert "newer format" in explained(daemon)
        assert client.read(URL) == DATA
        (disk,) = json.loads(daemon.get("/readyz"))["disks"]
        assert disk["state"] == "down" and not disk["recovering"]
        assert "reads pass it by" in disk["troubles"][0]
        assert daemon.metric("racer_store_state", state="down") == 1
    assert (folder / "slab").read_bytes() == before


def test_a_key_that_was_removed_makes_misses_that_are_told(
    folder: Path, origin: CountingOrigin
) -> None:
    """R20: pages of a removed epoch are fetched again; metric, /debug and the log say why."""
    daemon = daemon_on(folder, origin.url)
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        client.prefetch(URL)
    keys = daemon.state_dir / "keys"
    rotate_key_file(keys)
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        assert json.loads(daemon.get("/debug/keys")) == {"active": 2, "epochs": [1, 2]}
        assert client.read(URL, length=100) == DATA[:100]
        origin.requests.clear()
        drop_epoch(keys, 1)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: "[2]" in "".join(daemon.get("/debug/keys").split()), "the key is gone")
        assert client.read(URL) == DATA
        assert origin.requests["GET"] >= 15
        assert daemon.metric("racer_fallbacks_total", reason="key_retired") > 0
        assert daemon.metric("racer_corrupt_pages_total") == 0


def test_explain_tells_what_was_evicted_and_what_was_damaged(
    folder: Path, origin: CountingOrigin
) -> None:
    """R22, R24: in the words that `racer explain` prints."""
    daemon = daemon_on(folder, origin.url, "--scrub-bytes-per-second=1GiB")
    with daemon, racer.Client(socket=daemon.socket("local")) as client:
        client.prefetch(URL)
        client.evict(URL)
        assert "not on disk: evicted on request" in explained(daemon)
        client.prefetch(URL)
    with (folder / "slab").open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(256 << 10, size - 4096, 32 << 10):
            file.seek(at)
            if any(file.read(512)):
                file.seek(at)
                file.write(b"rot!" * 16)
    with daemon:
        eventually(
            lambda: daemon.metric("racer_corrupt_pages_total", rung="disk") > 0, "rot is found"
        )
        assert "dropped: its copy was damaged (" in explained(daemon)
