"""The socket file of a cache: where it is, and how it is published and taken away.

Layer: serve. Blocking calls on a local filesystem, a handful at start and end.

The socket is bound under another name in the same folder, given its mode and group, made to
listen, and only then renamed to the name that clients know: nobody ever sees one half made. All of
it happens under a lock file, so that two daemons cannot take each other's socket for a stale one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from racerd.errors import ConfigError

PATH_BYTES_MAX = 107  # sun_path has 108 bytes, the last of which is NUL.

_NAME = "socket"
_UNPUBLISHED = ".sock"  # No longer than the name, so that it fits where the name fits.
_OTHERS = 0o007


@dataclass(frozen=True, slots=True)
class SocketFile:
    """Where and how to publish the socket of `cache`."""

    run_dir: Path
    cache: str
    mode: int
    group: int | None
    backlog: int

    @property
    def folder(self) -> Path:
        """What is mounted into a client's pod."""
        return self.run_dir / self.cache / "client"

    @property
    def path(self) -> Path:
        return self.folder / _NAME

    def check(self) -> None:
        """Raises ConfigError where the path cannot be a socket's."""
        length = len(os.fsencode(self.path))
        if length > PATH_BYTES_MAX:
            raise ConfigError(
                [
                    f"the socket path {self.path} has {length} bytes, the limit is"
                    f" {PATH_BYTES_MAX}: use a shorter run directory (--run-dir) or cache name"
                ]
            )

    def publish(self) -> socket.socket:
        """Returns a listening, non-blocking socket. A stale file is replaced, a live one is not.

        Raises ConfigError with what to do about it.
        """
        self.check()
        try:
            self._make_folders()
            with self._lock():
                self._refuse_if_taken()
                return self._bind()
        except OSError as error:
            raise ConfigError(
                [f"the socket {self.path} cannot be made: {error.strerror}; see --run-dir"]
            ) from error

    def withdraw(self, listening: socket.socket, identity: tuple[int, int]) -> None:
        """Closes the socket and removes its file, unless another daemon's is there by now.

        While another daemon starts here, the file is left to it: it takes a dead one over.
        """
        listening.close()
        with contextlib.suppress(FileNotFoundError, _Locked), self._lock():
            if file_identity(self.path) == identity:
                self.path.unlink()

    def _make_folders(self) -> None:
        if not self.run_dir.exists():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            os.chmod(self.run_dir, 0o755)  # Whatever the umask is.
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    [f"{folder} is not a folder of this user: remove it or choose another run dir"]
                )
        # The way to a socket that others may use is open to others; else to its group alone.
        os.chmod(self.folder.parent, 0o755)
        if self.group is not None:
            os.chown(self.folder, -1, self.group)
        os.chmod(self.folder, 0o755 if self.mode & _OTHERS else 0o750)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Beside the folder that clients see, not in it.
        fd = os.open(
            self.folder.parent / "socket.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _Locked(
                    [f"another racerd is starting or stopping on {self.path}: run one at a time"]
                ) from error
            yield
        finally:
            os.close(fd)

    def _refuse_if_taken(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ConfigError([f"{self.path} is not a socket: remove it"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(self.path))
            except (FileNotFoundError, ConnectionRefusedError):
                return  # Nothing there, or the file of a daemon that is gone.
            except BlockingIOError:
                pass  # Its backlog is full: somebody listens.
        raise ConfigError(
            [
                f"another process listens on {self.path}: stop it, or choose another --run-dir"
                " or cache name"
            ]
        )

    def _bind(self) -> socket.socket:
        unpublished = self.folder / _UNPUBLISHED
        unpublished.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind(os.fspath(unpublished))
            if self.group is not None:
                os.chown(unpublished, -1, self.group)
            os.chmod(unpublished, self.mode)
            listening.listen(self.backlog)
            unpublished.rename(self.path)
        except BaseException:
            listening.close()
            unpublished.unlink(missing_ok=True)
            raise
        return listening


class _Locked(ConfigError):
    """Another process publishes or withdraws the same socket now."""


def file_identity(path: Path) -> tuple[int, int]:
    """Device and inode: whether a file is still the one that was made."""
    found = path.lstat()
    return found.st_dev, found.st_ino
