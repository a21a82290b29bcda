"""Settings of the store, as values.

Layer: store, pure. `racerd.config` reads them from flags, environment and TOML; here is only what
they mean and what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from racerd.units import MIB

FREE_FLOOR_RATIO_DEFAULT = 0.15


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """One slab: a file or a block device.

    `capacity_bytes` is the hard limit of the slab; None means all of a block device, or of a file
    system what the free-space floor leaves.
    """

    path: Path
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What an operator may choose. Times are seconds, sizes bytes; None means no limit.

    `free_floor_ratio`: share of a slab's file system that the slab never takes; kubelet evicts
    pods when a node's disk has less than 10 to 15 % left.
    `write_bytes_per_day`: per disk, for the wear of flash.
    `quotas`: bytes a cache may hold, over all disks together.
    `hang_seconds`: an I/O that runs longer takes its disk out of service until it answers.
    `wait_seconds_max`: how long `write`, `evict_*`, `checkpoint` and `close` wait for a disk.
    """

    disks: tuple[DiskSettings, ...]
    free_floor_ratio: float = FREE_FLOOR_RATIO_DEFAULT
    write_bytes_per_day: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    checkpoint_seconds: float = 300.0
    hang_seconds: float = 5.0
    wait_seconds_max: float = 10.0
    scrub_bytes_per_second: int = 8 * MIB

    def __post_init__(self) -> None:
        if not 0.0 <= self.free_floor_ratio < 1.0:
            raise ValueError(f"free_floor_ratio is {self.free_floor_ratio}, must be in [0, 1)")
        if len({disk.path for disk in self.disks}) != len(self.disks):
            raise ValueError("two disks of the store have the same path")
        if self.write_bytes_per_day is not None and self.write_bytes_per_day <= 0:
            raise ValueError("write_bytes_per_day must be positive, or left out")
        if any(limit < 0 for limit in self.quotas.values()):
            raise ValueError("a cache's quota must not be negative")
        for name in ("checkpoint_seconds", "hang_seconds", "wait_seconds_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if self.scrub_bytes_per_second < 0:
            raise ValueError("scrub_bytes_per_second must not be negative; 0 turns it off")
