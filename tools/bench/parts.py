"""What `make bench` measures, part by part. Each part starts daemons of its own and stops them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import racer
from racerd.pages import FRAME_BYTES_DEFAULT, PAGE_BYTES_DEFAULT
from racerd.units import GIB, MIB, format_bytes
from tests.servers.nginx import nginx
from tools.bench.baseline import BareDecrypt, bare_obstore, bare_preadv
from tools.bench.report import Figure, paired, ratio
from tools.daemon_process import DaemonProcess

CORES = os.cpu_count() or 1
DISK_THREADS = 4
COLD_REQUESTS = 8
COLD_RATE = 50_000_000  # Bytes per second of one connection.
HOT_CLIENTS = 16
HOT_RATES = (20, 50, 100)  # Reads per second of one client.
HOT_SECONDS = 6.0
BUDGET_CLIENTS = 32
_OBJECT = "bench/object.bin"
_URL = f"racer://local/{_OBJECT}"


@dataclass(frozen=True)
class Options:
    """`folder` is empty and on a disk; `size` is the object's, in bytes."""

    folder: Path
    size: int
    rounds: int


def _make_object(options: Options) -> Path:
    """The folder of a directory origin that holds the object."""
    root = options.folder / "objects"
    path = root / _OBJECT
    if not path.exists():
        path.parent.mkdir(parents=True)
        block = os.urandom(16 * MIB)
        with path.open("wb") as file:
            for _ in range(options.size // len(block)):
                file.write(block)
    return root


@contextmanager
def _daemon(options: Options, name: str, url: str, *arguments: str) -> Iterator[DaemonProcess]:
    folder = options.folder / name
    slab = f"--disk={folder / 'slab'}:{2 * options.size + GIB // 4}"
    daemon = DaemonProcess(folder, caches={"local": url}, arguments=[slab, *arguments])
    with daemon:
        yield daemon


def _wait_kept(daemon: DaemonProcess) -> None:
    while daemon.metric("racer_budget_used_bytes", budget="dirty") > 0:
        time.sleep(0.1)


def _cpu_seconds(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_resident_bytes(pid: int) -> int:
    """Resident memory without the clients' memory that is mapped: what the daemon itself holds."""
    total = 0
    ours = True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            ours = "memfd:" not in rest or "memfd:racerd" in rest
        elif name == "Rss:" and ours:
            total += int(rest.split()[0]) * 1024
    return total


def _speed(landing: racer.Landing, size: int) -> float:
    start = time.perf_counter()
    got = landing.read(_URL, 0, size)
    seconds = time.perf_counter() - start
    if got.bytes != size:
        raise RuntimeError(f"{got.bytes} of {size} bytes came")
    return size / seconds


def memory(options: Options) -> list[Figure]:
    """Host-read of pages in the memory tier against bare decryption of as many bytes."""
    origin = f"file://{_make_object(options)}"
    bare = BareDecrypt(options.size, FRAME_BYTES_DEFAULT, CORES)
    budget = f"--memory={options.size + options.size // 4 + 64 * MIB}"
    with (
        _daemon(options, "memory", origin, budget) as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        client.landing(options.size) as landing,
    ):
        landing.read(_URL, 0, options.size)
        _wait_kept(daemon)
        cpu = _cpu_seconds(daemon)
        ours, alone = paired(lambda: _speed(landing, options.size), bare.run, options.rounds)
        cpu = (_cpu_seconds(daemon) - cpu) / (options.rounds * options.size / GIB)
        del bare  # Its memory makes room for the other's.
        huge = BareDecrypt(options.size, FRAME_BYTES_DEFAULT, CORES, huge=True)
        again, best = paired(lambda: _speed(landing, options.size), huge.run, options.rounds)
        return [
            ratio("host-read from memory / decrypt_into", ours, alone, ">= 0.85", "all cores"),
            ratio("  the same / decrypt_into in huge pages", again, best, "", "all cores"),
            Figure("  daemon CPU", cpu, "s/GiB"),
        ]


def disk(options: Options) -> list[Figure]:
    """Host-read of pages on disk against the slower of bare decryption and bare O_DIRECT."""
    origin = f"file://{_make_object(options)}"
    bare = BareDecrypt(options.size, FRAME_BYTES_DEFAULT, CORES)
    # A memory tier far smaller than the object: each pass reads everything from the slab.
    with (
        _daemon(options, "disk", origin, "--memory=128MiB") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        client.landing(options.size) as landing,
    ):
        client.prefetch(_URL)  # Returns once every page is kept, however slow the disk is.
        _wait_kept(daemon)
        slab = daemon.folder / "slab"
        before = daemon.metric("racer_rung_bytes_total", rung="disk")
        ours, plain = paired(
            lambda: _speed(landing, options.size),
            lambda: bare_preadv(slab, options.size, PAGE_BYTES_DEFAULT, DISK_THREADS),
            options.rounds,
        )
        served = daemon.metric("racer_rung_bytes_total", rung="disk") - before
        opened = statistics.median(bare.run() for _ in range(options.rounds))
        return [
            ratio(
                "host-read from disk / slower of pread, decrypt",
                ours,
                min(plain, opened),
                ">= 0.85",
                f"pread {plain / 1e9:.2f}, decrypt {opened / 1e9:.2f} GB/s",
            ),
            Figure("  share that the disk served", served / (options.rounds * options.size)),
        ]


def cold(options: Options) -> list[Figure]:
    """The first load through racerd against obstore alone, from the same local nginx.

    Once as fast as nginx sends, where both are bound by the cores they share with it; and once
    from an origin of 50 MB/s a connection, as far ones are.
    """
    root = _make_object(options)
    spent: list[float] = []
    fast = _cold_pair(options, root, 0, spent)
    slow = _cold_pair(options, root, COLD_RATE, [])
    return [
        ratio("cold fill / obstore alone", *fast, ">= 0.8", f"{CORES} cores, nginx on them too"),
        Figure("  daemon CPU", statistics.median(spent), "s/GiB", "", "all of it, disk included"),
        ratio("cold fill / obstore, 50 MB/s a connection", *slow, ">= 0.8", "the same, throttled"),
    ]


def _cold_pair(options: Options, root: Path, rate: int, spent: list[float]) -> tuple[float, float]:
    """Medians of (ours, obstore alone) in bytes per second; `spent` gets CPU seconds per GiB."""
    passes = iter(range(1_000_000))
    with nginx(options.folder / f"nginx-{rate}", root, rate=rate) as server:

        def ours() -> float:
            name = f"cold-{rate}-{next(passes)}"
            with (
                _daemon(
                    options,
                    name,
                    server.url,
                    f"--memory={options.size * 2}",
                    f"--origin-threads={COLD_REQUESTS}",
                ) as daemon,
                racer.Client(socket=daemon.socket("local")) as client,
                client.landing(options.size) as landing,
            ):
                before = _cpu_seconds(daemon)
                speed = _speed(landing, options.size)
                _wait_kept(daemon)
                spent.append((_cpu_seconds(daemon) - before) / (options.size / GIB))
                return speed

        def alone() -> float:
            return bare_obstore(
                server.url, _OBJECT, options.size, PAGE_BYTES_DEFAULT, COLD_REQUESTS
            )

        return paired(ours, alone, options.rounds)


_HOT_READER = """
import random, sys, time, racer
socket, url, size, rate, seconds = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])
random.seed(socket + sys.argv[0] + str(time.time_ns()))
with racer.Client(socket=socket) as client:
    client.read(url, 0, 4096)
    print("ready", flush=True)
    sys.stdin.readline()  # All start together, when starting them has cost what it costs.
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        at = random.randrange(int(size) - 4096)
        start = time.perf_counter()
        client.read(url, at, 4096)
        took.append(time.perf_counter() - start)
        if rate:
            time.sleep(random.expovariate(rate))
print(*took)
"""


def _hot_readers(daemon: DaemonProcess, size: int, rate: float) -> list[float]:
    """Latencies in seconds of all readers, each a process of its own."""
    command = [
        *(sys.executable, "-c", _HOT_READER, str(daemon.socket("local")), _URL),
        *(str(size), str(rate), str(HOT_SECONDS)),
    ]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(HOT_CLIENTS)
    ]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    daemon.get("/metrics")  # A scrape starts a new maximum of the loop's lag.
    took: list[float] = []
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    for reader in readers:
        output, _ = reader.communicate()
        if reader.returncode:
            raise RuntimeError(f"a reader ended with {reader.returncode}")
        took += map(float, output.split())
    return sorted(took)


def hot(options: Options) -> list[Figure]:
    """4 KiB reads at random places of cached pages, by 16 client processes."""
    origin = f"file://{_make_object(options)}"
    with (
        _daemon(options, "hot", origin, f"--memory={2 * options.size}") as daemon,
        racer.Client(socket=daemon.socket("local")) as client,
        client.landing(options.size) as landing,
    ):
        landing.read(_URL, 0, options.size)
        _wait_kept(daemon)
        figures = []
        for rate in HOT_RATES:
            took = _hot_readers(daemon, options.size, rate)
            lag = daemon.metric("racer_loop_lag_max_seconds")
            load = f"{HOT_CLIENTS} clients, {len(took) / HOT_SECONDS:.0f} reads/s together"
            p50, p99 = 1e3 * took[len(took) // 2], 1e3 * took[int(len(took) * 0.99)]
            figures += [
                Figure(f"hot 4 KiB read, {rate}/s each, p50", p50, "ms", "< 1", load),
                Figure(f"hot 4 KiB read, {rate}/s each, p99", p99, "ms", "< 5"),
                Figure("  loop held at most", 1e3 * lag, "ms", "< 10", "timer lag, same run"),
            ]
        took = _hot_readers(daemon, options.size, 0.0)
        load = f"{HOT_CLIENTS} clients flat out, {len(took) / HOT_SECONDS:.0f} reads/s"
        return [
            *figures,
            Figure("  p50 when saturated", 1e3 * took[len(took) // 2], "ms", "", load),
            Figure("  p99 when saturated", 1e3 * took[int(len(took) * 0.99)], "ms"),
        ]


def budget(options: Options) -> list[Figure]:
    """Memory of the daemon while 32 clients read an object larger than every budget."""
    origin = f"file://{_make_object(options)}"
    memory_bytes = 128 * MIB
    with _daemon(options, "budget", origin, f"--memory={memory_bytes}") as daemon:
        assert daemon.process is not None
        pid, stop, peak = daemon.process.pid, threading.Event(), [0]

        def sample() -> None:
            while not stop.wait(0.05):
                peak[0] = max(peak[0], own_resident_bytes(pid))

        def load(number: int) -> None:
            with (
                racer.Client(socket=daemon.socket("local")) as client,
                client.landing(32 * MIB) as landing,
            ):
                for step in range(0, options.size, 32 * MIB):
                    at = (step + number * 32 * MIB) % options.size
                    landing.read(_URL, at, min(32 * MIB, options.size - at))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            with ThreadPoolExecutor(BUDGET_CLIENTS) as pool:
                list(pool.map(load, range(BUDGET_CLIENTS)))
        finally:
            stop.set()
            sampler.join()
        limits = sum(
            daemon.metric("racer_budget_limit_bytes", budget=name)
            for name in ("memory", "plaintext", "dirty")
        )
        return [
            Figure(
                "peak memory beyond the budgets",
                (peak[0] - limits) / MIB,
                "MiB",
                "<= 300",
                f"{format_bytes(peak[0])} at most, budgets {format_bytes(int(limits))},"
                f" {BUDGET_CLIENTS} clients",
            )
        ]


def store(options: Options) -> list[Figure]:
    """Index bytes per page, and recovery of 250,000 pages from a checkpoint."""
    from tools.bench.store import index_figures

    return index_figures(options.folder)
