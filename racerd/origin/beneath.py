"""Opens files beneath a directory and nowhere else.

Layer: origin; blocking, thread-safe. `openat2(2)` with RESOLVE_BENEATH makes the kernel refuse
every way out of the root: `..`, absolute symlinks, symlinks that point outside, magic links.
Symlinks that stay inside work, because model caches are built of them.

Where the kernel has no openat2, or a sandbox forbids it, the path is walked one component at a time
with O_NOFOLLOW: as safe, but every symlink is refused. `Root.walks` says which of the two it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

_SYS_OPENAT2 = 437  # The same on every architecture that has it.
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_ATTEMPTS_ON_EAGAIN = 16

# What names nothing, as opposed to what cannot be read now.
ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EXDEV, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR}
)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def _openat2(folder: int, path: bytes, flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_ATTEMPTS_ON_EAGAIN):
        found = _LIBC.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(folder),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if found >= 0:
            return int(found)
        number = ctypes.get_errno()
        # A rename in the tree during the walk: the kernel asks to try again.
        if number != errno.EAGAIN:
            raise OSError(number, os.strerror(number), os.fsdecode(path))
    raise OSError(errno.EAGAIN, "the directory tree changes all the time", os.fsdecode(path))


class Root:
    """A directory that paths are resolved beneath. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.walks = False
        self._fd = -1

    def __enter__(self) -> Root:
        self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(_openat2(self._fd, b".", os.O_PATH | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                self.close()
                raise
            self.walks = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def open(self, parts: list[bytes], flags: int = os.O_RDONLY) -> int:
        """Opens the file or directory that `parts` name; no part is empty, `.` or `..`.

        Raises OSError; `ABSENT` has the numbers that mean that there is no such thing in here.
        """
        flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # A FIFO must not block the thread.
        if not self.walks:
            return _openat2(self._fd, b"/".join(parts) or b".", flags)
        return self._walk(parts, flags)

    def _walk(self, parts: list[bytes], flags: int) -> int:
        folder = os.dup(self._fd)
        try:
            for part in parts[:-1]:
                below = os.open(
                    part, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder
                )
                os.close(folder)
                folder = below
            return os.open(parts[-1] if parts else b".", flags | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)


def is_regular(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode)
