"""What this machine, or this container, has: memory and disk space, for defaults.

Layer: config. Facts are read once (`Machine.here`, `file_system`); the arithmetic on them is pure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from racerd.units import GIB, MIB

MEMORY_SHARE = 4
MEMORY_MAX = 16 * GIB
MEMORY_MIN = 64 * MIB
SHARE_SHARE = 4
SHARE_MAX = 64 * GIB
PLAINTEXT_SHARE = 8
PLAINTEXT_MAX = 512 * MIB
PLAINTEXT_MIN = 64 * MIB
SLAB_SHARE = 2
SLAB_MAX = 64 * GIB
SLAB_MIN = 256 * MIB

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT_MAX = 1 << 60  # Cgroup v1 says "no limit" with a number near 2**63.


@dataclass(frozen=True)
class Machine:
    """Bytes of memory that are available, and the container's limit; None where there is none."""

    available_bytes: int
    limit_bytes: int | None

    @classmethod
    def here(cls) -> Machine:
        return cls(_available_bytes(), _cgroup_limit_bytes())

    @property
    def _usable_bytes(self) -> int:
        return min(self.available_bytes, self.limit_bytes or self.available_bytes)

    @property
    def memory_default(self) -> int:
        """The memory tier: a quarter, at most 16 GiB, at least 64 MiB; whole MiB."""
        share = self._usable_bytes // MEMORY_SHARE // MIB * MIB
        return max(MEMORY_MIN, min(MEMORY_MAX, share))

    @property
    def share_default(self) -> int:
        """Shared between readers: a quarter, at most 64 GiB; whole MiB. None is taken before
        somebody shares."""
        return min(SHARE_MAX, self._usable_bytes // SHARE_SHARE // MIB * MIB)

    @property
    def plaintext_default(self) -> int:
        """Plaintext in flight: an eighth, at most 512 MiB, at least 64 MiB; whole MiB."""
        share = self._usable_bytes // PLAINTEXT_SHARE // MIB * MIB
        return max(PLAINTEXT_MIN, min(PLAINTEXT_MAX, share))


def closest_seen(path: Path) -> Path:
    """`path`, or the closest folder above it that this user can see.

    Below a folder that may not be searched nothing is seen; it counts as not there, as for open(2)
    it might as well be. Never raises: an answer for whoever asks what could be made where.
    """
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit_bytes() -> int | None:
    """The smallest memory limit of this process's cgroup and of those above it, v2 or v1."""
    limits = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits_upwards(_CGROUP, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(_CGROUP / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_upwards(root: Path, path: str, name: str) -> list[int]:
    """In a container the path may be the host's, which is not seen here; the root then is ours."""
    place = root / path.lstrip("/")
    limits = []
    for folder in (place, *place.parents):
        if not folder.is_relative_to(root):
            break
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < _LIMIT_MAX:
            limits.append(int(text))
    return limits


@dataclass(frozen=True)
class FileSystem:
    """Bytes of a file system, and what a slab on it has already: its size, and what it takes."""

    total_bytes: int
    free_bytes: int
    slab_bytes: int = 0
    slab_allocated_bytes: int = 0

    @classmethod
    def of(cls, slab: Path) -> FileSystem:
        """The file system where `slab` is, or will be."""
        found = os.statvfs(closest_seen(slab.parent))
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        try:
            existing = slab.stat()
        except OSError:
            return cls(total, free)
        return cls(total, free, existing.st_size, existing.st_blocks * 512)

    def slab_default(self, floor: float) -> int | None:
        """The size of a slab when nobody says: half of what the floor leaves, at most 64 GiB.

        `floor` is the share of the file system that stays free. An existing slab keeps its size,
        and with it its pages: where others have filled the file system since, the store gives
        space back while it runs. None where there is none, and not even 256 MiB can be had.
        """
        if self.slab_bytes >= SLAB_MIN:
            return min(self.slab_bytes, SLAB_MAX)
        # What the slab takes already is not free, but it is the slab's.
        room = self.free_bytes + self.slab_allocated_bytes - int(self.total_bytes * floor)
        size = min(room // SLAB_SHARE, SLAB_MAX) // MIB * MIB
        return size if size >= SLAB_MIN else None
