"""Files under one folder, written whole or not at all.

Layer: cli. Names come from an origin and are not trusted: `safe_parts` refuses what would leave the
folder, and folders are opened one by one without following symbolic links, so that a link that
somebody put there does not lead out either. A file appears under its name only when all of its
bytes are on disk: until then it has another name, and it goes when anything fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from racer.errors import RacerError

_NAME_BYTES_MAX = 255


class UnsafeName(RacerError):
    """A name that cannot be a file below the target folder."""

    default_code = "unsafe_name"


class CannotWrite(RacerError):
    """A file or a folder of ours cannot be made or written; the message names it."""

    default_code = "cannot_write"


_REMEDIES = {
    errno.EACCES: "give a place that this user may write to",
    errno.EPERM: "give a place that this user may write to",
    errno.EROFS: "the file system is mounted read-only: give another place",
    errno.ENOSPC: "free some space there, or give another place",
    errno.EDQUOT: "this user's quota is used up: free some space, or give another place",
    errno.ENOENT: "no file can be made there: give another place",
    errno.ENOTDIR: "a file is in the way where a folder has to be: give another place",
    errno.EEXIST: "a file is in the way where a folder has to be: give another place",
    errno.EISDIR: "a folder is in the way where a file has to be: remove it, or give another name",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EFBIG: "the file system, or a limit of this process, allows no file of that size",
}


@contextmanager
def named_errors(path: str | bytes | os.PathLike[str]) -> Iterator[None]:
    """What the system says about writing `path`, or files below it, comes as CannotWrite.

    Descriptors and temporary names, which an OSError would tell of, say nothing to a person.
    """
    try:
        yield
    except OSError as error:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        reason = error.strerror or str(error)
        hint = _REMEDIES.get(error.errno or 0, "look at that place, or give another one")
        raise CannotWrite(f"cannot write {shown}: {reason}", hint=hint) from error


def safe_parts(name: bytes) -> tuple[bytes, ...]:
    """Splits a name into folders and file. Raises UnsafeName."""
    parts = tuple(name.split(b"/"))
    shown = name.decode("utf-8", "backslashreplace")
    for part in parts:
        if part in (b"", b".", b".."):
            raise UnsafeName(
                f"{shown!r} cannot be copied to a file: it has the part {part.decode()!r}",
                hint="copy such objects one by one, to names of your own",
            )
        if len(part) > _NAME_BYTES_MAX or b"\0" in part:
            raise UnsafeName(f"{shown!r} cannot be copied to a file: no file can have that name")
    return parts


def check_distinct(names: list[tuple[bytes, ...]]) -> None:
    """Raises UnsafeName where one name is another's folder."""
    files = set(names)
    for name in names:
        for depth in range(1, len(name)):
            if name[:depth] in files:
                shown = b"/".join(name[:depth]).decode("utf-8", "backslashreplace")
                raise UnsafeName(
                    f"{shown!r} is an object, and others lie under it: a file cannot be both",
                    hint="copy the object itself to another place",
                )


@contextmanager
def opened_folder(folder: int, parts: tuple[bytes, ...], *, make: bool = True) -> Iterator[int]:
    """A descriptor of the folder `parts` below `folder`, which is made where it is missing; or,
    without `make`, raises FileNotFoundError there."""
    current = os.dup(folder)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                below = os.open(part, flags, dir_fd=current)
            except OSError as error:
                if not make and isinstance(error, FileNotFoundError):
                    raise
                shown = b"/".join(parts).decode("utf-8", "backslashreplace")
                raise UnsafeName(
                    f"the folder {shown!r} cannot be entered: {error.strerror}",
                    hint="a file or a symbolic link is in the way",
                ) from error
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


@contextmanager
def whole_file(folder: int, name: bytes, size: int) -> Iterator[int]:
    """A descriptor to write `size` bytes to; at the end they are `name`, on disk.

    Where the body raises, no file is left and what had the name before is untouched.
    """
    temporary = b".racer-" + os.urandom(8).hex().encode() + b".part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666, dir_fd=folder)
    try:
        try:
            if size:
                os.posix_fallocate(fd, 0, size)  # A full disk says so now.
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """pwrite until all of it is written."""
    while data:
        written = os.pwrite(fd, data, offset)
        offset += written
        data = data[written:]
