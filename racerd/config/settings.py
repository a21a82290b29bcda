"""The settings of one daemon, validated. Values only; `declarations` says where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from racerd.config.caches import CacheSettings
from racerd.pages import PageGeometry


@dataclass(frozen=True)
class DiskSettings:
    """One slab: a file that is made, or a block device. `size_bytes` None takes a default."""

    path: Path
    size_bytes: int | None = None


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds. Fields are named as in TOML; see docs/configuration.md."""

    state_dir: Path
    run_dir: Path
    key_file: Path
    gpu: str
    gpu_staging_bytes: int
    gpu_idle_seconds: float
    cufile_provider: str
    cufile_threads: int
    cufile_allow_compat_mode: bool
    kernel_cache: Path | None
    diagnostics: tuple[str, int] | None
    log_level: str
    log_format: str

    memory: int
    plaintext: int
    dirty: int
    share: int
    page_bytes: int
    frame_bytes: int
    request_pages: int
    connection_pages: int
    connections_max: int
    open_threads: int
    disk_threads: int
    origin_threads: int

    socket_mode: int
    socket_group: str | None

    deadline_seconds: float
    drain_seconds: float
    version_seconds: float
    disk_seconds: float
    write_seconds: float
    share_idle_seconds: float

    checkpoint_seconds: float
    scrub_bytes_per_second: int
    free_space_floor: float
    write_bytes_per_day: int | None

    disks: tuple[DiskSettings, ...]
    caches: Mapping[str, CacheSettings]

    @property
    def geometry(self) -> PageGeometry:
        return PageGeometry(self.page_bytes, self.frame_bytes)
