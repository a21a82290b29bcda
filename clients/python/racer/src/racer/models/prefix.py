"""A prefix behind racerd as a source of model files.

Layer: models, I/O driver on the client. The source has a client of its own, so that cancelling a
load ends its reads and nobody else's. Bulk reads land in memory that the daemon writes into; where
the daemon ends in the middle, the landing is replaced and the read tried again as often as
`racer.retry` allows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property

from racer.bulk import SMALL_BYTES
from racer.client import TIMEOUT_SECONDS, Client
from racer.deadline import Deadline
from racer.errors import (
    Closed,
    ConnectionLost,
    DaemonUnavailable,
    MemoryLost,
    NotFound,
    ProtocolError,
)
from racer.landing import Landing
from racer.models.names import DEFAULT_INDEX, no_model
from racer.models.source import DeviceLanding, SourceFile
from racer.models.stock import SharedStock
from racer.results import Info
from racer.retry import Retries
from racer.shared import SharedChunk
from racer.turns import Flag
from racer.urls import RacerUrl

_CONNECTIONS_MAX = 64
# What is looked for where the origin cannot list: what an index names is found by its name anyway.
_WELL_KNOWN = (DEFAULT_INDEX, "model.safetensors", "consolidated.safetensors")


class RacerSource:
    """The objects under the prefix of `url`, which is taken as a directory.

    `names` are those of its files, where they are known: nothing is listed then. With `share`,
    files are looked for together with what of them is shared. `socket`, `run_dir` and `timeout` are
    as for `Client`.
    """

    def __init__(
        self,
        url: str | RacerUrl,
        *,
        names: Sequence[str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        share: bool = False,
    ) -> None:
        parsed = RacerUrl.parse(url)
        key = parsed.key.rstrip(b"/")
        self._base = RacerUrl(parsed.cache, parsed.bucket, key)
        self.location = str(self._base).rstrip("/")
        self.timeout = TIMEOUT_SECONDS if timeout is None else timeout
        self.client = Client(
            socket=socket,
            run_dir=run_dir,
            timeout=self.timeout,
            connections_max=_CONNECTIONS_MAX,
        )
        self.cancelled = Flag()
        self._gpu: bool | None = None  # Whether the GPU that is loaded into is the daemon's too.
        self._names = names
        self._stock = SharedStock(self.client) if share else None

    @property
    def page_bytes(self) -> int:
        return self._info.page_bytes

    @property
    def share_bytes(self) -> int:
        told = self._stock.piece_bytes if self._stock is not None else 0
        return told or self._info.share_chunk_bytes

    @cached_property
    def _info(self) -> Info:
        return self.client.info(self._base.cache)

    def _url(self, name: str) -> RacerUrl:
        key = b"/".join(part for part in (self._base.key, name.encode()) if part)
        return RacerUrl(self._base.cache, self._base.bucket, key)

    def names(self) -> Sequence[str]:
        if self._names is not None:
            return self._names
        hint = "check the URL with `racer ls`"
        try:
            names = self._listed()
        except NotFound as error:
            names = []  # Plain web servers cannot list.
            hint = error.hint or hint
        names = names or [name for name in _WELL_KNOWN if self.find(name) is not None]
        if not names:
            if self._base.key and self.find("") is not None:
                raise no_model(self.location)
            raise NotFound(f"nothing lies under {self.location}/", hint=hint)
        return names

    def _listed(self) -> list[str]:
        folder = self._base.key + b"/" if self._base.key else b""
        listed = self.client.list(
            RacerUrl(self._base.cache, self._base.bucket, folder), recursive=False
        )
        keys = [RacerUrl.parse(entry.url).key for entry in listed if not entry.is_prefix]
        # A name that is not UTF-8 is nothing that a model refers to, but messages may show it.
        names = [key[len(folder) :].decode("utf-8", "backslashreplace") for key in keys]
        return [name for name in names if name]

    def find(self, name: str) -> SourceFile | None:
        url = self._url(name)
        try:
            if self._stock is not None:
                size, version = self._stock.survey(str(url))
            else:
                _, size, version, _ = self.client.stat(url)
        except NotFound:
            return None
        return SourceFile(name, str(url), size, version)

    def read(self, file: SourceFile, start: int, stop: int) -> bytes:
        if self._stock is not None:
            there = self._stock.read(file, start, stop)
            if there is not None:
                return there
        data = self.client.read(file.url, start, stop - start, etag=file.version)
        _check_length(file, stop - start, len(data))
        return data

    def read_whole(self, name: str, bytes_max: int) -> tuple[SourceFile, bytes | None] | None:
        """In one exchange, where the file is small: nobody shares it, so nobody is asked."""
        url = self._url(name)
        try:
            size, version, front = self.client.read_front(url, min(SMALL_BYTES, bytes_max))
        except NotFound:
            return None
        file = SourceFile(name, str(url), size, version)
        if size > bytes_max:
            return file, None
        return file, front + self.read(file, len(front), size) if len(front) < size else front

    def is_at_hand(self, file: SourceFile) -> bool:
        return self._stock is not None and self._stock.has(file, 0, 1)

    def landing(self, nbytes: int) -> RacerLanding:
        return RacerLanding(self, nbytes)

    def share(self, file: SourceFile, at: int) -> RacerShare:
        return _checked(file, self.client.share(file.url, at, etag=file.version))

    def shared_already(self, file: SourceFile, at: int) -> RacerShare | None:
        shared = self._stock.take(file, at) if self._stock is not None else None
        return None if shared is None else _checked(file, shared)

    def shared_at_hand(self, file: SourceFile, at: int) -> RacerShare | None:
        shared = self._stock.take_at_hand(file, at) if self._stock is not None else None
        return None if shared is None else _checked(file, shared)

    def reads_into(self, device: object) -> bool:
        if self._gpu is None:
            from racer.models.device import serves_gpu  # Not for those who load into host memory.

            self._gpu = serves_gpu(self.client, self._base.cache, device)
        return self._gpu

    def device_landing(self, nbytes: int, device: object) -> DeviceLanding | None:
        if not self.reads_into(device):
            return None
        from racer.models.device import open_landing

        return open_landing(self.client, nbytes, device, self.cancelled)

    def cancel(self) -> None:
        self.cancelled.set()
        self.client.abort()

    def close(self) -> None:
        self.cancelled.set()
        if self._stock is not None:
            self._stock.close()
        self.client.close()


class RacerShare:
    """A `SharedChunk`."""

    def __init__(self, shared: SharedChunk) -> None:
        self._shared = shared
        self.start = shared.start
        self.stop = shared.stop
        self.rungs = shared.part.rungs

    @property
    def view(self) -> memoryview:
        return self._shared.view

    def fileno(self) -> int:
        return self._shared.fileno()

    def close(self) -> None:
        self._shared.close()


class RacerLanding:
    """A `Landing`, replaced when the daemon that wrote into it went away."""

    def __init__(self, source: RacerSource, nbytes: int) -> None:
        self._source = source
        self._nbytes = nbytes
        self._landing = source.client.landing(nbytes)

    @property
    def view(self) -> memoryview:
        return self._landing.view

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        retries = Retries(restarts=True)
        deadline = Deadline.after(self._source.timeout)
        while True:
            try:
                done = self._landing_now().read(file.url, start, stop - start, etag=file.version)
                _check_length(file, stop - start, done.bytes)
                return done.rungs
            except (ConnectionLost, MemoryLost, DaemonUnavailable) as error:
                pause = retries.pause_after(error, deadline)
            if self._source.cancelled.wait(pause):
                raise Closed(f"reading {file.url} was cancelled")

    def _landing_now(self) -> Landing:
        if self._landing.lost:
            self._landing.close()
            self._landing = self._source.client.landing(self._nbytes)
        return self._landing

    def close(self) -> None:
        self._landing.close()


def _checked(file: SourceFile, shared: SharedChunk) -> RacerShare:
    try:
        _check_length(file, file.size, shared.part.size)
    except BaseException:
        shared.close()
        raise
    return RacerShare(shared)


def _check_length(file: SourceFile, asked: int, came: int) -> None:
    if came != asked:
        raise ProtocolError(
            f"{came:,} bytes of {file.url} came instead of {asked:,}, though its size is known"
        )
