"""An object (or a range of it) as memory: what `Client.map` returns.

Layer: on `memory`; a value with a lifetime.
"""

from __future__ import annotations

from collections.abc import Mapping

from racer.memory import PageKind, SharedMemory


class MappedObject:
    """Bytes `[offset, offset + size)` of one version of an object, in memory of the caller's own.

    A context manager that gives the view; or use `view` and `close`. The memory is this process's
    alone: writing to it changes nothing anywhere else. After `close` the view itself is dead, and
    what was made from it (slices, arrays) stays valid: the memory goes with the last of them.

    `rungs` tells how many bytes came from which rung (`stream` where the daemon could not write
    into this memory).
    """

    def __init__(
        self,
        memory: SharedMemory | None,
        *,
        url: str,
        etag: str,
        offset: int,
        object_size: int,
        rungs: Mapping[str, int],
    ) -> None:
        self._memory = memory
        self._nothing = memoryview(b"")
        self.url = url
        self.etag = etag
        self.offset = offset
        self.object_size = object_size
        self.rungs = rungs

    @property
    def view(self) -> memoryview:
        """The bytes. Raises Closed after `close`."""
        return self._nothing if self._memory is None else self._memory.view

    @property
    def size(self) -> int:
        return 0 if self._memory is None else self._memory.size

    @property
    def page_kind(self) -> PageKind:
        """What backs the memory: `hugetlb`, `transparent` or `base`."""
        return "base" if self._memory is None else self._memory.page_kind

    def close(self) -> None:
        """Gives the memory up, as soon as nobody holds a part of it."""
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        self.close()
