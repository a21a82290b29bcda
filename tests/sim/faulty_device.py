"""A block device that fails on demand, and what is left of it after a crash.

A `Medium` is pristine memory: what is durable, and the writes since the last flush. `FaultyDevice`
lays faults over it. Every choice comes from one seeded generator, so that a seed replays a run.

Kinds: EIO at a rate, latency, a hang, short reads, writes that are lost, torn or land elsewhere,
bit rot, no space, read-only, vanished; a crash in the middle of any write, at any sector boundary.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from racerd.store.buffers import aligned_buffer
from racerd.store.device import DiskError, Extent, Space
from racerd.store.geometry import BLOCK_BYTES, PROBE_OFFSET

SECTOR = 512


class Crash(BaseException):
    """The machine, or the process, stops in the middle of a write. Not an Exception: nobody
    catches it on the way out."""


@dataclass
class Faults:
    """What goes wrong; rates are chances per operation."""

    read_errors: float = 0.0
    write_errors: float = 0.0
    short_reads: float = 0.0
    lost_writes: float = 0.0
    misdirected_writes: float = 0.0
    rot: float = 0.0
    latency_seconds: float = 0.0
    no_space: bool = False
    read_only: bool = False
    vanished: bool = False
    hang: threading.Event | None = None
    crash_after_sectors: int | None = None

    @property
    def any(self) -> bool:
        return any(getattr(self, each.name) != each.default for each in fields(self))


class Medium:
    """The bytes of a slab. `durable` survives a power loss, `now` also a kill.

    `injected` counts what went wrong, by kind.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.chance = random.Random(seed)
        self.durable = bytearray(size)
        self.now = bytearray(size)
        self.unflushed: list[tuple[int, bytes]] = []
        self.writes = 0
        self.flushed_writes = 0
        self.allocated = 0
        self.injected: Counter[str] = Counter()

    def write(self, offset: int, data: bytes) -> None:
        assert offset % SECTOR == 0 and len(data) % SECTOR == 0
        self.now[offset : offset + len(data)] = data
        self.unflushed.append((offset, data))
        self.writes += 1

    def flush(self) -> None:
        for offset, data in self.unflushed:
            self.durable[offset : offset + len(data)] = data
        self.unflushed.clear()
        self.flushed_writes = self.writes

    def lose_power(self, *, everything: bool = False) -> None:
        """Of the writes since the last flush any may be there, missing, or there in part."""
        self.injected["power losses"] += 1
        for offset, data in [] if everything else self.unflushed:
            for start in self._surviving_sectors(len(data)):
                at = offset + start
                self.durable[at : at + SECTOR] = data[start : start + SECTOR]
        self.unflushed.clear()
        self.now = bytearray(self.durable)

    def _surviving_sectors(self, size: int) -> list[int]:
        sectors = list(range(0, size, SECTOR))
        fate = self.chance.randrange(4)
        if fate == 0:
            return []
        if fate == 1:
            return sectors
        if fate == 2:
            return sectors[: self.chance.randrange(len(sectors) + 1)]
        return [sector for sector in sectors if self.chance.random() < 0.5]

    def rot(self, offset: int) -> None:
        """Flips a bit, now and for ever."""
        self.injected["rot"] += 1
        flipped = self.now[offset] ^ 1 << self.chance.randrange(8)
        self.now[offset] = flipped
        self.durable[offset] = flipped

    def punch(self, offset: int, length: int) -> None:
        """Zeroes a range, as a hole in a file does."""
        self.injected["holes"] += 1
        self.zero(offset, length)

    def zero(self, offset: int, length: int) -> None:
        """As `punch`, when the store asks for it."""
        self.now[offset : offset + length] = bytes(length)
        self.durable[offset : offset + length] = bytes(length)
        self.unflushed = [w for w in self.unflushed if not offset <= w[0] < offset + length]


