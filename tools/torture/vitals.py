"""What a racerd process holds, seen from outside: before and after a campaign it must be the same.

Descriptors, threads, mappings and resident memory come from /proc; connections, targets, flights,
tasks and what is charged to each budget come from the daemon's own metrics.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.daemon_process import DaemonProcess

_SAMPLE = re.compile(r"^(racer_\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)
# What has to be as it was, exactly. Budgets are charged while something is under way, but for
# `memory`, which is a cache.
_EXACT = re.compile(
    r"racer_(connections|targets|target_mapped_bytes|flights|tasks)(\{|$)"
    r'|racer_budget_used_bytes\{budget="(?!memory|dirty)'
)
_POLL_SECONDS = 0.2
_OTHER_SOCKET = "socket of TCP"


@dataclass(frozen=True, slots=True)
class Slack:
    """What may be more afterwards: an allocator keeps some memory, a pool some connections. What
    each of thousands of connections left behind would be far more."""

    mappings: int = 32
    resident_bytes: int = 32 << 20
    pooled: int = 24


@dataclass(frozen=True, slots=True)
class Vitals:
    """`descriptors` and `shared` count by kind: what a link in /proc/PID/fd or a line of
    /proc/PID/maps names, without numbers. `pooled` are the TCP sockets, which are idle connections
    to an origin and diagnostics: kept up to a number."""

    descriptors: Mapping[str, int]
    shared: Mapping[str, int]
    pooled: int
    threads: int
    mappings: int
    resident_bytes: int
    samples: Mapping[str, float]

    @classmethod
    def of(cls, daemon: DaemonProcess) -> Vitals:
        assert daemon.process is not None
        process = Path(f"/proc/{daemon.process.pid}")
        maps = (process / "maps").read_text().splitlines()
        status = (process / "status").read_text()
        exposition = daemon.get("/metrics")
        descriptors = _descriptors(process)
        pooled = descriptors.pop(_OTHER_SOCKET, 0)
        return cls(
            descriptors=descriptors,
            pooled=pooled,
            shared=Counter(line.split("memfd:", 1)[1] for line in maps if "memfd:" in line),
            threads=len(os.listdir(process / "task")),
            mappings=len(maps),
            resident_bytes=1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1]),  # type: ignore[index]
            samples={
                name + labels: float(value)
                for name, labels, value in _SAMPLE.findall(exposition)
                if _EXACT.match(name + labels)
            },
        )

    @property
    def busy(self) -> bool:
        """Whether something is under way. (Some tasks are there always.)"""
        return any(value for name, value in self.samples.items() if name != "racer_tasks")

    def left_behind(self, start: Vitals, slack: Slack) -> list[str]:
        """What this has more than `start`, but for `slack`."""
        found = [f"{more} more {kind}" for kind, more in _more(self.descriptors, start.descriptors)]
        found += [
            f"{more} more shared mappings {kind}" for kind, more in _more(self.shared, start.shared)
        ]
        found += [f"{name}: {more:g} more" for name, more in _more(self.samples, start.samples)]
        if self.pooled > slack.pooled:
            found.append(f"{self.pooled} TCP sockets, where a pool keeps {slack.pooled}")
        if self.threads > start.threads:
            found.append(f"{self.threads - start.threads} more threads")
        if self.mappings > start.mappings + slack.mappings:
            found.append(f"{self.mappings - start.mappings} more mappings")
        if self.resident_bytes > start.resident_bytes + slack.resident_bytes:
            grown = (self.resident_bytes - start.resident_bytes) >> 20
            found.append(f"{grown} MiB more resident memory")
        return found


def settled(
    read: Callable[[], Vitals],
    start: Vitals,
    slack: Slack,
    *,
    patience_seconds: float,
) -> tuple[Vitals, list[str]]:
    """Waits until nothing is left behind, or so long; returns the last look and what is left."""
    until = time.monotonic() + patience_seconds
    while True:
        now = read()
        left = now.left_behind(start, slack)
        if not left or time.monotonic() > until:
            return now, left
        time.sleep(_POLL_SECONDS)


def _descriptors(process: Path) -> Counter[str]:
    lines = (process / "net" / "unix").read_text().splitlines()[1:]
    unix = {f"socket:[{line.split()[6]}]" for line in lines}
    found: Counter[str] = Counter()
    for link in (process / "fd").iterdir():
        try:
            name = os.readlink(link)
        except FileNotFoundError:
            continue  # Closed meanwhile.
        kind = name.partition(":[")[0]
        found[_OTHER_SOCKET if kind == "socket" and name not in unix else kind] += 1
    return found


def _more(now: Mapping[str, float], start: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, n - start.get(name, 0)) for name, n in now.items() if n > start.get(name, 0)]
