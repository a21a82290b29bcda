"""The real daemon in a process of its own, through the real client, on real input."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import racer
from tests.support.counting_origin import CountingOrigin
from tools.daemon_process import DaemonProcess

SMALL = ("--page-bytes=64KiB", "--frame-bytes=16KiB", "--memory=8MiB")
BUCKET = "models"


def eventually(true: Callable[[], bool], what: str) -> None:
    """Waits for a state of another process. Bounded; the wait is not what is tested."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "objects" / BUCKET
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(content(1, 1_000_003))
    (folder / "empty").write_bytes(b"")
    (folder / "config.json").write_bytes(b"{}")
    return folder.parent


@pytest.fixture
def origin(models: Path) -> Iterator[CountingOrigin]:
    with CountingOrigin(models) as counting:
        yield counting


@contextlib.contextmanager
def served(folder: Path, url: str, *arguments: str) -> Iterator[DaemonProcess]:
    slab = f"--disk={folder / 'slab'}:64MiB"
    daemon = DaemonProcess(folder, caches={"local": url}, arguments=[*SMALL, slab, *arguments])
    with daemon:
        yield daemon


def kept(daemon: DaemonProcess, pages: int) -> None:
    """Waits until `pages` pages are on disk."""
    eventually(
        lambda: daemon.metric("racer_store_pages") >= pages, f"{pages} pages on disk\n{daemon.log}"
    )


