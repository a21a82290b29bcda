"""What a GPU's worker is started with, as values.

Layer: gpu, pure; imports no CUDA. `racerd.config` reads the settings; the arena's shape is what the
daemon made.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.gpu.protocol import Start
from racerd.units import MIB


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """`cufile`: off, cuda or kvikio, on `cufile_threads` threads. `kernel_cache`: a folder, or ""
    for the default one.

    `answer_seconds_max`: a worker that owes an answer longer is killed: a hung GPU must not keep
    reads (F66).
    """

    staging_bytes: int = 256 * MIB
    idle_seconds: float = 60.0
    cufile: str = "cuda"
    cufile_threads: int = 4
    compat_mode: bool = False
    cufile_open_seconds_max: float = 30.0
    kernel_cache: str = ""
    start_seconds_max: float = 60.0
    answer_seconds_max: float = 60.0


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The shared arena of sealed frames. The descriptor stays the daemon's."""

    descriptor: int
    size: int
    frame_bytes: int
    frames_per_page: int
    slot_bytes: int


def start_message(uuid: str, settings: GpuSettings, arena: ArenaShape) -> Start:
    """The first message to the worker of the GPU `uuid`; the arena's descriptor goes with it."""
    return Start(
        gpu=uuid,
        arena_bytes=arena.size,
        frame_bytes=arena.frame_bytes,
        frames_per_page=arena.frames_per_page,
        slot_bytes=arena.slot_bytes,
        staging_bytes=settings.staging_bytes,
        idle_seconds=settings.idle_seconds,
        kernel_cache=settings.kernel_cache,
        cufile=settings.cufile,
        cufile_threads=settings.cufile_threads,
        compat_mode=settings.compat_mode,
        cufile_open_seconds_max=settings.cufile_open_seconds_max,
    )
