"""The client against the real daemon: what neither side can prove alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import racer
from racer.transfer import PART_BYTES, RING_PART_BYTES
from racerd.pages import PAGE_BYTES_DEFAULT
from tools.daemon_process import DaemonProcess

MIB = 1 << 20
SIZE = 2 * PART_BYTES + 2 * MIB + 12_345
URL = "racer://local/models/weights.bin"
NAMES = ("sub/a b%+#?.txt", "sub/ü/\udcff", "sub/.hidden")


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects") / "models"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(content(1, SIZE))
    (folder / "config.json").write_bytes(b"{}")
    (folder / "empty").write_bytes(b"")
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.fsencode(name))
    return folder


def served(folder: Path, models: Path) -> DaemonProcess:
    arguments = ["--memory=64MiB", f"--disk={folder / 'slab'}:256MiB"]
    return DaemonProcess(folder, caches={"local": f"file://{models.parent}"}, arguments=arguments)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[DaemonProcess]:
    """One for all tests that leave it running."""
    with served(tmp_path_factory.mktemp("daemon"), models) as running:
        yield running


@pytest.fixture
def own_daemon(tmp_path: Path, models: Path) -> Iterator[DaemonProcess]:
    """One to stop and to kill."""
    with served(tmp_path, models) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[racer.Client]:
    with racer.Client(run_dir=daemon.run_dir, timeout=60) as opened:
        yield opened


def test_every_way_to_read(client: racer.Client) -> None:
    """R1, R3: the same bytes by each of them, at odd offsets, across parts and pages."""
    want = content(1, SIZE)
    stat = client.stat(URL)
    assert stat.size == SIZE
    assert client.read(URL) == want
    for offset, length in ((0, 1), (1, PART_BYTES), (16 * MIB - 1, 2), (SIZE - 5, 100)):
        assert client.read(URL, offset, length) == want[offset : offset + length]
    buffer = bytearray(SIZE + 7)
    assert client.read_into(URL, buffer, 3, etag=stat.etag) == SIZE - 3
    assert buffer[: SIZE - 3] == want[3:]
    mapped = client.map(URL)
    with mapped as view:
        assert view == want
    assert sum(mapped.rungs.values()) == SIZE
    assert "stream" not in mapped.rungs
    assert b"".join(bytes(chunk) for chunk in client.stream(URL, 9)) == want[9:]
    with client.landing(PART_BYTES + MIB) as landing:
        for offset in (0, 1, PART_BYTES - 3):
            done = landing.read(URL, offset, PART_BYTES + MIB)
            assert done.bytes == PART_BYTES + MIB
            assert landing.view == want[offset : offset + PART_BYTES + MIB]
    assert client.read("racer://local/models/empty") == b""
    with client.map("racer://local/models/empty") as view:
        assert len(view) == 0


def test_names_survive(client: racer.Client) -> None:
    """Spaces, `%`, `+`, `#`, `?`, unicode and bytes that are not UTF-8 reach the origin whole."""
    listed = {entry.url for entry in client.list("racer://local/models/sub/")}
    expected = {
        str(racer.RacerUrl("local", "models", os.fsencode(name))): os.fsencode(name)
        for name in NAMES
    }
    assert listed == set(expected)
    for url, data in expected.items():
        assert client.read(url) == data
    level = list(client.list("racer://local/models/", recursive=False))
    assert [entry.url for entry in level if entry.is_prefix] == ["racer://local/models/sub/"]


def test_errors_of_the_real_daemon(client: racer.Client) -> None:
    for call in (client.stat, client.read, client.map, client.explain, client.prefetch):
        with pytest.raises(racer.NotFound):
            call("racer://local/models/nothing")
    for call in (client.stat, client.read, client.map):
        with pytest.raises(racer.VersionChanged) as caught:
            call(URL, etag='"another"')
        assert caught.value.etag == client.stat(URL).etag
    with pytest.raises(racer.RangeNotSatisfiable):
        client.read(URL, SIZE)
    with pytest.raises(racer.DaemonUnavailable, match="caches there: local"):
        client.stat("racer://other/a/b")
    assert client.info("local").state == "ready"
    assert client.evict(URL).pages >= 0
    assert client.prefetch(URL).bytes == SIZE
    assert [page.page for page in client.explain(URL).pages] == list(
        range(-(-SIZE // PAGE_BYTES_DEFAULT))
    )


def test_threads_tasks_and_processes_at_once(daemon: DaemonProcess, client: racer.Client) -> None:
    want = content(1, SIZE)

    async def read_async() -> bool:
        async with racer.AsyncClient(run_dir=daemon.run_dir, timeout=60) as other:
            reads = [other.read(URL, n * MIB, 9 * MIB) for n in range(6)]
            got = await asyncio.gather(*reads)
            return all(data == want[n * MIB : (n + 9) * MIB] for n, data in enumerate(got))

    def read(n: int) -> bool:
        if n == 0:
            return asyncio.run(read_async())
        return client.read(URL, n * MIB, 20 * MIB) == want[n * MIB : (n + 20) * MIB]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(6)))


def test_restarts(own_daemon: DaemonProcess) -> None:
    """R23, R32: kill -9 and a restart under a reader that does not notice; a landing outlives a
    restart between its reads."""
    want = content(1, SIZE)
    with (
        racer.Client(run_dir=own_daemon.run_dir, timeout=60) as client,
        client.landing(MIB) as landing,
    ):
        landing.read(URL, 0, MIB)
        got = bytearray()
        chunks = client.stream(URL)
        got += next(chunks)
        own_daemon.kill()
        restarting = threading.Thread(target=own_daemon.start)
        restarting.start()
        for chunk in chunks:
            got += chunk
        restarting.join()
        assert got == want
        assert client.read(URL, 5, 5) == want[5:10]
        landing.read(URL, MIB, MIB)
        assert landing.view == want[MIB : 2 * MIB]


def test_a_file_that_is_replaced_under_a_pinned_read(client: racer.Client, models: Path) -> None:
    """R3, F55: two versions are never mixed."""
    url = "racer://local/models/replaced"
    (models / "replaced").write_bytes(content(2, RING_PART_BYTES * 6))
    stat = client.stat(url)
    try:
        client.read(url, 0, MIB, etag=stat.etag)
        other = models / "other"
        other.write_bytes(content(3, RING_PART_BYTES * 6))
        other.rename(models / "replaced")
        client.evict(url)
        with pytest.raises(racer.VersionChanged):
            client.read(url, 0, RING_PART_BYTES * 6, etag=stat.etag)
        assert client.read(url) == content(3, RING_PART_BYTES * 6)
    finally:
        (models / "replaced").unlink()


_MEASURE = """
import racer, sys
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
with racer.Client(run_dir=sys.argv[1]) as client:
    client.read(sys.argv[2], 0, 1 << 20)
    before = peak()
    total = sum(len(chunk) for chunk in client.stream(sys.argv[2]))
    print(total, peak() - before)
