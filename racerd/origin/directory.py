"""A local directory as an origin: a bucket is a sub-directory, a key is a path below it.

Layer: origin; blocking, on the origin threads. This one provider does not go through obstore: its
LocalStore follows symlinks out of the root, cannot name files that are not UTF-8, and hands out
bytes that were copied once more. Nothing outside the root can be reached (`beneath`).

A file has no ETag, so a weak one is made of size, nanosecond mtime and inode. It is compared on the
open descriptor before and after each read: a file that is replaced or written to in between is
`version_changed`, never a mixture. A key with an empty, `.` or `..` part names no file, because
another key already does: it is not_found.
"""

from __future__ import annotations

import errno
import heapq
import logging
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from racerd.config.origin_options import OriginOptions
from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.beneath import ABSENT, Root, is_regular
from racerd.origin.etags import file_etag
from racerd.origin.failures import (
    bucket_forbidden,
    cancelled,
    forbidden,
    not_found,
    not_nameable,
    unavailable,
    version_changed,
)
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.runtime.deadline import Deadline
from racerd.units import MIB

_LOG = logging.getLogger(__name__)
_STEP_BYTES = 4 * MIB


class DirectoryOrigin:
    """The files below `root`. Opened on first use of a call; `close` gives the descriptor back."""

    def __init__(self, root: Path, options: OriginOptions) -> None:
        self._path = root
        self._buckets = options.buckets
        self._root: Root | None = None

    @property
    def description(self) -> str:
        return f"file://{self._path}"

    def close(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            root.close()

    # --- names ------------------------------------------------------------------------------

    def _opened(self) -> Root:
        if self._root is None:
            try:
                root = Root(self._path).__enter__()
            except OSError as error:
                raise unavailable(
                    f"the directory cannot be opened: {error.strerror}",
                    self.description,
                    hint="check that it exists and that racerd may read it",
                ) from error
            if root.walks:
                _LOG.warning(
                    "%s: this kernel or sandbox has no openat2; symlinks are not followed",
                    self.description,
                )
            if self._root is None:
                self._root = root
            else:
                root.close()  # Another thread was first.
        return self._root

    def _check_bucket(self, bucket: str) -> None:
        if self._buckets is not None and bucket not in self._buckets:
            raise bucket_forbidden(bucket, self._buckets)

    def _open(self, object_id: ObjectId) -> int:
        """Opens the object's file. Raises not_found, forbidden or origin_unavailable."""
        self._check_bucket(object_id.bucket)
        parts = [object_id.bucket.encode(), *object_id.key.split(b"/")]
        if any(part in (b"", b".", b"..") for part in parts):
            raise not_nameable(
                object_id, self.description, "a file's path has no empty, '.' or '..' part"
            )
        try:
            return self._opened().open(parts)
        except OSError as error:
            raise self._translated(error, object_id) from error

    def _translated(self, error: OSError, object_id: ObjectId) -> RacerError:
        if error.errno in ABSENT:
            return not_found(object_id, self.description)
        if error.errno in (errno.EACCES, errno.EPERM):
            return forbidden(object_id.text, self.description, error.strerror or "")
        return unavailable(f"{object_id.text}: {error.strerror}", self.description)

    # --- reads ------------------------------------------------------------------------------

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        deadline.check("looking at a file")
        fd = self._open(object_id)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if not is_regular(found):
            raise not_found(object_id, self.description)
        return _version(object_id, found)

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        *,
        deadline: Deadline,
        cancel: CancelToken,
    ) -> memoryview:
        fd = self._open(version.object_id)
        try:
            self._compare(fd, version)
            # An anonymous mapping, not a bytearray: its pages come zeroed only as they are filled.
            view = memoryview(mmap.mmap(-1, stop - start))
            done = 0
            while done < stop - start:
                deadline.check("reading a file")
                if cancel.cancelled:
                    raise cancelled("reading a file")
                try:
                    count = os.preadv(fd, [view[done : done + _STEP_BYTES]], start + done)
                except OSError as error:
                    raise self._translated(error, version.object_id) from error
                if count == 0:
                    raise version_changed(version.object_id, version.etag, None)
                done += count
            self._compare(fd, version)
            return view
        finally:
            os.close(fd)

    def _compare(self, fd: int, version: ObjectVersion) -> None:
        found = os.fstat(fd)
        if not is_regular(found):
            raise not_found(version.object_id, self.description)
        now = _version(version.object_id, found)
        if now != version:
            raise version_changed(version.object_id, version.etag, now.etag)

    # --- listings ---------------------------------------------------------------------------

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        self._check_bucket(bucket)
        if delimiter not in (None, b"/"):
            raise RequestError("bad_request", "a directory is listed by the delimiter '/' or none")
        return self._list(bucket, (prefix, after, delimiter is not None), deadline)

    def _list(
        self, bucket: str, wanted: tuple[bytes, bytes | None, bool], deadline: Deadline
    ) -> Iterator[ListedObject | ListedPrefix]:
        """Starts at the deepest folder that the prefix names. Opens nothing before it is asked."""
        folder = wanted[0].rpartition(b"/")[0]
        parts = folder.split(b"/") if folder else []
        if any(part in (b"", b".", b"..") for part in parts):
            return
        try:
            fd = self._opened().open([bucket.encode(), *parts], os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in ABSENT:
                return
            raise self._translated(error, ObjectId("x", bucket, folder or b"/")) from error
        yield from self._walk(fd, folder + b"/" if folder else b"", wanted, deadline)

    def _walk(
        self,
        fd: int,
        base: bytes,
        wanted: tuple[bytes, bytes | None, bool],
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        """Yields what lies in the open directory `fd`, whose keys start with `base`; closes it."""
        prefix, after, delimited = wanted
        try:
            # A directory sorts as its name with the slash: that is where its keys lie.
            for key, name in self._sorted(fd, base):
                deadline.check("listing a directory")
                is_folder = key.endswith(b"/")
                if not (key.startswith(prefix) or (is_folder and prefix.startswith(key))):
                    continue
                if after is not None and key <= after and not (is_folder and after.startswith(key)):
                    continue
                if not is_folder:
                    yield from self._listed(fd, key, name)
                elif delimited:
                    if after is None or key > after:
                        yield ListedPrefix(key)
                else:
                    below = self._open_below(fd, name, os.O_DIRECTORY)
                    if below is not None:
                        yield from self._walk(below, key, wanted, deadline)
        finally:
            os.close(fd)

    def _sorted(self, fd: int, base: bytes) -> Iterator[tuple[bytes, bytes]]:
        """(key, name) of the entries of `fd` in byte order of the key."""
        heap = []
        for name_text in os.listdir(fd):
            name = os.fsencode(name_text)
            try:
                # Follows symlinks; whether they stay inside is checked when they are opened.
                mode = os.stat(name, dir_fd=fd).st_mode
            except OSError:
                continue  # Went away, or a dangling link: no object.
            if stat.S_ISDIR(mode):
                heap.append((base + name + b"/", name))
            elif stat.S_ISREG(mode):
                heap.append((base + name, name))
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)

    def _open_below(self, fd: int, name: bytes, flags: int) -> int | None:
        """Opens an entry of a directory that is being listed; None where it is not for us."""
        try:
            link = os.readlink(name, dir_fd=fd)
        except OSError:
            link = None
        try:
            if link is None:
                return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            return None
        return None if flags & os.O_DIRECTORY else self._open_linked(fd, name)

    def _open_linked(self, fd: int, name: bytes) -> int | None:
        """Opens a file behind a symlink, resolved beneath the root."""
        folder = os.readlink(f"/proc/self/fd/{fd}").encode("utf-8", "surrogateescape")
        root = os.fsencode(self._path.resolve())
        if not (folder + b"/").startswith(root + b"/"):
            return None
        parts = [*folder[len(root) :].strip(b"/").split(b"/"), name]
        try:
            return self._opened().open([part for part in parts if part])
        except OSError:
            return None

    def _listed(self, fd: int, key: bytes, name: bytes) -> Iterator[ListedObject]:
        file = self._open_below(fd, name, os.O_RDONLY | os.O_NONBLOCK)
        if file is None:
            return
        try:
            found = os.fstat(file)
        finally:
            os.close(file)
        if is_regular(found):
            etag = file_etag(found.st_size, found.st_mtime_ns, found.st_ino)
            yield ListedObject(key, found.st_size, etag)

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        deadline.check("listing buckets")
        if self._buckets is not None:
            return sorted(self._buckets)
        fd = self._opened().open([], os.O_RDONLY | os.O_DIRECTORY)
        try:
            names = [name for name in os.listdir(fd) if not name.startswith(".")]
            return sorted(n for n in names if _is_folder(fd, n))
        finally:
            os.close(fd)


def _is_folder(fd: int, name: str) -> bool:
    try:
        name.encode()
        return stat.S_ISDIR(os.stat(name, dir_fd=fd).st_mode)
    except (OSError, UnicodeEncodeError):
        return False


def _version(object_id: ObjectId, found: os.stat_result) -> ObjectVersion:
    etag = file_etag(found.st_size, found.st_mtime_ns, found.st_ino)
    return ObjectVersion(object_id, etag, found.st_size)
