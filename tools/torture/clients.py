"""Hostile clients against a real racerd, with a well-behaved one beside them.

    python -m tools.torture clients --connections 10000 --seed 1

Every connection does something that a client must not, or ends where it must not. Afterwards the
daemon has to hold exactly what it held before, has to have given only the refusals of its protocol,
and the well-behaved client has to have got nothing but right bytes. Its throughput is shown against
itself alone; no time is judged.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.daemon_process import DaemonProcess
from tools.torture.hostile import Connection
from tools.torture.slow_origin import SlowOrigin
from tools.torture.vitals import Slack, Vitals, settled
from tools.torture.witness import Witness, Witnessed

_OBJECT_BYTES = 4 << 20
_WORKERS = 4
_WARM_UP_CONNECTIONS = 200
_PARKED_MAX = 40
_PATIENCE_SECONDS = 60.0
_ALONE_SECONDS = 5.0
_FILLERS = 2 * (64 << 20) // _OBJECT_BYTES  # Twice what fits into the daemon's memory.
_WITNESS_KEYS = [f"/b/fast/{number}" for number in range(4)]
_DAEMON = (
    *("--memory=64MiB", "--plaintext=32MiB", "--page-bytes=1MiB", "--frame-bytes=64KiB"),
    *("--scrub-bytes-per-second=0", "--log-level=warning"),
    *("--share=64MiB", "--share-idle-seconds=1"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="printed where not given")
    parser.add_argument("--alone-seconds", type=float, default=_ALONE_SECONDS, metavar="S",
                        help="how long the good client is measured alone first")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"hostile clients: {arguments.connections} connections, --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="racer-clients-", dir="/var/tmp") as folder:
        campaign = Campaign(Path(folder), seed)
        found = campaign.run(arguments.connections, arguments.alone_seconds)
    for line in found.lines():
        print(line)
    return 1 if found.broken else 0


class Found:
    """What a campaign found; `broken` are the promises that were not kept."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.broken: list[str] = []
        self.vitals: tuple[Vitals, Vitals] | None = None
        self.alone: Witnessed | None = None
        self.beside: Witnessed | None = None

    def lines(self) -> list[str]:
        shown = [f"  {count:6}  {what}" for what, count in sorted(self.told.items())]
        if self.vitals is not None:
            start, end = self.vitals
            shown += [
                f"descriptors {sum(start.descriptors.values())} -> {sum(end.descriptors.values())}",
                f"threads {start.threads} -> {end.threads}",
                f"TCP sockets {start.pooled} -> {end.pooled}",
                f"mappings {start.mappings} -> {end.mappings},"
                f" of shared memory {sum(start.shared.values())} -> {sum(end.shared.values())}",
                f"resident {start.resident_bytes >> 20} MiB -> {end.resident_bytes >> 20} MiB",
                *(f"{name} {start.samples.get(name, 0):g} -> {value:g}"
                  for name, value in sorted(end.samples.items())),
            ]  # fmt: skip
        if self.alone is not None and self.beside is not None:
            ratio = self.beside.bytes_per_second / self.alone.bytes_per_second
            shown.append(
                f"well-behaved client: {self.beside.reads} reads,"
                f" {self.beside.bytes >> 20} MiB, {self.beside.wrong} wrong,"
                f" {len(self.beside.failed)} failed; throughput {ratio:.2f} of what it had alone"
            )
        return [*shown, *(f"BROKEN: {what}" for what in self.broken or [])] or ["nothing ran"]


class Campaign:
    """One run; `folder` is for the daemon."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.found = Found()

    def run(self, connections: int, alone_seconds: float) -> Found:
        with SlowOrigin(_OBJECT_BYTES, pause_seconds=0.05) as origin:
            arguments = [*_DAEMON, f"--disk={self.folder / 'slab'}:256MiB"]
            caches = {"cache": origin.url}
            # A descriptor that the collector had to close is told in the log.
            environ = {"PYTHONWARNINGS": "always::ResourceWarning"}
            with DaemonProcess(
                self.folder, caches=caches, arguments=arguments, environ=environ
            ) as daemon:
                self._run(daemon, connections, alone_seconds)
                self._check_log(daemon)
        return self.found

    def _run(self, daemon: DaemonProcess, connections: int, alone_seconds: float) -> None:
        found, path = self.found, daemon.socket("cache")
        # What is allocated once is there from now on: a full cache, threads, buffers, heaps.
        with Connection(path) as client:
            for number in range(_FILLERS):
                answer = client.ask(f"POST /v1/prefetch/b/filler/{number}")
                assert answer.status == 200, answer
        warm_up = max(_WARM_UP_CONNECTIONS, connections // 5)
        self._attack(path, 0, warm_up, parked=0)
        found.told.clear()
        with self._witness(path) as witness:
            time.sleep(alone_seconds)
            found.alone = witness.look()
        start = _at_rest(daemon)
        with self._witness(path) as witness:
            self._attack(path, warm_up, warm_up + connections)
            found.beside = witness.look()
        self._judge(found.alone, found.beside)
        end, left = settled(
            lambda: Vitals.of(daemon),
            start,
            Slack(),
            patience_seconds=_PATIENCE_SECONDS,
        )
        found.vitals = (start, end)
        found.broken += [f"left behind: {what}" for what in left]

    def _witness(self, path: Path) -> Witness:
        return Witness(path, _OBJECT_BYTES, _WITNESS_KEYS, self.seed)

    def _attack(self, path: Path, first: int, last: int, *, parked: int = _PARKED_MAX) -> None:
        """Makes the connections `first` to `last`, from several processes at a time."""
        command = [sys.executable, "-m", "tools.torture.hostile_worker", str(path)]
        command += [str(_OBJECT_BYTES), str(self.seed)]
        spans = [f"{first + number}:{last}:{_WORKERS}" for number in range(_WORKERS)]
        workers = [
            subprocess.Popen([*command, span, str(parked)], stdout=subprocess.PIPE)
            for span in spans
        ]
        for worker in workers:
            output, _ = worker.communicate()
            if worker.returncode:
                self.found.broken.append(f"a hostile process ended with {worker.returncode}")
                continue
            told = json.loads(output)
            self.found.told.update(told["told"])
            self.found.broken += told["wrong"]

    def _judge(self, *looks: Witnessed) -> None:
        for look in looks:
            if look.wrong:
                self.found.broken.append(f"{look.wrong} reads of the good client were wrong")
            if not look.reads:
                self.found.broken.append("the good client read nothing")
            self.found.broken += [f"the good client: {error}" for error in look.failed]

    def _check_log(self, daemon: DaemonProcess) -> None:
        """A defect is logged with a trace; hostile clients must find none."""
        if "Traceback" in daemon.log or "ResourceWarning" in daemon.log:
            self.found.broken.append(f"the daemon's log has a defect:\n{daemon.log[-4000:]}")


def _at_rest(daemon: DaemonProcess) -> Vitals:
    """The daemon as it is once nothing is under way."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = Vitals.of(daemon)
        if not found.busy or time.monotonic() > until:
            return found
        time.sleep(0.2)
