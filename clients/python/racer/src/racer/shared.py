"""Memory that the daemon shares between all who read the same version: `Client.share`.

Layer: on `results`; values with a lifetime. The daemon opened the bytes once, sealed them
against writing for good, and hands out read-only descriptors. Whoever maps them pays for the
mapping only.
"""

from __future__ import annotations

import mmap
import os
from io import FileIO

from racer.errors import Closed
from racer.results import SharedPart


class SharedChunk:
    """One piece of shared memory: a read-only descriptor. A context manager.

    Byte `start` of the object lies at the descriptor's offset 0; what lies behind `stop` is zero.
    Mappings made from it live on after `close`, for as long as they like, and so does the memory,
    which the daemon counts as used until the last of them is gone.
    """

    def __init__(self, descriptor: int, part: SharedPart) -> None:
        """Takes `descriptor` over."""
        # It belongs to an object of the interpreter's own: that closes it even where an interrupt
        # hits a destructor.
        self._file = FileIO(descriptor)
        self.part = part
        self._map: mmap.mmap | None = None

    @property
    def start(self) -> int:
        return self.part.start

    @property
    def stop(self) -> int:
        return self.part.stop

    def fileno(self) -> int:
        if self._file.closed:
            raise Closed("this shared memory was closed")
        return self._file.fileno()

    @property
    def view(self) -> memoryview:
        """All of its bytes; good for as long as somebody holds the view.

        Writing to it changes a copy that is this process's own.
        """
        if self._map is None:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            length = self.stop - self.start
            self._map = mmap.mmap(self.fileno(), length, mmap.MAP_PRIVATE, access)
        return memoryview(self._map)

    def read(self, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop) of the object, which lie in this piece. For few of them:
        nothing is mapped."""
        return os.pread(self.fileno(), stop - start, start - self.start)

    def close(self) -> None:
        """Closes the descriptor; done twice it does nothing. Views stay good."""
        self._map = None
        self._file.close()

    def __enter__(self) -> SharedChunk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


class SharedPieces:
    """What of one version is shared already, in order, maybe with gaps. A context manager.

    Whoever takes chunks out of `chunks` closes them; `close` closes the rest. `share_chunk_bytes`
    is how the daemon cuts objects; 0 where it does not tell.
    """

    def __init__(
        self, size: int, etag: str, chunks: list[SharedChunk], share_chunk_bytes: int = 0
    ) -> None:
        self.size = size
        self.etag = etag
        self.chunks = chunks
        self.share_chunk_bytes = share_chunk_bytes

    def close(self) -> None:
        while self.chunks:
            self.chunks.pop().close()

    def __enter__(self) -> SharedPieces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
