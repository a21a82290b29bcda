"""`racer://` for everything that speaks fsspec: pandas, datasets, transformers, pyarrow.

    pandas.read_parquet("racer://local/bucket/table.parquet")

Layer: on `client`; the one door to fsspec, which has to be installed. Read-only. Names are those of
racer URLs without the scheme, in one spelling, so that what `ls` gives can be opened and matched;
an open file is one version of its object. Registered by entry point: importing this is not needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from racer.client import TIMEOUT_SECONDS, Client
from racer.errors import Forbidden, NotFound
from racer.results import Entry
from racer.urls import SCHEME, RacerUrl

# Written as they are: what URLs have plainly, and what their paths may have too. A dataset is cut
# by folders like `year=2026`, whose names its readers take apart. Not ":", which fsspec cuts at.
_PLAIN = rb"A-Za-z0-9\-._~!$&'()+,;=@"
_SPELLING = re.compile(
    rb"%(?P<escaped>[0-9A-Fa-f]{2})|(?P<other>[^/" + _PLAIN + rb"*?\[\]#%])", re.ASCII
)
_IS_PLAIN = re.compile(rb"[" + _PLAIN + rb"]")

_READ_ONLY = "racer:// is read-only: write to the origin"


class RacerFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files are objects, directories are prefixes; caches and buckets are at the top.

    `socket`, `run_dir` and `timeout` are those of `Client`.
    """

    protocol = "racer"
    root_marker = ""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.client = Client(socket=socket, run_dir=run_dir, timeout=timeout)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return _spelled(os.fspath(path).removeprefix(SCHEME)).rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """One level. Raises FileNotFoundError where there is nothing."""
        path = self._strip_protocol(path)
        entries = list(self._children(path))
        if not entries:
            entries = [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def _children(self, path: str) -> Iterator[dict[str, Any]]:
        if not path:
            for cache in self.client.caches():
                yield _directory(cache)
            return
        with _translated(path):
            try:
                yield from self._listed(
                    RacerUrl.parse(f"{SCHEME}{path}/" if "/" in path else SCHEME + path)
                )
            except NotFound:
                return  # A web server cannot list: files are found by name only.

    def _listed(self, folder: RacerUrl) -> Iterator[dict[str, Any]]:
        folders = [folder]
        while folders:
            folder = folders.pop()
            for entry in self.client.list(folder, recursive=False):
                if entry.is_prefix and entry.url == f"{folder}/":
                    # Of keys with "//": without a name, it would be its own parent here.
                    folders.append(RacerUrl.parse(entry.url))
                elif entry.url != str(folder):  # The marker object of a folder made by hand.
                    yield _detail(entry)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size, type and ETag. Raises FileNotFoundError."""
        path = self._strip_protocol(path)
        if not path:
            return _directory("")
        url = RacerUrl.parse(SCHEME + path)
        if not url.key:
            return self._known_directory(path)
        with _translated(path):
            try:
                stat = self.client.stat(url)
            except NotFound:
                return self._known_directory(path)
        return {"name": path, "size": stat.size, "type": "file", "ETag": stat.etag}

    def exists(self, path: str, **_: Any) -> bool:
        """Raises what keeps it from being known, be it that no daemon answers."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """As `exists`."""
        try:
            return bool(self.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def _known_directory(self, path: str) -> dict[str, Any]:
        if next(self._children(path), None) is None:
            raise FileNotFoundError(f"nothing lies at {SCHEME}{path}")
        return _directory(path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The object or a part of it; negative positions count from its end."""
        path = self._strip_protocol(path)
        with _translated(path):
            if start is None and end is None:
                return self.client.read(SCHEME + path)
            stat = self.client.stat(SCHEME + path)
            first, last, _step = slice(start, end).indices(stat.size)
            if first >= last:
                return b""
            return self.client.read(SCHEME + path, first, last - first, etag=stat.etag)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | str | None = "default", **options: Any
    ) -> RacerFile:
        options.pop("autocommit", None)
        options.pop("compression", None)
        if mode != "rb":
            raise PermissionError(_READ_ONLY)
        if "etag" not in options:  # Else a file that was open in another process comes back.
            info = self.info(path)
            if info["type"] != "file":
                raise IsADirectoryError(f"{SCHEME}{path} is a prefix, not an object")
            options |= {"size": info["size"], "etag": info["ETag"]}
        return RacerFile(self, self._strip_protocol(path), mode, block_size, **options)

    def rm_file(self, path: str) -> None:
        raise PermissionError(_READ_ONLY)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        raise PermissionError(_READ_ONLY)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        raise PermissionError(_READ_ONLY)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise PermissionError(_READ_ONLY)

    def rmdir(self, path: str) -> None:
        raise PermissionError(_READ_ONLY)

    def created(self, path: str) -> None:
        raise NotImplementedError("origins do not tell when an object was created")

    def modified(self, path: str) -> None:
        raise NotImplementedError("compare the ETag of `info` instead")

    def checksum(self, path: str) -> str:
        """The ETag: it changes when the content does."""
        return str(self.info(path).get("ETag", ""))

    ukey = checksum


class RacerFile(AbstractBufferedFile):  # type: ignore[misc]
    """One version of an object: a read of another one raises VersionChanged."""

    def __init__(self, fs: RacerFileSystem, path: str, *arguments: Any, etag: str, **options: Any):
        self.etag = etag  # Some caches read while they are made.
        super().__init__(fs, path, *arguments, **options)
        self.kwargs["etag"] = etag  # Pickled with the rest: the other process reads this version.

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        if start >= end:
            return b""
        with _translated(self.path):
            data: bytes = self.fs.client.read(
                SCHEME + self.path, start, end - start, etag=self.etag
            )
        return data


def _spelled(path: str) -> str:
    """A path in the one spelling that names have here, so that patterns match what is listed.

    Marks of patterns stay as they are; where a name has them, they are escaped.
    """

    def spell(match: re.Match[bytes]) -> bytes:
        byte = match["other"] or bytes((int(match["escaped"], 16),))
        return byte if _IS_PLAIN.match(byte) else b"%%%02X" % byte[0]

    return _SPELLING.sub(spell, path.encode("utf-8", "surrogateescape")).decode("ascii")


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _detail(entry: Entry) -> dict[str, Any]:
    name = _spelled(entry.url.removeprefix(SCHEME)).rstrip("/")
    if entry.is_prefix:
        return _directory(name)
    return {"name": name, "size": entry.size, "type": "file", "ETag": entry.etag}


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """fsspec's callers branch on OSErrors; all other errors stay what they are."""
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(f"{SCHEME}{path}: {error}") from error
    except Forbidden as error:
        raise PermissionError(f"{SCHEME}{path}: {error}") from error
