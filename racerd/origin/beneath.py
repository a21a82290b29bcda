"""Opens files beneath a directory and never outside of it, symlinks included.

Layer: origin. `openat2(RESOLVE_BENEATH)` lets the kernel do it in one call (Linux 5.6, openat2(2)).
Where the kernel or a seccomp filter refuses that call, `Walk` resolves part by part with
O_NOFOLLOW and descriptors, reads links itself, and gives the same answers at the price of a few
calls per part; the first refusal is reported once through `on_refused`.

Any thread. Paths are relative, bytes, non-empty parts without "." and ".."; the caller owns the
descriptors returned.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack

_SYS_OPENAT2 = 437  # The same number on every architecture.
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_LINKS_MAX = 40  # As the kernel's MAXSYMLINKS.
_RACES_MAX = 16
# EPERM is what seccomp filters that do not know the call answer; a file never gives it for a read.
_REFUSALS = (errno.ENOSYS, errno.EPERM)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def openat2_beneath(root: int, path: bytes, flags: int) -> int:
    """Opens `path` beneath the directory `root`. Raises OSError; EXDEV where it would leave it."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_RACES_MAX):
        descriptor: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: a rename raced with a "..".
            break
    raise OSError(number, os.strerror(number))


def walk_beneath(root: int, path: bytes, flags: int) -> int:
    """`openat2_beneath` in user space. ".." of a link goes back along the way that was taken, so
    that a directory moved meanwhile cannot lead outside."""
    with ExitStack() as opened:
        trail = [root]
        todo = path.split(b"/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if len(trail) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                trail.pop()
                continue
            here = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=trail[-1])
            opened.callback(os.close, here)
            if stat.S_ISLNK(os.fstat(here).st_mode):
                links += 1
                todo += _link_parts(here, links)
            else:
                trail.append(here)
        return _reopen(trail[-1], flags)


def _link_parts(link: int, links: int) -> Sequence[bytes]:
    """The parts of a link's target, last first."""
    if links > _LINKS_MAX:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    target = os.readlink(b"", dir_fd=link)
    if target.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    return target.split(b"/")[::-1]


def _reopen(descriptor: int, flags: int) -> int:
    """Opens what an O_PATH descriptor stands for, with real access."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


class Beneath:
    """Opens beneath one root, by the kernel's way or the other. Thread-safe."""

    def __init__(self, root: bytes, on_refused: Callable[[OSError], None]) -> None:
        self._root = root
        self._on_refused = on_refused
        self._refused = False

    def open(self, path: bytes, flags: int) -> int:
        """Opens `path` (b"." for the root itself). The root is looked up anew each time, so that
        a mount which comes later, or again, is seen."""
        root = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not self._refused:
                try:
                    return openat2_beneath(root, path, flags)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    self._refuse(error)
            return walk_beneath(root, path, flags)
        finally:
            os.close(root)

    def _refuse(self, error: OSError) -> None:
        self._refused = True
        self._on_refused(error)