def test_bytes_arrive_by_every_way(tmp_path: Path, models: Path) -> None:
    """R1, R3, R17, F50: host-read, stream and map give the same bytes; no GPU is needed."""
    want = content(1, 1_000_003)
    with (
        served(tmp_path, f"file://{models}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
    ):
        url = "racer://local/models/weights.bin"
        assert client.stat(url).size == len(want)
        assert client.read(url) == want
        assert client.read(url, offset=65_530, length=20) == want[65_530:65_550]
        buffer = bytearray(300_000)
        assert client.read_into(url, buffer, offset=700_003) == 300_000
        assert buffer == want[700_003:]
        with client.map(url) as view:
            assert view == want
        assert client.read("racer://local/models/empty") == b""
        with client.map("racer://local/models/empty") as view:
            assert len(view) == 0
        names = ["config.json", "empty", "weights.bin"]
        entries = list(client.list("racer://local/models/"))
        assert [e.url for e in entries] == [f"racer://local/models/{n}" for n in names]
        with pytest.raises(racer.NotFound):
            client.stat("racer://local/models/nowhere")


def test_a_second_load_asks_the_origin_for_nothing(tmp_path: Path, origin: CountingOrigin) -> None:
    """R32, F2, F42: memory serves the second load; after a restart the disk does."""
    want = content(1, 1_000_003)
    url = "racer://local/models/weights.bin"
    with served(tmp_path, origin.url) as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(url) == want
            fetched = origin.requests["GET"]
            assert fetched == 16
            assert client.read(url) == want
            assert origin.requests["GET"] == fetched
        kept(daemon, 16)
        assert daemon.stop() == 0
        daemon.start()
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(url) == want
        assert origin.requests["GET"] == fetched
        rungs = {r: daemon.metric("racer_rung_bytes_total", rung=r) for r in ("memory", "disk")}
        assert rungs["memory"] + rungs["disk"] == len(want)
        assert rungs["disk"] > len(want) / 2


def test_kill_minus_nine_loses_nothing_that_was_kept(
    tmp_path: Path, origin: CountingOrigin
) -> None:
    """R23, F37: after SIGKILL the daemon comes back by itself, with its pages and its socket."""
    want = content(1, 1_000_003)
    url = "racer://local/models/weights.bin"
    with served(tmp_path, origin.url) as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(url) == want
        kept(daemon, 16)
        fetched = origin.requests["GET"]
        daemon.kill()
        assert daemon.socket("local").exists(), "the crash leaves a stale socket behind"
        daemon.start()
        kept(daemon, 16)
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(url) == want
        assert origin.requests["GET"] == fetched


def test_many_cold_readers_make_one_request_a_page(tmp_path: Path, origin: CountingOrigin) -> None:
    """R32: N readers of a cold object cost one origin request per page."""
    want = content(1, 1_000_003)
    with served(tmp_path, origin.url) as daemon:

        def read(_: int) -> bytes:
            with racer.Client(socket=daemon.socket("local")) as client:
                return client.read("racer://local/models/weights.bin")

        with ThreadPoolExecutor(8) as pool:
            assert all(data == want for data in pool.map(read, range(8)))
    assert origin.requests["GET"] == 16
    assert max(origin.ranges.values()) <= 2  # HEAD and GET of a page at most.


def test_a_client_that_leaves_cancels_its_reads(tmp_path: Path, origin: CountingOrigin) -> None:
    """R7: the last reader's death ends the flight; nothing stays charged."""
    with served(tmp_path, origin.url) as daemon:
        origin.gate.clear()
        script = (
            "import racer, sys; c = racer.Client(socket=sys.argv[1]);"
            "c.read('racer://local/models/weights.bin')"
        )
        reader = subprocess.Popen([sys.executable, "-c", script, str(daemon.socket("local"))])
        try:
            assert origin.waiting.acquire(timeout=30)
            assert daemon.metric("racer_flights") > 0
        finally:
            reader.kill()
            reader.wait()
        eventually(lambda: daemon.metric("racer_connections") == 0, "the connection is gone")
        origin.gate.set()
        eventually(lambda: daemon.metric("racer_flights") == 0, "no flight is left")
        eventually(lambda: daemon.metric("racer_target_mapped_bytes") == 0, "no mapping is left")
        eventually(
            lambda: daemon.metric("racer_budget_used_bytes", budget="plaintext") == 0,
            "no plaintext is charged",
        )


def test_sigterm_lets_running_reads_finish(tmp_path: Path, origin: CountingOrigin) -> None:
    """F78: SIGTERM turns readiness off, finishes what runs, and exits 0."""
    want = content(1, 1_000_003)[:60_000]
    with served(tmp_path, origin.url) as daemon:
        origin.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            with racer.Client(socket=daemon.socket("local")) as client:
                reading = pool.submit(client.read, "racer://local/models/weights.bin", 0, 60_000)
                assert origin.waiting.acquire(timeout=30)
                assert daemon.process is not None
                daemon.process.send_signal(signal.SIGTERM)
                eventually(lambda: "draining" in daemon.get("/readyz"), "not ready any more")
                origin.gate.set()
                assert reading.result(30) == want
            assert daemon.process.wait(30) == 0


def test_a_second_sigterm_does_not_wait(tmp_path: Path, origin: CountingOrigin) -> None:
    with served(tmp_path, origin.url) as daemon:
        origin.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            client = racer.Client(socket=daemon.socket("local"), timeout=3)
            reading = pool.submit(client.read, "racer://local/models/weights.bin")
            assert origin.waiting.acquire(timeout=30)
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            eventually(lambda: "draining" in daemon.get("/readyz"), "not ready any more")
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(10) != 0
            origin.gate.set()
            with pytest.raises(racer.RacerError):
                reading.result(30)
            client.close()


def test_a_live_socket_is_refused(tmp_path: Path, models: Path) -> None:
    """F77: two daemons cannot take one socket; the second says who has it."""
    with served(tmp_path, f"file://{models}") as daemon:
        second = DaemonProcess(
            tmp_path / "second",
            caches={"local": f"file://{models}"},
            arguments=[
                f"--run-dir={daemon.run_dir}",
                "--disk=" + str(tmp_path / "slab2") + ":64MiB",
            ],
        )
        with pytest.raises(RuntimeError, match="another process listens"):
            second.start()
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read("racer://local/models/config.json") == b"{}"


def test_a_slab_in_use_is_refused_like_a_socket_in_use(tmp_path: Path, models: Path) -> None:
    """F37: one message, with what to do, and the status of wrong settings."""
    with served(tmp_path, f"file://{models}"):
        second = DaemonProcess(
            tmp_path / "second",
            caches={"local": f"file://{models}"},
            arguments=[*SMALL, f"--disk={tmp_path / 'slab'}:64MiB"],
        )
        with pytest.raises(RuntimeError, match="ended with 2"):
            second.start()
        told = [line for line in second.log.splitlines() if "slab" in line]
        assert len(told) == 1 and "another process has it" in told[0]
        assert "stop that daemon" in told[0] and "dmesg" not in second.log


def test_an_origin_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    """The daemon starts, since a mount may come later, and says so twice: log and greeting."""
    with served(tmp_path, f"file://{tmp_path}/later") as daemon:
        assert f"origin file://{tmp_path}/later (not there yet)" in daemon.started_text
        assert "WARNING" in daemon.log and "fail for now: not there yet" in daemon.log


def test_socket_and_key_modes(tmp_path: Path, models: Path) -> None:
    """F77: the socket is 0660 and the key file 0600."""
    with served(tmp_path, f"file://{models}") as daemon:
        assert stat.S_IMODE(daemon.socket("local").stat().st_mode) == 0o660
        keys = [p for p in daemon.state_dir.rglob("*key*") if p.is_file()]
        assert keys and all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in keys)


