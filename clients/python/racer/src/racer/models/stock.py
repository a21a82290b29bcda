"""Pieces of shared memory that one question brought, until they are asked for one by one.

Layer: models, on the client; any thread. Where another reader of the node has loaded the model
already, most of what a load asks for is there: one exchange for a file tells its size and version
and brings the memory, header included, that would take dozens otherwise. Where nobody has, it costs
what asking for the version costs.
"""

from __future__ import annotations

import logging
import threading

from racer.client import Client
from racer.errors import BadRequest, Closed, MemoryUnavailable, ShareRefused
from racer.models.source import SourceFile
from racer.shared import SharedChunk

_END = 1 << 63
# Each piece is a descriptor of this process, which may have few (1,024 is a usual limit), and a
# model may have hundreds of files. Files that come later are asked about when they are loaded.
_PIECES_MAX = 64

_log = logging.getLogger("racer.models")


class SharedStock:
    """What `survey` brought and `take` did not take yet. `close` gives that up."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._chunks: dict[tuple[str, str], list[SharedChunk]] = {}
        self._surveyed: dict[tuple[str, str], int] = {}  # Up to where; behind it may be more.
        self._refused = False
        self._closed = False
        self.piece_bytes = 0  # How the daemon cuts objects, once an answer has told it.

    def survey(self, url: str) -> tuple[int, str]:
        """Returns size and version of an object; keeps what of it is shared.

        Raises as `Client.stat`.
        """
        found = None if self._is_full() else self._ask(url, 0, None)
        if found is None:
            _, size, version, _ = self._client.stat(url)
            return size, version
        return found

    def take(self, file: SourceFile, at: int) -> SharedChunk | None:
        """The piece with byte `at`, which is the caller's; None where it has to be asked for."""
        with self._asking:  # Whoever comes second finds what the first one's question brings.
            if at >= self._surveyed.get((file.url, file.version), 0):
                self._ask(file.url, at, file.version)
        return self.take_at_hand(file, at)

    def take_at_hand(self, file: SourceFile, at: int) -> SharedChunk | None:
        """As `take`, of what was brought before: nobody is asked."""
        key = (file.url, file.version)
        with self._lock:
            chunk = self._find(key, at, at + 1)
            if chunk is not None:
                self._chunks[key].remove(chunk)
            return chunk

    def has(self, file: SourceFile, start: int, stop: int) -> bool:
        """Whether a piece in stock holds bytes [start, stop)."""
        with self._lock:
            return self._find((file.url, file.version), start, stop) is not None

    def read(self, file: SourceFile, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop), where a piece in stock holds them all."""
        with self._lock:
            chunk = self._find((file.url, file.version), start, stop)
            return None if chunk is None else chunk.read(start, stop)

    def close(self) -> None:
        """Closes what nobody took; done twice it does nothing."""
        with self._lock:
            self._closed = True
            for chunks in self._chunks.values():
                while chunks:
                    chunks.pop().close()

    def _is_full(self) -> bool:
        with self._lock:
            return sum(map(len, self._chunks.values())) >= _PIECES_MAX

    def _find(self, key: tuple[str, str], start: int, stop: int) -> SharedChunk | None:
        for chunk in self._chunks.get(key, ()):
            if chunk.start <= start and stop <= chunk.stop:
                return chunk
        return None

    def _ask(self, url: str, start: int, etag: str | None) -> tuple[int, str] | None:
        """None where the daemon shares nothing, which is remembered."""
        if self._refused:
            return None
        try:
            found = self._client.shared(url, start, etag=etag)
        except (ShareRefused, MemoryUnavailable, BadRequest) as error:
            # What is asked for one by one is refused for the same reason, or is not.
            self._refused = True
            _log.info("asking for shared memory piece by piece: %s", error)
            return None
        with found, self._lock:
            self.piece_bytes = found.share_chunk_bytes
            if self._closed:
                raise Closed(f"loading {url} was ended")
            key = (url, found.etag)
            # Behind the last piece may be more than one answer holds; behind none there is none.
            self._surveyed[key] = found.chunks[-1].stop if found.chunks else _END
            kept = self._chunks.setdefault(key, [])
            kept += found.chunks
            found.chunks.clear()
        return found.size, found.etag
