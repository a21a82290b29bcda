"""A hard limit on one process's memory, with what the kernel keeps for it where that is possible.

A cgroup below our own (version 2, else version 1), which a container's limit would be. Where none
can be made, RLIMIT_DATA takes its place, which knows private memory alone; `how` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 10.0
_UNTOUCHED_BYTES = 1 << 30  # RLIMIT_DATA counts what is reserved, not what is used.


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version's files. `swap` is set to the limit, or to none, where it is there."""

    name: str
    limit: str
    peak: str
    failures: str


_V2 = _Version("cgroup v2", "memory.max", "memory.peak", "memory.events")
_V1 = _Version("cgroup v1", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt")


class MemoryLimit:
    """`with MemoryLimit(bytes) as limit:` a process started with `limit.command` is under it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.how = ""
        self._group: Path | None = None
        self._version = _V1

    def __enter__(self) -> MemoryLimit:
        refused = []
        for version, parent in _parents():
            group = parent / f"racer-overload-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                refused.append(f"{version.name}: {error}")
                continue
            try:
                (group / version.limit).write_text(str(self.limit_bytes))
            except OSError as error:
                group.rmdir()
                refused.append(f"{version.name}: {error}")
                continue
            self._group, self._version = group, version
            self.how = version.name
            return self
        why = "; ".join(refused) or "no memory controller is mounted"
        self.how = (
            f"NOT A CGROUP ({why}) but RLIMIT_DATA, {_UNTOUCHED_BYTES >> 30} GiB above it for the"
            " untouched stacks of threads: the kernel's memory is not limited"
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        until = time.monotonic() + _REMOVE_SECONDS
        while self._group is not None:
            try:
                self._group.rmdir()
                return
            except OSError:  # A process that has just ended is still in it for a moment.
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, to be started under the limit."""
        if self._group is None:
            kibibytes = (self.limit_bytes + _UNTOUCHED_BYTES) >> 10
            script = f'ulimit -d {kibibytes} && exec "$@"'
            return ["/bin/sh", "-c", script, "sh", *command]
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self._group), *command]

    def peak_bytes(self, process: int) -> int:
        """The most that was in use: of the group, or else of the process (resident)."""
        if self._group is not None:
            with suppress(OSError, ValueError):  # Older kernels of version 2 keep no peak.
                return int((self._group / self._version.peak).read_text())
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        return 0

    @property
    def hit(self) -> int:
        """How often the limit was run against, and memory had to be reclaimed for it."""
        if self._group is None:
            return 0
        text = (self._group / self._version.failures).read_text()
        counts = dict(line.split() for line in text.splitlines() if " " in line)
        return int(counts.get("max", 0) if counts else text)


def _parents() -> list[tuple[_Version, Path]]:
    """Groups in which ours may be made: our own, by each version that controls memory."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = path.lstrip("/")
        if not controllers:
            for root in (_ROOT, _ROOT / "unified"):
                usable = root / own / "cgroup.subtree_control"
                if usable.is_file() and "memory" in usable.read_text().split():
                    found.append((_V2, root / own))
        elif "memory" in controllers.split(","):
            found.append((_V1, _ROOT / "memory" / own))
    return found
