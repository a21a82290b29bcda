"""What lets a disk write into GPU memory by itself: nvidia-fs or PCI P2PDMA, udev, the BAR.

Layer: doctor. What the kernel and sysfs say; whether it really works is what a read with cuFile
shows (`gpu_try`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from racerd.doctor.finding import Finding, not_applicable, ok, slower
from racerd.units import format_bytes

_P2PDMA_KERNEL = (6, 2)


@dataclass(frozen=True, slots=True)
class DirectFacts:
    """`nvidia_fs` is the module's version, "" where it does not tell, None where it is not loaded.
    `open_driver` is None where there is no NVIDIA driver."""

    modules_readable: bool
    nvidia_fs: str | None
    kernel: str
    open_driver: bool | None
    udev: bool


def probe_direct(root: Path = Path("/")) -> DirectFacts:
    modules = _text(root / "proc/modules")
    loaded = "nvidia_fs " in (modules or "") or (root / "sys/module/nvidia_fs").exists()
    driver = _text(root / "proc/driver/nvidia/version")
    return DirectFacts(
        modules_readable=modules is not None,
        nvidia_fs=_version(_text(root / "proc/driver/nvidia-fs/version")) if loaded else None,
        kernel=os.uname().release,
        open_driver=None if driver is None else "Open Kernel Module" in driver,
        udev=(root / "run/udev/data").is_dir(),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _version(text: str | None) -> str:
    found = re.search(r"\d+(\.\d+)+", text or "")
    return found.group() if found else ""


def judge_direct(facts: DirectFacts) -> list[Finding]:
    return [_judge_gpudirect(facts), _judge_modules(facts), _judge_udev(facts)]


def _judge_gpudirect(facts: DirectFacts) -> Finding:
    check = "gpudirect"
    if facts.nvidia_fs is not None:
        return ok(check, f"nvidia-fs {facts.nvidia_fs} is loaded".replace("  ", " "))
    lacks = []
    if _kernel(facts.kernel) < _P2PDMA_KERNEL:
        lacks.append(f"kernel {facts.kernel} is older than 6.2")
    if not facts.open_driver:
        lacks.append("the NVIDIA driver is not the open kernel module")
    if not lacks:
        return ok(check, f"PCI P2PDMA is possible (kernel {facts.kernel}, open NVIDIA driver)")
    return slower(
        check,
        f"nvidia-fs is not loaded, and PCI P2PDMA is not possible: {', '.join(lacks)}; disks are"
        " read through host memory",
        "load nvidia-fs on the host, or use kernel 6.2 or newer with NVIDIA's open driver",
    )


def _kernel(release: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _judge_modules(facts: DirectFacts) -> Finding:
    if facts.modules_readable:
        return ok("proc-modules", "/proc/modules can be read")
    return slower(
        "proc-modules",
        "/proc/modules cannot be read: the cuFile driver would never come back, and stays off",
        "run racerd where /proc/modules can be read (not hidden by the container's runtime)",
    )


def _judge_udev(facts: DirectFacts) -> Finding:
    if facts.udev:
        return ok("udev", "/run/udev is there")
    return slower(
        "udev",
        "/run/udev is missing: cuFile cannot tell what kind of disk a slab is on (5030)",
        "mount the host's /run/udev read-only into the container",
    )


@dataclass(frozen=True, slots=True)
class BarFacts:
    """`bar_bytes` is None where sysfs does not tell."""

    name: str
    bar_bytes: int | None
    memory_bytes: int
    staging_bytes: int


def probe_bar(bus: str, root: Path = Path("/")) -> int | None:
    """The size of BAR1 of the PCI device `bus`, by sysfs's `resource` (the second line)."""
    text = _text(root / "sys/bus/pci/devices" / bus.lower() / "resource")
    try:
        first, last, _ = (int(word, 16) for word in (text or "").splitlines()[1].split())
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def judge_bar(facts: BarFacts) -> Finding:
    check = "bar1"
    if facts.bar_bytes is None:
        return not_applicable(check, f"sysfs does not tell the BAR of {facts.name}")
    text = f"{facts.name}: {format_bytes(facts.bar_bytes)}"
    if facts.bar_bytes >= facts.memory_bytes:
        return ok(check, f"{text}, covers all of its memory")
    # Others need a part of it too: the driver itself, peers, NICs.
    if facts.bar_bytes >= 2 * facts.staging_bytes:
        return ok(check, f"{text}, room for {format_bytes(facts.staging_bytes)} of staging")
    return slower(
        check,
        f"{text}, little for {format_bytes(facts.staging_bytes)} of staging: cuFile may refuse to"
        " register it (5016, 5045)",
        f"set gpu_staging_bytes to {format_bytes(facts.bar_bytes // 4)}, or turn on resizable BAR",
    )
