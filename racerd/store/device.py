"""Block devices: what the store needs of a medium, and how it fails.

Layer: store. `file_device` is the kernel's, tests have a faulty twin. Calls block; use them from
disk threads. A device is safe for concurrent reads and writes of ranges that do not overlap.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from racerd.errors import DeviceError

_HINTS = {
    errno.ENOSPC: "free space on the file system, or give the slab a smaller capacity",
    errno.EDQUOT: "raise the quota of the file system, or give the slab a smaller capacity",
    errno.EROFS: "mount the file system of the slab read-write",
    errno.EIO: "the medium fails: see `dmesg` and replace the disk",
    errno.ENODEV: "the disk is gone: see `dmesg`",
    errno.ENXIO: "the disk is gone: see `dmesg`",
    errno.ELOOP: "the path of a slab must not be a symbolic link: name the slab itself",
    errno.EISDIR: "the path of a slab must be a file or a block device: name a file in the folder",
    errno.EACCES: "let the daemon's user read and write the slab and its folder",
    errno.ENOENT: "make the slab's folder, or mount its disk",
    errno.EFBIG: "the file system takes no file of this size: give the slab a smaller capacity",
    errno.ENOTBLK: "name a file or a block device",
    errno.EWOULDBLOCK: "stop that daemon, or give this one its own slab",
    errno.EINVAL: "the file system refuses I/O of this alignment: use another one for the slab",
}


class DiskError(DeviceError):
    """An I/O on a slab failed. `native` is the errno; the message holds every parameter."""

    def __init__(
        self, operation: str, path: Path, number: int, *, extent: Extent | None = None,
        alignment: int = 0, code: str = "disk_error", detail: str = "",
    ) -> None:  # fmt: skip
        self.operation = operation
        self.extent = extent
        self.alignment = alignment
        name = errno.errorcode.get(number, str(number))
        where = f" at offset {extent.offset}, length {extent.length}" if extent else ""
        aligned = f", alignment {alignment}" if alignment else ""
        super().__init__(
            "disk_full" if number in (errno.ENOSPC, errno.EDQUOT) else code,
            f"{operation} of slab {path} failed{where}{aligned}:"
            f" {detail or os.strerror(number)} ({name}, errno {number})",
            native=number,
            hint=_HINTS.get(number, "see `dmesg` for what the kernel says about the disk"),
        )

    @property
    def errno_name(self) -> str:
        """The symbol of the errno, for metrics: `EIO`."""
        return errno.errorcode.get(self.native, "other")

    @property
    def gone(self) -> bool:
        """Whether there is no device any more."""
        return self.native in (errno.ENODEV, errno.ENXIO)

    @property
    def full(self) -> bool:
        """Whether the medium is out of space, which is not a fault of the disk."""
        return self.code == "disk_full"


@dataclass(frozen=True, slots=True)
class Extent:
    """An aligned range of a device, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Space:
    """Of the file system under a slab, in bytes; `own` is what the slab takes of it."""

    free: int
    total: int
    own: int


class BlockDevice(Protocol):
    """A medium. Every method raises `DiskError` and nothing else for a failing medium.

    `bounced_bytes` counts what was copied because its memory did not suit O_DIRECT.
    """

    path: Path
    direct: bool
    bounced_bytes: int

    @property
    def size_bytes(self) -> int:
        """End of the medium now."""

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills `buffers` from `offset` on; returns the bytes read, short only at the end."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes all of `buffers` at `offset`. After an error any part may have been written."""

    def flush(self) -> None:
        """Returns when everything written before is durable."""

    def allocate(self, extent: Extent) -> None:
        """Makes sure that writes to `extent` find space. Raises `disk_full` if there is none."""

    def release(self, extent: Extent) -> None:
        """Gives the space of `extent` back to the file system; it reads as zeros from then on."""

    def prove_writes(self) -> None:
        """Writes and reads back the probe block; raises if the medium does not keep it."""

    def space(self) -> Space | None:
        """Space of the file system; None for a block device."""

    def truncate(self, size: int) -> None:
        """Gives what lies behind `size` back to the file system; nothing on a block device."""

    def reopen(self) -> int:
        """A new descriptor of the medium for direct reads by somebody else, without the lock."""

    def close(self) -> None:
        """Releases the device and its lock. No I/O may be running."""
