"""Where a cache's socket is, and what to say when nobody answers there.

Layer: bottom. Order: `socket=` or `run_dir=` of the caller, `$RACER_SOCKET` (one cache's socket, as
it is mounted into a pod), `$RACER_RUN_DIR`, then the daemon's own defaults. In a run directory the
cache of the URL chooses the folder: `<run-dir>/<cache>/client/socket`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from racer.errors import DaemonUnavailable
from racer.urls import is_cache_name

# sun_path has 108 bytes and ends with a NUL.
SOCKET_PATH_BYTES_MAX = 107


class SocketPlace(NamedTuple):
    """Either one socket (`socket`) or a run directory with one per cache (`run_dir`).

    `source` says where the setting came from, for messages.
    """

    socket: str | None
    run_dir: str | None
    source: str

    @classmethod
    def find(cls, socket: str | None = None, run_dir: str | None = None) -> SocketPlace:
        """The caller's choice, else the environment's, else the default run directory."""
        if socket is not None and run_dir is not None:
            raise ValueError("give socket= or run_dir=, not both")
        if socket is not None:
            return cls(os.fspath(socket), None, "socket=")
        if run_dir is not None:
            return cls(None, os.fspath(run_dir), "run_dir=")
        if from_environment := os.environ.get("RACER_SOCKET"):
            return cls(from_environment, None, "$RACER_SOCKET")
        if from_environment := os.environ.get("RACER_RUN_DIR"):
            return cls(None, from_environment, "$RACER_RUN_DIR")
        if os.geteuid() != 0 and (runtime_dir := os.environ.get("XDG_RUNTIME_DIR")):
            return cls(None, os.path.join(runtime_dir, "racer"), "$XDG_RUNTIME_DIR")
        return cls(None, "/run/racer", "the default")

    def path_for(self, cache: str) -> str:
        """The socket of `cache`. Raises DaemonUnavailable where its path is too long to connect."""
        if self.socket is not None:
            path = self.socket
        else:
            assert self.run_dir is not None
            path = os.path.join(self.run_dir, cache, "client", "socket")
        length = len(os.fsencode(path))
        if length > SOCKET_PATH_BYTES_MAX:
            raise DaemonUnavailable(
                f"the socket path {path} has {length} bytes; Unix sockets take"
                f" {SOCKET_PATH_BYTES_MAX}",
                hint=f"use a shorter run directory (it came from {self.source})",
                retry="never",
            )
        return path

    def caches(self) -> list[str]:
        """Names of the caches whose sockets lie in the run directory, sorted.

        Of a single socket, the name that its path tells, if any.
        """
        if self.run_dir is None:
            assert self.socket is not None
            name = cache_of_path(self.socket)
            return [name] if name is not None else []
        try:
            names = os.listdir(self.run_dir)
        except OSError:
            return []
        return sorted(n for n in names if is_cache_name(n) and _is_socket(self.path_for(n)))

    def unreachable(self, path: str, error: OSError) -> DaemonUnavailable:
        """What `error` at connecting to `path` means, and what to check."""
        name = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            others = self.caches() if self.run_dir is not None else []
            there = f"caches there: {', '.join(others)}" if others else "no cache is served there"
            where = "" if self.run_dir is None else f"; {there}"
            hint = f"is racerd running, and is this its socket? the path came from {self.source}"
            return DaemonUnavailable(f"there is no socket {path}{where}", hint=hint)
        if error.errno == errno.ECONNREFUSED:
            return DaemonUnavailable(
                f"nobody listens on {path}",
                hint="a stopped racerd left the socket: start it, or see its log",
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return DaemonUnavailable(
                f"this user may not connect to {path}{_owner(path)}",
                hint="join the socket's group, or have the daemon's socket group or mode changed",
                retry="never",
            )
        return DaemonUnavailable(
            f"cannot connect to {path}: {name}", hint=f"the path came from {self.source}"
        )


def cache_of_path(path: str) -> str | None:
    """The cache that a socket's path names, `…/<cache>/client/socket`, or None."""
    folder, client, name = path.rstrip("/").rpartition("/client/socket")
    cache = os.path.basename(folder)
    return cache if client and not name and is_cache_name(cache) else None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _owner(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f" (uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o})"
