"""More clients and reads than racerd has room for, and a hard limit on its memory.

    python -m tools.torture overload --connections 1000 --seed 1

Some clients ask and never read. Every other one asks for more than its share of every budget, again
and again, and waits for as long as `Retry-After` says. The daemon must not die, must
stay below the limit, and must tell 503 and nothing else; everybody who reads must get everything in
the end. How even their progress was is shown; no time is judged.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from racerd.units import MIB, format_bytes, parse_bytes
from tools.daemon_process import DaemonProcess
from tools.torture.hostile import Connection, head
from tools.torture.memory_limit import MemoryLimit
from tools.torture.slow_origin import SlowOrigin
from tools.torture.vitals import Slack, Vitals, settled

_OBJECT_BYTES = 4 * MIB
_WORKERS = 2
_PATIENCE_SECONDS = 60.0
_SAMPLE_SECONDS = 0.2
# Budgets far below what is asked for.
_DAEMON = (
    *("--memory=32MiB", "--plaintext=32MiB", "--dirty=8MiB", "--page-bytes=1MiB"),
    *("--frame-bytes=64KiB", "--request-pages=4", "--connection-pages=4", "--origin-threads=16"),
    *("--scrub-bytes-per-second=0", "--log-level=warning"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=6, help="of each client (6)")
    parser.add_argument("--deaf", type=int, default=500, metavar="N",
                        help="more clients, which ask and never read (500)")  # fmt: skip
    parser.add_argument("--connections-max", type=int, default=2000, help="racerd's (2000)")
    parser.add_argument("--memory-limit", type=parse_bytes, default=256 * MIB, metavar="BYTES")
    parser.add_argument("--seed", type=int, default=None, help="printed where not given")


def run(arguments: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"overload: {arguments.connections} clients, --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="racer-overload-", dir="/var/tmp") as folder:
        campaign = Overload(Path(folder), seed, arguments.connections_max, arguments.memory_limit)
        found = campaign.run(arguments.connections, arguments.requests, arguments.deaf)
    for line in found.lines():
        print(line)
    return 1 if found.broken else 0


class Found:
    """What came of it; `broken` are the promises that were not kept."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.told: Counter[str] = Counter()
        self.bytes = 0
        self.waited_seconds_max = 0.0
        self.finished: list[float] = []  # Seconds after which each client had all it wanted.
        self.limit = ""
        self.limit_bytes = 0
        self.peak_bytes = 0
        self.limit_hits = 0
        self.spread: tuple[int, int, int] | None = None  # Least, mean, most requests half-way.
        self.fullest: dict[str, float] = {}  # Of each budget, the most of its limit in use.

    @property
    def refused(self) -> int:
        return sum(count for told, count in self.told.items() if ": 503" in told)

    def lines(self) -> list[str]:
        shown = [f"  {count:6}  {what}" for what, count in sorted(self.told.items())]
        shown += [
            f"{format_bytes(self.bytes)} right bytes; {self.refused} times 503",
            f"memory: {format_bytes(self.peak_bytes)} at most of {format_bytes(self.limit_bytes)}"
            f" ({self.limit}); the limit was met {self.limit_hits} times",
            f"the longest that one request took, retries included: {self.waited_seconds_max:.1f} s",
            *(f"budget {name}: at most {share:.2f} of its limit"
              for name, share in sorted(self.fullest.items())),
        ]  # fmt: skip
        if self.spread is not None:
            least, mean, most = self.spread
            shown.append(
                f"half-way, requests done by one client: {least} at least, {mean} on average,"
                f" {most} at most"
            )
        if self.finished:
            first, last = min(self.finished), max(self.finished)
            mean = sum(self.finished) / len(self.finished)
            shown.append(
                f"clients were done after {first:.1f} to {last:.1f} s, on average {mean:.1f}"
            )
        return [*shown, *(f"BROKEN: {what}" for what in self.broken)]


class _LimitedDaemon(DaemonProcess):
    """A daemon that starts under a memory limit."""

    limit: MemoryLimit

    @property
    def command(self) -> list[str]:
        return self.limit.command(super().command)


