"""Slabs: their file systems, whether O_DIRECT works there, and the space that must stay free.

Layer: doctor. What is tried is tried on a probe file beside the slab, or, where the slab is a
block device, by reading from it; a slab that a daemon has open is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from racerd.config.machine import FileSystem, closest_seen
from racerd.doctor.finding import Finding, failed, ok, slower
from racerd.units import KIB, format_bytes

PROBE_BYTES = 64 * KIB
_BLOCK_BYTES = 4 * KIB
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """`error` is why nothing could be tried, as an errno's text. `own_bytes` is what an existing
    slab takes already; `wanted_bytes` is its size by the settings, or None for a default."""

    path: Path
    kind: str  # "file", "block device", "missing", "hidden" by a folder, or what else it is
    file_system: str
    mount: str
    direct: bool
    total_bytes: int
    free_bytes: int
    own_bytes: int
    wanted_bytes: int | None
    error: str = ""


def probe_disk(path: Path, wanted_bytes: int | None) -> DiskFacts:
    mount, file_system = mount_of(path, _MOUNTS.read_text())
    space = FileSystem.of(path)
    direct, error = False, ""
    try:
        with probe_file(path) as name:
            direct = works_directly(name)
    except OSError as failure:
        error = failure.strerror or str(failure)
    return DiskFacts(
        path=path,
        kind=_kind(path),
        file_system=file_system,
        mount=mount,
        direct=direct,
        total_bytes=space.total_bytes,
        free_bytes=space.free_bytes,
        own_bytes=space.slab_allocated_bytes,
        wanted_bytes=wanted_bytes,
        error=error,
    )


def _kind(path: Path) -> str:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except PermissionError:
        return "hidden"
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISBLK(mode):
        return "block device"
    return "symbolic link" if stat.S_ISLNK(mode) else "something else"


def mount_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Mount point and file system type of `path`, by /proc/self/mountinfo (proc(5))."""
    best = ("/", "unknown")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split(" ")[4])
        # A later line of the same point is mounted over the earlier one.
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, after.split(" ")[0])
    return best


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


@contextmanager
def probe_file(path: Path) -> Iterator[Path]:
    """A file on the slab's file system to read from, removed afterwards; the slab itself where it
    is a block device. Raises OSError."""
    if path.is_block_device():
        yield path
        return
    folder = closest_seen(path.parent)
    descriptor, name = tempfile.mkstemp(prefix=".racer-doctor-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(range(256)) * (PROBE_BYTES // 256))
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def works_directly(name: Path) -> bool:
    """Whether an aligned read with O_DIRECT works. Raises OSError for anything else."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
            return os.preadv(descriptor, [buffer], 0) == _BLOCK_BYTES
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(descriptor)


def judge_disk(facts: DiskFacts, floor: float) -> list[Finding]:
    return [_judge_place(facts), _judge_space(facts, floor)]


def _judge_place(facts: DiskFacts) -> Finding:
    check, where = "disk", f"{facts.path} on {facts.file_system} ({facts.mount})"
    if facts.kind in ("symbolic link", "something else"):
        return failed(
            check,
            f"{facts.path} is a {facts.kind}",
            "name a file that may be made, or a block device, with --disk",
        )
    if facts.kind == "hidden":
        return failed(
            check,
            f"user {os.geteuid()} may not search the folders above {facts.path}",
            "let racerd's user search them and write to the last, or name another place with"
            " --disk",
        )
    if facts.error:
        return failed(
            check,
            f"{where} cannot be used: {facts.error}",
            "let racerd's user write to the folder, or name another place with --disk",
        )
    if not facts.direct:
        return slower(
            check,
            f"{where} refuses O_DIRECT: pages go through the page cache, and cuFile not at all",
            "put the slab on ext4 or xfs of a local NVMe disk",
        )
    return ok(check, f"{where}, O_DIRECT works")


def _judge_space(facts: DiskFacts, floor: float) -> Finding:
    check = "disk-space"
    if facts.kind == "block device":
        return ok(check, f"{facts.path} is a block device of its own")
    kept = int(facts.total_bytes * floor)
    room = facts.free_bytes + facts.own_bytes - kept
    text = (
        f"{facts.mount}: {format_bytes(max(0, facts.free_bytes))} free of"
        f" {format_bytes(facts.total_bytes)}, {floor:.0%} ({format_bytes(kept)}) stay free"
    )
    if facts.free_bytes < kept:
        return slower(
            check,
            f"{text}: the slab gives space back until that holds",
            f"free {format_bytes(kept - facts.free_bytes)} there, or name another place (--disk)",
        )
    if facts.wanted_bytes is not None and facts.wanted_bytes > room:
        return slower(
            check,
            f"{text}: the slab of {format_bytes(facts.wanted_bytes)} can take"
            f" {format_bytes(max(0, room))}",
            "free space there, or give the slab a smaller size with --disk PATH:BYTES",
        )
    return ok(check, text)
