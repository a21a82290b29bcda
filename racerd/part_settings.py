"""What each part of the daemon is told of the settings.

Layer: just below `app`, pure but for a look-up of a group's number. `config` reads and checks the
daemon's settings and knows no part; a part knows what it needs and not where it comes from.
"""

from __future__ import annotations

import grp

from racerd.config import Settings
from racerd.errors import ConfigError
from racerd.gpu.settings import ArenaShape, GpuSettings
from racerd.read.settings import ReadSettings
from racerd.runtime.arena import FrameArena
from racerd.serve.settings import ClientSocketSettings
from racerd.store.settings import DiskSettings, StoreSettings


def read_settings(settings: Settings) -> ReadSettings:
    return ReadSettings(
        plaintext_bytes=settings.plaintext,
        dirty_bytes=settings.dirty,
        share_bytes=settings.share,
        share_idle_seconds=settings.share_idle_seconds,
        request_pages=settings.request_pages,
        connection_pages=settings.connection_pages,
        disk_seconds=settings.disk_seconds,
        write_seconds=settings.write_seconds,
        version_seconds=settings.version_seconds,
    )


def store_settings(settings: Settings) -> StoreSettings:
    return StoreSettings(
        disks=tuple(DiskSettings(disk.path, disk.size_bytes) for disk in settings.disks),
        free_floor_ratio=settings.free_space_floor,
        write_bytes_per_day=settings.write_bytes_per_day,
        quotas=quotas(settings),
        checkpoint_seconds=settings.checkpoint_seconds,
        scrub_bytes_per_second=settings.scrub_bytes_per_second,
    )


def quotas(settings: Settings) -> dict[str, int]:
    """Bytes on disk by cache, of those that have a limit."""
    return {
        cache.name: cache.quota_bytes
        for cache in settings.caches.values()
        if cache.quota_bytes is not None
    }


def socket_settings(settings: Settings) -> ClientSocketSettings:
    """Raises ConfigError for a group that does not exist here."""
    group = None
    if settings.socket_group is not None:
        try:
            group = grp.getgrnam(settings.socket_group).gr_gid
        except KeyError:
            raise ConfigError(
                [f"socket_group: there is no group {settings.socket_group!r} here"]
            ) from None
    return ClientSocketSettings(
        settings.run_dir,
        mode=settings.socket_mode,
        group=group,
        connections_max=settings.connections_max,
    )


def gpu_settings(settings: Settings) -> GpuSettings:
    return GpuSettings(
        staging_bytes=settings.gpu_staging_bytes,
        idle_seconds=settings.gpu_idle_seconds,
        cufile=settings.cufile_provider,
        cufile_threads=settings.cufile_threads,
        compat_mode=settings.cufile_allow_compat_mode,
        kernel_cache="" if settings.kernel_cache is None else str(settings.kernel_cache),
    )


def arena_shape(settings: Settings, arena: FrameArena) -> ArenaShape:
    """The arena as GPU workers map it."""
    return ArenaShape(
        descriptor=arena.fd,
        size=arena.slot_count * arena.slot_bytes,
        frame_bytes=arena.frame_bytes,
        frames_per_page=settings.geometry.frames_per_page,
        slot_bytes=arena.slot_bytes,
    )