"""


def test_memory_of_a_reader_is_bounded(daemon: DaemonProcess) -> None:
    """L9, L50: what a read needs besides its own buffer does not grow with the object."""
    measured = subprocess.check_output([sys.executable, "-c", _MEASURE, daemon.run_dir, URL])
    total, grown_kib = map(int, measured.split())
    assert total == SIZE
    assert grown_kib * 1024 < 5 * RING_PART_BYTES < SIZE


def test_nothing_is_left_in_the_daemon(daemon: DaemonProcess) -> None:
    """R5, R7: descriptors, targets and mappings go with the clients."""
    with racer.Client(run_dir=daemon.run_dir) as client:
        client.read(URL, 0, MIB)
    before = daemon.metric("racer_open_descriptors")
    for _ in range(5):
        with racer.Client(run_dir=daemon.run_dir) as client, client.landing(MIB) as landing:
            client.read(URL)
            landing.read(URL, 0, MIB)
            client.map(URL, 0, 3 * MIB).close()
            chunks = client.stream(URL)
            next(chunks)
            chunks.close()
    for _ in range(1000):
        if daemon.metric("racer_connections") == daemon.metric("racer_targets") == 0:
            break
        threading.Event().wait(0.01)
    assert daemon.metric("racer_targets") == 0
    assert daemon.metric("racer_target_mapped_bytes") == 0
    assert daemon.metric("racer_open_descriptors") <= before


def test_the_command(daemon: DaemonProcess, models: Path, tmp_path: Path) -> None:
    """R33: copy a model directory, and load it, as people do."""

    def run(*arguments: str) -> str:
        environment = os.environ | {"RACER_RUN_DIR": str(daemon.run_dir)}
        command = [sys.executable, "-m", "racer.cli", *arguments]
        return subprocess.check_output(command, text=True, env=environment, timeout=60)

    run("cp", "racer://local/models/", str(tmp_path / "copy"))
    for path in models.rglob("*"):
        if path.is_file():
            assert (tmp_path / "copy" / path.relative_to(models)).read_bytes() == path.read_bytes()
    loaded = json.loads(run("load", "racer://local/models/", "--json"))
    assert loaded["bytes"] == sum(p.stat().st_size for p in models.rglob("*") if p.is_file())
    assert "local" in run("caches")
    assert json.loads(run("explain", URL, "--json"))["size"] == SIZE
