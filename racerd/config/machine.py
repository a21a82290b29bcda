"""What this machine, or this container, has: memory and disk space, for defaults."""

from __future__ import annotations

import os
from pathlib import Path

from racerd.units import GIB, MIB

_MEMORY_SHARE = 4
_MEMORY_MAX = 16 * GIB
_MEMORY_MIN = 64 * MIB
_SLAB_MAX = 64 * GIB
_SLAB_SHARE = 2
_SLAB_MIN = 256 * MIB


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit_bytes() -> int | None:
    """The memory limit of this container: cgroup v2, else v1. None where there is none."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None


def memory_budget_default() -> int:
    """A quarter of what is available, at most 16 GiB, at least 64 MiB."""
    limits = [_available_bytes(), _cgroup_limit_bytes()]
    available = min(limit for limit in limits if limit is not None)
    return max(_MEMORY_MIN, min(_MEMORY_MAX, available // _MEMORY_SHARE))


def slab_bytes_default(folder: Path, free_space_floor: float) -> int:
    """Half of what the floor leaves free where `folder` is or will be, at most 64 GiB."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    found = os.statvfs(existing)
    spare = (found.f_bavail - found.f_blocks * free_space_floor) * found.f_frsize
    return max(_SLAB_MIN, min(_SLAB_MAX, int(spare) // _SLAB_SHARE))