def test_nothing_readable_lies_on_disk(tmp_path: Path, models: Path) -> None:
    """R20: no run of plaintext is found in the slab."""
    want = content(1, 1_000_003)
    with served(tmp_path, f"file://{models}") as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            client.read("racer://local/models/weights.bin")
        kept(daemon, 16)
    slab = (tmp_path / "slab").read_bytes()
    assert not any(want[at : at + 32] in slab for at in range(0, len(want) - 32, 65_536))


def test_rot_is_found_before_anybody_reads_it(tmp_path: Path, models: Path) -> None:
    """R22: the running daemon checks idle disks, drops what is rotten, and says so."""
    want = content(1, 1_000_003)
    url = "racer://local/models/weights.bin"
    with (
        served(tmp_path, f"file://{models}", "--scrub-bytes-per-second=1GiB") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
    ):
        client.prefetch(url)
        kept(daemon, 16)
        slab = tmp_path / "slab"
        data = slab.read_bytes()
        with slab.open("r+b") as file:
            for at in range(0, len(data), 65_536):
                if any(data[at : at + 65_536]):
                    file.seek(at + 40_000)
                    file.write(b"rot")
        eventually(
            lambda: daemon.metric("racer_corrupt_pages_total", rung="disk") > 0, "rot is found"
        )
        assert daemon.metric("racer_store_pages") < 16
        assert client.read(url) == want
        assert '"state": "normal"' in daemon.get("/readyz")


def test_caches_come_and_go_without_a_restart(tmp_path: Path, models: Path) -> None:
    """R31: a changed file adds and removes caches; SIGHUP does it at once."""
    config = tmp_path / "racer.toml"
    config.write_text(f'[caches.one]\norigin = "file://{models}"\n')
    daemon = DaemonProcess(
        tmp_path, caches={}, arguments=[*SMALL, f"--config={config}", f"--disk={tmp_path}/s:8MiB"]
    )
    with daemon:
        assert daemon.socket("one").exists()
        config.write_text(f'[caches.two]\norigin = "file://{models}"\n')
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: daemon.socket("two").exists(), "the new cache's socket")
        eventually(lambda: not daemon.socket("one").exists(), "the old cache's socket gone")
        with racer.Client(socket=daemon.socket("two")) as client:
            assert client.read("racer://two/models/config.json") == b"{}"
        config.write_text("[caches.three]\norigin = 7\n")
        daemon.process.send_signal(signal.SIGHUP)
        eventually(
            lambda: daemon.metric("racer_reloads_total", result="refused") >= 1,
            "a bad file is refused",
        )
        with racer.Client(socket=daemon.socket("two")) as client:
            assert client.read("racer://two/models/config.json") == b"{}"


