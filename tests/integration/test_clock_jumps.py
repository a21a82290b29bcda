"""The wall clock jumps by a year under a running daemon, forwards and backwards.

Only the daemon's wall clock is moved: deadlines, times to live, pauses between retries and the
scrubber's pace must not notice. Its log does, which proves that the clock was really moved.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import racer
from tests.support.counting_origin import CountingOrigin
from tests.support.wall_clock import YEAR_SECONDS, WallClock
from tools.daemon_process import DaemonProcess

SIZE = 600_001
DATA = random.Random(3).randbytes(SIZE)
URL = "racer://local/models/weights.bin"
OTHER = "racer://local/models/other.bin"
JUMPS = pytest.mark.parametrize("jump", [YEAR_SECONDS, -YEAR_SECONDS], ids=["ahead", "back"])


def eventually(true: Callable[[], bool], what: str) -> None:
    """Waits for a state of another process. Bounded; the wait is not what is tested."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[CountingOrigin]:
    (tmp_path / "models").mkdir()
    for name in ("weights.bin", "other.bin"):
        (tmp_path / "models" / name).write_bytes(DATA)
    with CountingOrigin(tmp_path) as counting:
        yield counting


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


def served(folder: Path, url: str, clock: WallClock, *arguments: str) -> DaemonProcess:
    small = ["--page-bytes=64KiB", "--frame-bytes=16KiB", "--memory=8MiB"]
    return DaemonProcess(
        folder,
        caches={"local": url},
        arguments=[*small, f"--disk={folder / 'slab'}:16MiB", *arguments],
        environ=clock.environ,
    )


def year_of(jump: int) -> str:
    return str((datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=jump)).year)


@JUMPS
def test_a_read_that_runs_keeps_its_deadline(
    tmp_path: Path, origin: CountingOrigin, clock: WallClock, jump: int
) -> None:
    """A year more or less is neither the end of a deadline of 300 s nor its extension; the next
    request with a deadline of one second ends by it, and not in a year."""
    daemon = served(tmp_path, origin.url, clock)
    with (
        daemon,
        ThreadPoolExecutor(1) as pool,
        racer.Client(socket=daemon.socket("local")) as client,
    ):
        origin.gate.clear()
        reading = pool.submit(client.read, URL, timeout=300)
        assert origin.waiting.acquire(timeout=30)
        clock.jump(jump)
        with pytest.raises(racer.DeadlineExceeded):
            client.read(OTHER, timeout=1)
        assert not reading.done()
        origin.gate.set()
        assert reading.result(30) == DATA
        eventually(lambda: daemon.metric("racer_flights") == 0, "nothing is left running")
        daemon.stop()
    assert f"{year_of(jump)}-" in daemon.log.splitlines()[-1], "the wall clock did not jump"


def test_a_version_does_not_expire_because_the_wall_clock_is_ahead(
    tmp_path: Path, origin: CountingOrigin, clock: WallClock
) -> None:
    """F51: one HEAD, though a year seems to have passed."""
    with served(tmp_path, origin.url, clock, "--version-seconds=3600") as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            client.stat(URL)
            clock.jump(YEAR_SECONDS)
            assert client.read(URL) == DATA
            assert origin.requests["HEAD"] == 1


def test_a_version_does_expire_though_the_wall_clock_is_back(
    tmp_path: Path, origin: CountingOrigin, clock: WallClock
) -> None:
    """F51: its second ends all the same, and a new version is seen."""
    with served(tmp_path, origin.url, clock, "--version-seconds=1") as daemon:
        with racer.Client(socket=daemon.socket("local")) as client:
            old = client.stat(URL)
            clock.jump(-YEAR_SECONDS)
            (tmp_path / "models" / "weights.bin").write_bytes(DATA[::-1])
            eventually(lambda: client.stat(URL).etag != old.etag, "the new version is seen")
            assert client.read(URL) == DATA[::-1]


@JUMPS
def test_retries_and_what_is_kept(
    tmp_path: Path, origin: CountingOrigin, clock: WallClock, jump: int
) -> None:
    """A failing origin is tried again after a pause, pages reach the disk, the scrubber goes on,
    and after a kill everything is found: none of it at the wrong time."""
    daemon = served(
        tmp_path, origin.url, clock, "--scrub-bytes-per-second=16MiB", "--checkpoint-seconds=1"
    )
    with daemon:
        with (
            ThreadPoolExecutor(1) as pool,
            racer.Client(socket=daemon.socket("local")) as client,
        ):
            client.prefetch(OTHER)
            origin.broken = True
            reading = pool.submit(client.prefetch, URL)
            eventually(lambda: origin.requests.total() >= 12, "the origin was asked")
            clock.jump(jump)
            origin.broken = False
            reading.result(30)
            assert daemon.metric("racer_origin_retries_total") > 0
            before = daemon.metric("racer_store_scrubbed_bytes_total")
            eventually(
                lambda: daemon.metric("racer_store_scrubbed_bytes_total") > before + SIZE,
                "the scrubber goes on",
            )
            clock.jump(0)  # And back again.
            assert client.read(URL) == DATA
        daemon.kill()
        daemon.start()
        origin.requests.clear()
        with racer.Client(socket=daemon.socket("local")) as client:
            assert client.read(URL) == DATA == client.read(OTHER)
        assert origin.requests["GET"] == 0