class FaultyDevice:
    """A `BlockDevice` over a medium, with faults. `sleep` gets the latency of each operation."""

    direct = True
    bounced_bytes = 0

    def __init__(
        self, medium: Medium, faults: Faults | None = None, *, path: Path = Path("/faulty/slab"),
        sleep: Callable[[float], object] = lambda _: None, space: Space | None = None,
    ) -> None:  # fmt: skip
        self.medium = medium
        self.faults = faults if faults is not None else Faults()
        self.path = path
        self.closed = False
        self.operations = 0
        self.running = 0
        self._sleep = sleep
        self._space = space

    @property
    def size_bytes(self) -> int:
        return self.medium.size

    def _enter(self, operation: str, extent: Extent | None = None) -> None:
        assert not self.closed, f"{operation} after close"
        self.operations += 1
        if self.faults.latency_seconds:
            self.medium.injected["latency"] += 1
            self._sleep(self.faults.latency_seconds)
        if self.faults.hang is not None:
            self.medium.injected["hangs"] += 1
            self.running += 1
            self.faults.hang.wait()
            self.running -= 1
        if self.faults.vanished:
            self._count("vanished")
            raise self._error(operation, errno.ENODEV, extent)

    def _count(self, kind: str) -> None:
        self.medium.injected[kind.replace("_", " ")] += 1

    def _error(self, operation: str, number: int, extent: Extent | None) -> DiskError:
        return DiskError(operation, self.path, number, extent=extent, alignment=BLOCK_BYTES)

    def _happens(self, kind: str) -> bool:
        """Whether the fault of this name, whose rate is set, happens now; it is counted then."""
        rate: float = getattr(self.faults, kind)
        happens = rate > 0 and self.medium.chance.random() < rate
        if happens and kind != "rot":  # The medium counts that itself.
            self._count(kind)
        return happens

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        extent = Extent(offset, sum(len(buffer) for buffer in buffers))
        _check_alignment(extent, buffers)
        self._enter("read", extent)
        if self._happens("read_errors"):
            raise self._error("read", errno.EIO, extent)
        if self._happens("rot") and extent.length:
            self.medium.rot(offset + self.medium.chance.randrange(extent.length))
        stop = min(offset + extent.length, self.medium.size)
        if self._happens("short_reads"):
            stop = offset + (stop - offset) // 2 // SECTOR * SECTOR
        done = 0
        for buffer in buffers:
            part = self.medium.now[offset + done : min(offset + done + len(buffer), max(stop, 0))]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        extent = Extent(offset, sum(len(buffer) for buffer in buffers))
        _check_alignment(extent, buffers)
        assert offset + extent.length <= self.medium.size, "a write beyond the slab's capacity"
        data = b"".join(buffers)
        self._crash_within(offset, data)
        self._enter("write", extent)
        if self.faults.read_only:
            self._count("read_only")
            raise self._error("write", errno.EROFS, extent)
        if self.faults.no_space:
            self._count("no_space")
            raise self._error("write", errno.ENOSPC, extent)
        if self._happens("write_errors"):
            cut = self.medium.chance.randrange(len(data) // SECTOR + 1) * SECTOR
            self.medium.write(offset, data[:cut])
            raise self._error("write", errno.EIO, extent)
        if self._happens("lost_writes"):
            return
        if self._happens("misdirected_writes"):
            blocks = (self.medium.size - len(data)) // BLOCK_BYTES
            offset = self.medium.chance.randrange(blocks + 1) * BLOCK_BYTES
        self.medium.write(offset, data)

    def _crash_within(self, offset: int, data: bytes) -> None:
        left = self.faults.crash_after_sectors
        if left is None:
            return
        if left * SECTOR < len(data):
            self._count("crashes within a write")
            self.medium.write(offset, data[: left * SECTOR])
            raise Crash
        self.faults.crash_after_sectors = left - len(data) // SECTOR

    def flush(self) -> None:
        self._enter("flush")
        if self._happens("write_errors"):
            raise self._error("flush", errno.EIO, None)
        self.medium.flush()

    def allocate(self, extent: Extent) -> None:
        assert extent.offset + extent.length <= self.medium.size, "space beyond the capacity"
        self._enter("allocate", extent)
        if self.faults.no_space:
            self._count("no_space")
            raise self._error("allocate", errno.ENOSPC, extent)
        self.medium.allocated = max(self.medium.allocated, extent.offset + extent.length)

    def release(self, extent: Extent) -> None:
        self._enter("release", extent)
        self.medium.zero(extent.offset, extent.length)

    def prove_writes(self) -> None:
        block = aligned_buffer(BLOCK_BYTES)
        block[:] = self.medium.chance.randbytes(BLOCK_BYTES)
        answer = aligned_buffer(BLOCK_BYTES)
        self.write(PROBE_OFFSET, [block])
        self.read(PROBE_OFFSET, [answer])
        if answer != block:
            raise self._error("probe", errno.EIO, Extent(PROBE_OFFSET, BLOCK_BYTES))

    def space(self) -> Space | None:
        self._enter("statvfs")
        return self._space

    def truncate(self, size: int) -> None:
        self._enter("truncate")

    def reopen(self) -> int:
        raise self._error("reopen", errno.ENXIO, None)

    def close(self) -> None:
        self.closed = True


def _check_alignment(extent: Extent, buffers: Sequence[memoryview]) -> None:
    """What O_DIRECT on a disk with 4 KiB sectors wants."""
    assert extent.offset % BLOCK_BYTES == 0, f"offset {extent.offset} is not aligned"
    for buffer in buffers:
        assert len(buffer) % BLOCK_BYTES == 0, f"a length of {len(buffer)} is not aligned"
