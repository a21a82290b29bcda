"""A local directory as an origin: a bucket is a sub-directory, a key is a path below it.

Layer: origin. Deviation: obstore's LocalStore is not used. It follows symlinks out of its root,
cannot name files whose names are not UTF-8, drops doubled and trailing slashes, and looks a path
up twice (check, then use). Here the kernel keeps every look-up beneath the root (`beneath`), so
that symlinks inside it work, as Hugging Face caches need, and those that lead out do not exist.

A version is (size, mtime in nanoseconds, inode): weak, because a writer can restore all three, and
because two writes within one tick of the kernel's clock may share an mtime. It is compared before
and after each fetch on the descriptor that is read. Replace files by rename, not in place.

A directory has no name for keys with empty parts ("a//b", a leading or trailing slash) or with
"." and ".." parts: such objects do not exist.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.beneath import Beneath
from racerd.origin.buffers import fresh_buffer
from racerd.origin.etags import file_etag
from racerd.origin.failures import (
    cancelled,
    forbidden,
    not_found,
    not_nameable,
    unavailable,
    version_changed,
)
from racerd.origin.names import is_text
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.runtime.deadline import Deadline
from racerd.units import MIB

_LOG = logging.getLogger(__name__)
_READ_BYTES = 4 * MIB
# NONBLOCK: opening a pipe must not wait for its writer. It means nothing for regular files.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV, errno.EISDIR,
           errno.ENXIO)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """A directory entry that can be listed. `name` has a trailing slash for directories."""

    name: bytes
    size: int
    etag: str
    identity: tuple[int, int]

    @property
    def is_directory(self) -> bool:
        return self.name.endswith(b"/")


def why_unusable(root: bytes) -> str:
    """Why nothing can be read from the directory `root` now, in a few words; "" where it can."""
    try:
        found = os.stat(root)
    except PermissionError:
        return f"user {os.geteuid()} may not search the folders above it"
    except OSError:
        return "not there yet"
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    if not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
        return f"user {os.geteuid()} may not read it"
    return ""


class DirectoryOrigin:
    """Implements `Origin` for file://. Holds no descriptor between calls."""

    def __init__(self, root: bytes, beneath: Beneath) -> None:
        self._root = root
        self._beneath = beneath
        self._told_refusal = False

    @property
    def description(self) -> str:
        return "file://" + _text(self._root)

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        descriptor = self._open(object_id)
        try:
            return _version(object_id, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        *,
        deadline: Deadline,
        cancel: CancelToken,
        room: memoryview | None = None,
    ) -> memoryview:
        descriptor = self._open(version.object_id)
        try:
            _check(version, descriptor)
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
            buffer = fresh_buffer(stop - start) if room is None else room[: stop - start]
            filled = 0
            while filled < len(buffer):
                if cancel.cancelled:
                    raise cancelled("reading the file")
                deadline.check("reading the file")
                chunk = buffer[filled : filled + _READ_BYTES]
                count = self._read(version.object_id, descriptor, chunk, start + filled)
                if count == 0:
                    raise version_changed(version.object_id, version.etag, None)
                filled += count
            _check(version, descriptor)
            return buffer
        finally:
            os.close(descriptor)

    def _read(self, object_id: ObjectId, descriptor: int, chunk: memoryview, offset: int) -> int:
        try:
            return os.preadv(descriptor, [chunk], offset)
        except OSError as error:
            raise self._failure(error, object_id.text, object_id) from error

    def _open(self, object_id: ObjectId) -> int:
        """Opens a regular file; the caller closes it."""
        path = self._path(object_id)
        try:
            descriptor = self._beneath.open(path, _FILE)
        except OSError as error:
            raise self._failure(error, object_id.text, object_id) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise not_found(object_id.text, self.description)
        return descriptor

    def _path(self, object_id: ObjectId) -> bytes:
        path = object_id.bucket.encode() + b"/" + object_id.key
        if not _is_name(path):
            raise not_nameable(
                object_id, self.description, "a directory has no empty, '.' or '..' names"
            )
        return path

    def _failure(
        self, error: OSError, subject: str, object_id: ObjectId | None = None
    ) -> RacerError:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        # Before the root is looked at: it may be the root that this user may not see.
        if error.errno in (errno.EACCES, errno.EPERM):
            return self._refusal(subject, name)
        if not os.path.isdir(self._root):
            return unavailable(
                "the directory is not there",
                self.description,
                hint="create it, mount it, or correct the cache's URL",
            )
        if error.errno in _ABSENT and object_id is not None:
            return not_found(object_id.text, self.description)
        return unavailable(
            f"reading {subject} failed ({name}: {os.strerror(error.errno or 0)})",
            self.description,
            hint="check the disk or mount below the directory, and the daemon's descriptor limit",
        )

    def _refusal(self, subject: str, name: str) -> RequestError:
        """Access is refused; the log tells the first one, and callers are told each."""
        failure = forbidden(
            subject,
            self.description,
            name,
            hint=f"the daemon runs as user {os.geteuid()}: let it read the file and search the"
            " folders on the way there (mode, owner, group; see `namei -l`)",
        )
        if not self._told_refusal:
            self._told_refusal = True
            _LOG.warning("%s; %s; further refusals are not logged", failure.message, failure.hint)
        return failure

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        """A symlink to a directory is followed unless it leads back to one that is being listed."""
        name = bucket.encode()
        if bucket in (".", "..") or self.entries(name) is None:
            raise RequestError(
                "not_found",
                f"bucket {bucket!r} does not exist at {self.description}",
                hint="a bucket is a sub-directory of the cache's directory",
            )
        parent, slash, start = prefix.rpartition(b"/")
        if slash and not _is_name(parent):
            return iter(())
        listing = _Listing(self, name, delimiter is not None, after or b"", deadline)
        return listing.below(parent + slash, start, ())

    def entries(self, path: bytes) -> list[_Entry] | None:
        """Returns the entries of a directory in byte order of `name`, None if there is none."""
        try:
            descriptor = self._beneath.open(path, _DIRECTORY)
        except OSError as error:
            if error.errno in _ABSENT and os.path.isdir(self._root):
                return None
            raise self._failure(error, _text(path)) from error
        try:
            names = [os.fsencode(name) for name in os.listdir(descriptor)]
            entries = [self._entry(path, name, descriptor) for name in names]
        finally:
            os.close(descriptor)
        return sorted((e for e in entries if e is not None), key=lambda entry: entry.name)

    def _entry(self, directory: bytes, name: bytes, descriptor: int) -> _Entry | None:
        """The entry `name`; a link is what it leads to. None for what cannot be an object."""
        try:
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                target = self._beneath.open(directory + b"/" + name, os.O_PATH)
                try:
                    found = os.fstat(target)
                finally:
                    os.close(target)
        except OSError as error:
            if error.errno in _ABSENT:
                return None  # It vanished, dangles, or leads outside: there is no such object.
            raise self._failure(error, _text(directory + b"/" + name)) from error
        if stat.S_ISDIR(found.st_mode):
            name += b"/"
        elif not stat.S_ISREG(found.st_mode):
            return None
        etag = file_etag(found.st_size, found.st_mtime_ns, found.st_ino)
        return _Entry(name, found.st_size, etag, (found.st_dev, found.st_ino))

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        names = [entry.name[:-1] for entry in self.entries(b".") or () if entry.is_directory]
        # A bucket's name is text: a directory whose name is not UTF-8 cannot be named.
        return sorted(_text(name) for name in names if is_text(name))

    def close(self) -> None:
        """Nothing is held."""