class Overload:
    """One run; `folder` is for the daemon."""

    def __init__(self, folder: Path, seed: int, connections_max: int, limit_bytes: int) -> None:
        self.folder = folder
        self.seed = seed
        self.connections_max = connections_max
        self.limit_bytes = limit_bytes
        self.found = Found()

    def run(self, connections: int, requests: int, deaf: int) -> Found:
        found = self.found
        with (
            SlowOrigin(_OBJECT_BYTES, pause_seconds=0.01) as origin,
            MemoryLimit(self.limit_bytes) as limit,
        ):
            daemon = _LimitedDaemon(
                self.folder,
                caches={"cache": origin.url},
                arguments=[
                    *_DAEMON,
                    f"--connections-max={self.connections_max}",
                    f"--disk={self.folder / 'slab'}:256MiB",
                ],
            )
            daemon.limit = limit
            found.limit, found.limit_bytes = limit.how, limit.limit_bytes
            with daemon:
                assert daemon.process is not None
                self._clients(daemon, range(8), 2)  # What is allocated once is there from now on.
                found.told.clear()
                found.bytes = 0
                found.finished.clear()
                start = Vitals.of(daemon)
                with _Sampler(daemon, found), _deaf(daemon.socket("cache"), deaf):
                    self._clients(daemon, range(connections), requests)
                if daemon.process.poll() is not None:
                    found.broken.append(f"the daemon died: {daemon.process.returncode}")
                    found.broken.append(daemon.log[-2000:])
                    daemon.process = None
                    return found
                found.peak_bytes = limit.peak_bytes(daemon.process.pid)
                found.limit_hits = limit.hit
                slack = Slack(resident_bytes=self.limit_bytes)
                _, left = settled(
                    lambda: Vitals.of(daemon), start, slack, patience_seconds=_PATIENCE_SECONDS
                )
                found.broken += [f"left behind: {what}" for what in left]
            if "Traceback" in daemon.log:
                found.broken.append(f"the daemon's log has a defect:\n{daemon.log[-4000:]}")
        return found

    def _clients(self, daemon: DaemonProcess, numbers: range, requests: int) -> None:
        command = [sys.executable, "-m", "tools.torture.overload_worker"]
        command += [str(daemon.socket("cache")), str(_OBJECT_BYTES), str(self.seed)]
        workers = [
            subprocess.Popen(
                [*command, f"{numbers.start + first}:{numbers.stop}:{_WORKERS}", str(requests)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(_WORKERS)
        ]
        progress = _Progress(_WORKERS, requests)
        readers = [
            threading.Thread(target=progress.follow, args=(index, worker))
            for index, worker in enumerate(workers)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        for worker in workers:
            if worker.wait():
                self.found.broken.append(f"a client process ended with {worker.returncode}")
        self._sum_up(progress, len(numbers), requests)

    def _sum_up(self, progress: _Progress, clients: int, requests: int) -> None:
        found = self.found
        done = [count for last in progress.last for count in last.get("done", ())]
        if len(done) != clients or any(count != requests for count in done):
            found.broken.append(f"not every client got all of its {requests} requests: {done}")
        found.spread = progress.spread
        for last in progress.last:
            found.told.update(last.get("told", {}))
            found.bytes += last.get("bytes", 0)
            found.broken += last.get("wrong", [])
            waited = last.get("waited_seconds_max", 0.0)
            found.waited_seconds_max = max(found.waited_seconds_max, waited)
            found.finished += last.get("finished", [])


@contextmanager
def _deaf(path: Path, count: int) -> Iterator[None]:
    """So many connections that ask for an object as fast as they can, and read none of it."""
    with ExitStack() as stack:
        asking = head("GET /v1/objects/b/fast/0", f"Range: bytes=0-{_OBJECT_BYTES - 1}")
        for _ in range(count):
            stack.enter_context(Connection(path)).send(asking)
        yield


class _Progress:
    """How far all clients are, and how far the first and the last of them were half-way."""

    def __init__(self, workers: int, requests: int) -> None:
        self.last: list[dict[str, Any]] = [{} for _ in range(workers)]
        self.spread: tuple[int, int, int] | None = None
        self._requests = requests
        self._lock = threading.Lock()

    def follow(self, index: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        with worker.stdout:
            for line in worker.stdout:
                with self._lock:
                    self.last[index] = json.loads(line)
                    self._look()

    def _look(self) -> None:
        done = [count for last in self.last for count in last.get("done", ())]
        if self.spread is None and done and all(self.last):
            mean = sum(done) / len(done)
            if mean >= self._requests / 2:
                self.spread = (min(done), round(mean), max(done))


class _Sampler:
    """Looks at the budgets while the clients run. None may ever be over its limit."""

    def __init__(self, daemon: DaemonProcess, found: Found) -> None:
        self._daemon = daemon
        self._found = found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            try:
                self._look()
            except OSError as error:  # The daemon is gone: the campaign says so.
                self._found.broken.append(f"the diagnostics do not answer: {error}")
                return

    def _look(self) -> None:
        exposition = self._daemon.get("/metrics")
        used = _by_budget(exposition, "racer_budget_used_bytes")
        limits = _by_budget(exposition, "racer_budget_limit_bytes")
        for name, limit in limits.items():
            share = used[name] / limit if limit else 0.0
            self._found.fullest[name] = max(share, self._found.fullest.get(name, 0.0))
            if share > 1:
                self._found.broken.append(f"budget {name} is over its limit: {share:.2f}")


def _by_budget(exposition: str, metric: str) -> dict[str, float]:
    found = {}
    for line in exposition.splitlines():
        if line.startswith(metric + "{"):
            sample, _, value = line.rpartition(" ")
            found[sample.split('"')[1]] = float(value)
    return found