def test_gpu_on_fails_clearly_without_one(tmp_path: Path, models: Path) -> None:
    """R17: `--gpu=on` fails at startup when there is no GPU; auto serves."""
    daemon = DaemonProcess(tmp_path, caches={"local": f"file://{models}"}, arguments=["--gpu=on"])
    with pytest.raises(RuntimeError, match=r"(?i)gpu"):
        daemon.start()


def test_descriptors_return_to_the_start(tmp_path: Path, models: Path) -> None:
    """R5: after clients with targets came and went, the daemon holds what it held before."""
    with served(tmp_path, f"file://{models}") as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            client.read("racer://local/models/weights.bin")
        eventually(lambda: daemon.metric("racer_connections") == 0, "no connection")
        before = daemon.metric("racer_open_descriptors")
        for _ in range(20):
            with (
                racer.Client(socket=daemon.socket("local")) as client,
                client.map("racer://local/models/weights.bin"),
            ):
                pass
        eventually(lambda: daemon.metric("racer_connections") == 0, "no connection")
        eventually(
            lambda: daemon.metric("racer_open_descriptors") <= before, "descriptors are back"
        )
        eventually(lambda: daemon.metric("racer_targets") == 0, "no target is left")


def test_memory_stays_within_the_budgets(tmp_path: Path, models: Path) -> None:
    """R24, F10: many readers of more than every budget; nothing queues without a bound."""
    big = models / BUCKET / "big.bin"
    big.write_bytes(content(2, 48 << 20))
    want = big.read_bytes()
    with served(tmp_path, f"file://{models}", "--memory=16MiB") as daemon:

        def read(number: int) -> bool:
            with racer.Client(socket=daemon.socket("local")) as client:
                start = number * 1_000_000
                return client.read("racer://local/models/big.bin", offset=start) == want[start:]

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(read, range(6)))
        for budget in ("memory", "plaintext", "dirty"):
            used = daemon.metric("racer_budget_used_bytes", budget=budget)
            assert used <= daemon.metric("racer_budget_limit_bytes", budget=budget)


def test_curl_reads_it(tmp_path: Path, models: Path) -> None:
    """R3: plain operations need no client library."""
    with served(tmp_path, f"file://{models}") as daemon:
        got = subprocess.run(
            ["curl", "-sS", "--fail", "--unix-socket", str(daemon.socket("local")), "-r", "10-19",
             "http://racer/v1/objects/models/weights.bin"],
            capture_output=True, check=True,
        )  # fmt: skip
        assert got.stdout == content(1, 1_000_003)[10:20]


def test_forked_children_and_threads_share_a_client(tmp_path: Path, models: Path) -> None:
    """R33: one client is used by many threads at once."""
    want = content(1, 1_000_003)
    with (
        served(tmp_path, f"file://{models}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        starts = [n * 37_003 for n in range(24)]
        parts = pool.map(
            lambda at: client.read("racer://local/models/weights.bin", offset=at, length=50_000),
            starts,
        )
        assert all(got == want[at : at + 50_000] for got, at in zip(parts, starts, strict=True))


def test_a_changed_object_is_another_version(tmp_path: Path, models: Path) -> None:
    """R3, F55, F65: a pinned read of a replaced object fails, another sees the new bytes."""
    url = "racer://local/models/weights.bin"
    with (
        served(tmp_path, f"file://{models}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
    ):
        old = client.stat(url)
        path = models / BUCKET / "weights.bin"
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content(9, 500_000))
        os.replace(fresh, path)
        with pytest.raises(racer.VersionChanged):
            client.read(url, etag=old.etag)
        eventually(lambda: client.stat(url).etag != old.etag, "the new version is seen")
        assert client.read(url) == content(9, 500_000)


def test_no_socket_says_which_and_what_to_check(tmp_path: Path) -> None:
    with (
        pytest.raises(racer.RacerError, match="socket"),
        racer.Client(socket=tmp_path / "nowhere") as client,
    ):
        client.stat("racer://local/models/config.json")