class _Listing:
    """One listing: depth first in byte order, which is the order of whole keys."""

    def __init__(
        self,
        origin: DirectoryOrigin,
        bucket: bytes,
        delimited: bool,
        after: bytes,
        deadline: Deadline,
    ) -> None:
        self._origin = origin
        self._bucket = bucket
        self._delimited = delimited
        self._after = after
        self._deadline = deadline

    def below(
        self, directory: bytes, start: bytes, above: tuple[tuple[int, int], ...]
    ) -> Iterator[ListedObject | ListedPrefix]:
        """Yields what lies in `directory` (b"" or ending with a slash) and starts with `start`.

        `above` holds the identities of the directories on the way here: a link to one of them is
        a cycle.
        """
        self._deadline.check("listing")
        path = (self._bucket + b"/" + directory).rstrip(b"/")
        for entry in self._origin.entries(path) or ():
            key = directory + entry.name
            if not entry.name.startswith(start):
                continue
            if not entry.is_directory:
                if key > self._after:
                    yield ListedObject(key, entry.size, entry.etag)
            elif self._delimited:
                if key > self._after:
                    yield ListedPrefix(key)
            elif entry.identity not in above and not self._is_behind(key):
                yield from self.below(key, b"", (*above, entry.identity))

    def _is_behind(self, directory: bytes) -> bool:
        """Whether every key in `directory` comes before `after`."""
        return self._after > directory and not self._after.startswith(directory)


def _version(object_id: ObjectId, found: os.stat_result) -> ObjectVersion:
    etag = file_etag(found.st_size, found.st_mtime_ns, found.st_ino)
    return ObjectVersion(object_id, etag, found.st_size)


def _check(version: ObjectVersion, descriptor: int) -> None:
    found = _version(version.object_id, os.fstat(descriptor))
    if found != version:
        raise version_changed(version.object_id, version.etag, found.etag)


def _is_name(path: bytes) -> bool:
    """Whether a directory can have something of that name."""
    return not any(part in (b"", b".", b"..") for part in path.split(b"/"))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
