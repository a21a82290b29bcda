"""Every setting of the daemon, declared once.

Parsing, `--help`, `racerd check-config` and docs/configuration.md derive from `SETTINGS`. A name
`drain_seconds` is `drain_seconds` in TOML, `RACER_DRAIN_SECONDS` as a variable and
`--drain-seconds` as a flag. Disks and caches are lists and have their own rules in `load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racerd.config import kinds
from racerd.config.machine import FileSystem, Machine
from racerd.pages import (
    FRAME_BYTES_DEFAULT,
    FRAME_BYTES_MIN,
    PAGE_BYTES_DEFAULT,
    PAGE_BYTES_MAX,
    PAGE_BYTES_MIN,
)
from racerd.units import GIB, MIB, TIB


@dataclass(frozen=True)
class Surroundings:
    """What defaults depend on: the environment, who runs the daemon and where, the machine."""

    environ: Mapping[str, str]
    root: bool
    home: Path
    folder: Path
    machine: Machine
    file_system: Callable[[Path], FileSystem] = FileSystem.of  # Where a slab of that path lies.

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Surroundings:
        return cls(environ, os.geteuid() == 0, Path.home(), Path.cwd(), Machine.here())


@dataclass(frozen=True)
class Declared:
    """One setting. `default` is a value or a function of the surroundings and of earlier settings
    (it raises ValueError where there is none); `default_text` is what the docs say of it."""

    name: str
    kind: kinds.Kind
    default: Any
    help: str
    reloads: bool = False  # Whether a reload changes it; else it takes a restart.
    default_text: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "RACER_" + self.name.upper()

    def default_value(self, around: Surroundings, earlier: Mapping[str, Any]) -> Any:
        if callable(self.default):
            make: Callable[[Surroundings, Mapping[str, Any]], Any] = self.default
            return make(around, earlier)
        return self.default

    @property
    def shown_default(self) -> str:
        return self.default_text or self.kind.shown(self.default)


def _state_dir(around: Surroundings, _: Mapping[str, Any]) -> Path:
    return Path("/var/lib/racer") if around.root else around.home / ".local" / "state" / "racer"


def _run_dir(around: Surroundings, _: Mapping[str, Any]) -> Path:
    if around.root:
        return Path("/run/racer")
    runtime = around.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise ValueError(
            "there is no default, because XDG_RUNTIME_DIR is not set: name a folder with"
            " --run-dir or RACER_RUN_DIR"
        )
    return Path(runtime) / "racer"


def _key_file(_: Surroundings, earlier: Mapping[str, Any]) -> Path | None:
    state_dir = earlier.get("state_dir")
    return None if state_dir is None else state_dir / "keys"


def _memory(around: Surroundings, _: Mapping[str, Any]) -> int:
    return around.machine.memory_default


def _plaintext(around: Surroundings, _: Mapping[str, Any]) -> int:
    return around.machine.plaintext_default


def _dirty(_: Surroundings, earlier: Mapping[str, Any]) -> int | None:
    memory: int | None = earlier.get("memory")
    return None if memory is None else memory // 2


def _share(around: Surroundings, _: Mapping[str, Any]) -> int:
    return around.machine.share_default


def _compat_mode(around: Surroundings, _: Mapping[str, Any]) -> bool:
    return around.environ.get("CUFILE_ALLOW_COMPAT_MODE", "").strip().lower() == "true"


_OPEN_THREADS_MAX = 16  # More than saturate a node's memory bus.


def _cores(_: Surroundings, __: Mapping[str, Any]) -> int:
    return min(_OPEN_THREADS_MAX, len(os.sched_getaffinity(0)))


SETTINGS: tuple[Declared, ...] = (
    Declared("state_dir", kinds.PATH, _state_dir, "keys and, by default, the slab",
             default_text="/var/lib/racer for root, else ~/.local/state/racer"),
    Declared("run_dir", kinds.PATH, _run_dir, "sockets: <run_dir>/<cache>/client/socket",
             default_text="/run/racer for root, else $XDG_RUNTIME_DIR/racer"),
    Declared("key_file", kinds.PATH, _key_file, "master keys; made on first start",
             default_text="<state_dir>/keys"),
    Declared("gpu", kinds.choice("auto", "on", "off"), "auto",
             "auto serves without a GPU; on fails at start when there is none"),
    Declared("gpu_staging_bytes", kinds.size(PAGE_BYTES_MIN, 64 * GIB), 256 * MIB,
             "memory of each GPU that reads in progress take; given back when idle"),
    Declared("gpu_idle_seconds", kinds.seconds(0.1, 86400), 60.0,
             "how long without a read before a GPU's memory is given back"),
    Declared("cufile_provider", kinds.choice("cuda", "kvikio", "off"), "cuda",
             "what reads slabs straight into GPU memory; off takes the host path"),
    Declared("cufile_threads", kinds.count(1, 64), 4, "threads of each GPU that read with cuFile"),
    Declared("cufile_allow_compat_mode", kinds.BOOLEAN, _compat_mode,
             "let cuFile copy through the host where GPUDirect is not possible; the daemon's own"
             " host path is faster", default_text="true where CUFILE_ALLOW_COMPAT_MODE=true"),
    Declared("kernel_cache", kinds.PATH, None, "compiled GPU kernels",
             default_text="~/.cache/racer/kernels"),
    Declared("diagnostics", kinds.ADDRESS, ("127.0.0.1", 9090),
             "address of /healthz, /readyz, /metrics and /debug", default_text="127.0.0.1:9090"),
    Declared("log_level", kinds.choice("debug", "info", "warning", "error"), "info",
             "what is logged", reloads=True),
    Declared("log_format", kinds.choice("text", "json"), "text", "how it is logged"),
    Declared("memory", kinds.size(1 * MIB, 64 * TIB), _memory,
             "memory tier: sealed pages, a hard limit; at least four pages",
             default_text="a quarter of the memory there is, at most 16GiB"),
    Declared("plaintext", kinds.size(PAGE_BYTES_MIN, TIB), _plaintext,
             "plaintext in flight from origins and in streams, a hard limit",
             default_text="an eighth of the memory there is, 64MiB to 512MiB"),
    Declared("dirty", kinds.size(PAGE_BYTES_MIN, TIB), _dirty,
             "sealed pages waiting for a disk, a hard limit", default_text="half of `memory`"),
    Declared("share", kinds.size(0, 64 * TIB), _share,
             "plaintext that readers of one version share, a hard limit; 0 is off",
             default_text="a quarter of the memory there is, at most 64GiB"),
    Declared("page_bytes", kinds.size(PAGE_BYTES_MIN, PAGE_BYTES_MAX), PAGE_BYTES_DEFAULT,
             "unit of caching, a power of two; changing it starts each slab anew"),
    Declared("frame_bytes", kinds.size(FRAME_BYTES_MIN, PAGE_BYTES_MAX), FRAME_BYTES_DEFAULT,
             "unit of sealing, a power of two; changing it starts each slab anew"),
    Declared("request_pages", kinds.count(1, 1024), 8, "pages in progress for one request"),
    Declared("connection_pages", kinds.count(1, 4096), 16,
             "pages in progress for one connection"),
    Declared("connections_max", kinds.count(1, 65536), 1024, "client connections of one cache"),
    Declared("open_threads", kinds.count(1, 1024), _cores, "threads that open and seal",
             default_text="one per core, at most 16"),
    Declared("disk_threads", kinds.count(1, 1024), 4, "threads that read and write disks"),
    Declared("origin_threads", kinds.count(1, 1024), 16, "requests to origins at a time"),
    Declared("socket_mode", kinds.MODE, 0o660, "mode of the client sockets"),
    Declared("socket_group", kinds.TEXT, None, "group of the client sockets"),
    Declared("deadline_seconds", kinds.seconds(0.1, 86400), 300.0,
             "deadline of a request that names none"),
    Declared("drain_seconds", kinds.seconds(0, 3600), 25.0,
             "how long SIGTERM waits for running reads; below the pod's grace period",
             reloads=True),
    Declared("version_seconds", kinds.seconds(0, 86400), 60.0,
             "how long a version is taken for current without asking the origin"),
    Declared("disk_seconds", kinds.seconds(0.01, 600), 2.0,
             "how long one page may take from a disk before the next rung is asked"),
    Declared("write_seconds", kinds.seconds(0, 600), 1.0,
             "how long a cold read waits for a slow disk before a page is not kept"),
    Declared("share_idle_seconds", kinds.seconds(0, 86400), 30.0,
             "how long shared memory is kept that nobody uses"),
    Declared("checkpoint_seconds", kinds.seconds(1, 86400), 300.0,
             "time between checkpoints of the index"),
    Declared("scrub_bytes_per_second", kinds.size(0, 100 * GIB), 8 * MIB,
             "how fast idle disks are checked for rot; 0 turns it off"),
    Declared("free_space_floor", kinds.fraction(0.0, 0.95), 0.15,
             "share of a file system that a slab never takes"),
    Declared("write_bytes_per_day", kinds.or_off(kinds.size(1 * MIB, 1024 * TIB)), None,
             "what may be written to each disk in a day"),
)  # fmt: skip
