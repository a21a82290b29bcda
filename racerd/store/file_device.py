"""A file, or a block device of the kernel, as a slab: the only place that touches a disk.

Layer: store; blocking, see `device`. Only `preadv` and `pwritev` move data: nothing is mapped, so
that a vanished disk is an error and never a signal. What the kernel promises about O_DIRECT is not
trusted: an aligned read and an aligned write with read-back prove it when the slab is opened.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from racerd.store.buffers import address_of, aligned_buffer
from racerd.store.device import DiskError, Extent, Space
from racerd.store.geometry import BLOCK_BYTES, PROBE_OFFSET
from racerd.units import MIB

_BLKSSZGET = 0x1268  # <linux/fs.h>: logical sector size.
_STATX_DIOALIGN = 0x2000  # <linux/stat.h>, kernel 6.1.
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN = 152  # Offset in struct statx; the offset alignment follows.
_AT_EMPTY_PATH = 0x1000
_BOUNCE_BYTES = MIB
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_STAT_BLOCK_BYTES = 512
_REFUSES_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EIO})


class FileDevice:
    """A slab in a file or on a block device, opened and locked. Made by `open_file_device`."""

    def __init__(self, path: Path, fd: int, *, direct: bool, alignment: int) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self.alignment = alignment
        self.is_block = stat.S_ISBLK(os.fstat(fd).st_mode)
        self.bounced_bytes = 0

    @property
    def size_bytes(self) -> int:
        try:
            return os.lseek(self.fd, 0, os.SEEK_END)
        except OSError as error:
            raise self._failed("size", error, None) from error

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        extent = Extent(offset, sum(len(buffer) for buffer in buffers))
        if not self._memory_fits(buffers):
            return self._read_bounced(extent, buffers)
        try:
            return _transfer(self.fd, os.preadv, list(buffers), offset)
        except OSError as error:
            raise self._failed("read", error, extent) from error

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        extent = Extent(offset, sum(len(buffer) for buffer in buffers))
        if not self._memory_fits(buffers):
            self._write_bounced(extent, buffers)
            return
        try:
            written = _transfer(self.fd, os.pwritev, list(buffers), offset)
        except OSError as error:
            raise self._failed("write", error, extent) from error
        if written != extent.length:
            raise DiskError(
                "write", self.path, errno.EIO, extent=extent, alignment=self.alignment,
                detail=f"the kernel took only {written} bytes",
            )  # fmt: skip

    def flush(self) -> None:
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise self._failed("flush", error, None) from error

    def allocate(self, extent: Extent) -> None:
        if self.is_block:
            return
        try:
            os.posix_fallocate(self.fd, extent.offset, extent.length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise self._failed("allocate", error, extent) from error
            self._extend(extent)

    def release(self, extent: Extent) -> None:
        if self.is_block:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        offset, length = ctypes.c_int64(extent.offset), ctypes.c_int64(extent.length)
        if libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
            raise DiskError("release", self.path, ctypes.get_errno(), extent=extent)

    def _extend(self, extent: Extent) -> None:
        """Without fallocate the file grows sparse; a full file system shows at the write."""
        stop = extent.offset + extent.length
        if self.size_bytes < stop:
            self.truncate(stop)

    def prove_writes(self) -> None:
        """Falls back to the page cache when O_DIRECT was accepted at open but does not work."""
        try:
            self._write_and_read_probe()
        except DiskError as error:
            if not self.direct or error.native not in _REFUSES_DIRECT:
                raise
            self._leave_direct()
            self._write_and_read_probe()

    def _write_and_read_probe(self) -> None:
        pattern, answer = aligned_buffer(BLOCK_BYTES), aligned_buffer(BLOCK_BYTES)
        pattern[:] = os.urandom(BLOCK_BYTES)
        self.write(PROBE_OFFSET, [pattern])
        self.read(PROBE_OFFSET, [answer])
        if pattern != answer:
            raise DiskError(
                "probe", self.path, errno.EIO, extent=Extent(PROBE_OFFSET, BLOCK_BYTES),
                alignment=self.alignment, detail="the block read back is not the one written",
            )  # fmt: skip

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        self.alignment = 1

    def space(self) -> Space | None:
        if self.is_block:
            return None
        try:
            answer = os.fstatvfs(self.fd)
            own = os.fstat(self.fd).st_blocks * _STAT_BLOCK_BYTES
        except OSError as error:
            raise self._failed("statvfs", error, None) from error
        unit = answer.f_frsize
        return Space(answer.f_bavail * unit, answer.f_blocks * unit, own)

    def truncate(self, size: int) -> None:
        if self.is_block:
            return
        try:
            os.ftruncate(self.fd, size)
        except OSError as error:
            raise self._failed("truncate", error, Extent(size, 0)) from error

    def reopen(self) -> int:
        # Through /proc, so that it is this very file even where its path names another by now. A
        # duplicate would share the lock, and keep the slab locked for as long as it lives.
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed("reopen", error, None) from error

    def close(self) -> None:
        # Gone whatever close(2) answers: the number may be another file's right afterwards.
        fd, self.fd = self.fd, -1
        try:
            os.close(fd)  # Releases the lock too, unless a child still holds a duplicate.
        except OSError as error:
            raise self._failed("close", error, None) from error

    def _failed(self, operation: str, error: OSError, extent: Extent | None) -> DiskError:
        number = error.errno if error.errno is not None else errno.EIO
        return DiskError(operation, self.path, number, extent=extent, alignment=self.alignment)

    def _memory_fits(self, buffers: Sequence[memoryview]) -> bool:
        if not self.direct:
            return True
        mask = self.alignment - 1
        return all(address_of(buffer) & mask == 0 for buffer in buffers)

    def _read_bounced(self, extent: Extent, buffers: Sequence[memoryview]) -> int:
        """For memory that O_DIRECT refuses: the copy is rounded, the mode stays."""
        bounce = aligned_buffer(min(extent.length, _BOUNCE_BYTES))
        done = 0
        for buffer in buffers:
            for start in range(0, len(buffer), len(bounce)):
                part = buffer[start : start + len(bounce)]
                got = self.read(extent.offset + done, [bounce[: len(part)]])
                part[:got] = bounce[:got]
                self.bounced_bytes += got
                done += got
                if got < len(part):
                    return done
        return done

    def _write_bounced(self, extent: Extent, buffers: Sequence[memoryview]) -> None:
        bounce = aligned_buffer(min(extent.length, _BOUNCE_BYTES))
        done = 0
        for buffer in buffers:
            for start in range(0, len(buffer), len(bounce)):
                part = buffer[start : start + len(bounce)]
                bounce[: len(part)] = part
                self.write(extent.offset + done, [bounce[: len(part)]])
                self.bounced_bytes += len(part)
                done += len(part)


def _transfer(
    fd: int, call: Callable[[int, list[memoryview], int], int], buffers: list[memoryview], at: int
) -> int:
    """Repeats `call` over what is left of `buffers`; returns the bytes moved, short at the end."""
    done = 0
    while buffers:
        moved = call(fd, buffers, at + done)
        if moved == 0:
            return done
        done += moved
        while buffers and moved >= len(buffers[0]):
            moved -= len(buffers.pop(0))
        if buffers and moved:
            buffers[0] = buffers[0][moved:]
    return done


def open_file_device(path: Path) -> FileDevice:
    """Opens and locks the slab at `path`, making an empty file if there is none.

    Proves reading only; `prove_writes` comes after the caller has seen that the slab is its own.
    Raises DiskError: `slab_locked` while another process has it.
    """
    fd, direct = _open(path)
    try:
        _check_kind(path, fd)
        _lock(path, fd)
        alignment = _direct_alignment(fd) if direct else 0
        if direct and not (0 < alignment <= BLOCK_BYTES and _reads_directly(path, fd)):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            direct = False
        return FileDevice(path, fd, direct=direct, alignment=alignment if direct else 1)
    except BaseException:
        os.close(fd)
        raise


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if not os.path.lexists(path):  # Also where nobody may look: then opening says why.
        flags |= os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno not in _REFUSES_DIRECT:
            raise DiskError("open", path, error.errno or errno.EIO) from error
    try:
        return os.open(path, flags, 0o600), False
    except OSError as error:
        raise DiskError("open", path, error.errno or errno.EIO) from error


def _check_kind(path: Path, fd: int) -> None:
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise DiskError(
            "open", path, errno.ENOTBLK, code="disk_kind",
            detail="it is neither a file nor a block device",
        )  # fmt: skip


def _lock(path: Path, fd: int) -> None:
    """An advisory lock of the open description: the kernel drops it when the process dies."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise DiskError(
                "lock", path, errno.EWOULDBLOCK, code="slab_locked",
                detail="another process has it",
            ) from error  # fmt: skip
        raise DiskError("lock", path, error.errno or errno.EIO) from error


def _direct_alignment(fd: int) -> int:
    """What O_DIRECT needs of offsets, lengths and memory; 0 if the file system says it cannot."""
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        answer = fcntl.ioctl(fd, _BLKSSZGET, bytes(4))
        return int(struct.unpack("i", answer)[0])
    told = _statx_dio_alignment(fd)
    return BLOCK_BYTES if told is None else told


def _statx_dio_alignment(fd: int) -> int | None:
    """Alignment by statx(2); None where the kernel does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", answer, _STATX_DIO_MEM_ALIGN)
    return max(int(memory), int(offset))


def _reads_directly(path: Path, fd: int) -> bool:
    """Whether an aligned read works: some file systems accept the flag and refuse the I/O."""
    try:
        os.preadv(fd, [aligned_buffer(BLOCK_BYTES)], 0)
    except OSError as error:
        if error.errno in _REFUSES_DIRECT:
            return False  # If the disk itself fails, reading the superblock will say so.
        raise DiskError("probe", path, error.errno or errno.EIO) from error
    return True
