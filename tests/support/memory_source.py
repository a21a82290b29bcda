"""A source of model files in memory that records what was asked of it and can be held or broken."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Mapping, Sequence

from racer.errors import Closed
from racer.models import SourceFile
from tests.support.sealing import seal_writing


class MemorySource:
    """`files` by name. `on_read(file, start, stop)` runs in the reading thread, before the bytes.

    `events` tells the order of things. A landing is filled with garbage before each read and when
    it is closed, so that a tensor that still used it would show. With `share_bytes` it shares
    memory in pieces of so many; `on_share(file, at)` runs before each, and may refuse it. With
    `at_hand` all pieces are there before anybody asks. It keeps what it gave out in `given`;
    `cut_bytes` is how it cuts pieces, where that is not as it says.
    """

    location = "memory"

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        page_bytes: int = 1 << 20,
        on_read: Callable[[SourceFile, int, int], None] | None = None,
        share_bytes: int = 0,
        on_share: Callable[[SourceFile, int], None] | None = None,
        at_hand: bool = False,
        cut_bytes: int = 0,
    ) -> None:
        self.files = dict(files)
        self.page_bytes = page_bytes
        self.on_read = on_read or (lambda file, start, stop: None)
        self.share_bytes = share_bytes
        self.on_share = on_share or (lambda file, at: None)
        self.at_hand = at_hand
        self.cut_bytes = cut_bytes or share_bytes
        self.given: list[MemoryShare] = []
        self.shared: list[tuple[str, int]] = []
        self.cancelled = threading.Event()
        self.lock = threading.Lock()
        self.events: list[str] = []
        self.bulk_reads: list[tuple[str, int, int]] = []
        self.landing_bytes: list[int] = []
        self.reading = self.reading_max = 0

    def note(self, event: str) -> None:
        with self.lock:
            self.events.append(event)

    def names(self) -> Sequence[str]:
        return list(self.files)

    def find(self, name: str) -> SourceFile | None:
        content = self.files.get(name)
        return None if content is None else SourceFile(name, f"memory/{name}", len(content), "1")

    def read(self, file: SourceFile, start: int, stop: int) -> bytes:
        assert stop <= file.size
        return self.files[file.name][start:stop]

    def read_whole(self, name: str, bytes_max: int) -> tuple[SourceFile, bytes | None] | None:
        file = self.find(name)
        if file is None:
            return None
        return file, self.files[name] if file.size <= bytes_max else None

    def is_at_hand(self, file: SourceFile) -> bool:
        return self.at_hand

    def landing(self, nbytes: int) -> MemoryLanding:
        with self.lock:
            self.landing_bytes.append(nbytes)
        return MemoryLanding(self, nbytes)

    def shared_already(self, file: SourceFile, at: int) -> MemoryShare | None:
        """Where it is not at hand, each piece is made when it is asked for."""
        return self.shared_at_hand(file, at)

    def shared_at_hand(self, file: SourceFile, at: int) -> MemoryShare | None:
        return self.share(file, at) if self.at_hand else None

    def share(self, file: SourceFile, at: int) -> MemoryShare:
        self.on_share(file, at)
        if self.cancelled.is_set():
            raise Closed("cancelled")
        start = at - at % self.cut_bytes
        share = MemoryShare(start, self.files[file.name][start : start + self.cut_bytes])
        with self.lock:
            self.shared.append((file.name, start))
            self.given.append(share)
        return share

    @property
    def open_shares(self) -> int:
        """How many pieces were given out and not closed since."""
        with self.lock:
            return sum(not share.closed for share in self.given)

    def cancel(self) -> None:
        self.note("cancel")
        self.cancelled.set()

    def close(self) -> None:
        self.note("source closed")


class MemoryShare:
    """Shared memory as the daemon gives it: a memfd that is sealed against writing."""

    rungs: Mapping[str, int]

    def __init__(self, start: int, content: bytes) -> None:
        self.start = start
        self.stop = start + len(content)
        self.rungs = {"shared": len(content)}
        self._content = bytearray(content)
        # Files own their descriptors in every moment, also where an interrupt hits.
        with open(os.memfd_create("share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            file.write(content)
            file.flush()
            seal_writing(file.fileno(), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._file = open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=0)  # noqa: SIM115

    @property
    def view(self) -> memoryview:
        return memoryview(self._content)

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


class MemoryLanding:
    def __init__(self, source: MemorySource, nbytes: int) -> None:
        self._source = source
        self._buffer = bytearray(nbytes)
        self.view = memoryview(self._buffer)

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        source = self._source
        with source.lock:
            source.bulk_reads.append((file.name, start, stop))
            source.reading += 1
            source.reading_max = max(source.reading, source.reading_max)
        try:
            self._buffer[:] = b"\xee" * len(self._buffer)
            source.on_read(file, start, stop)
            if source.cancelled.is_set():
                raise Closed("cancelled")
            self.view[: stop - start] = source.files[file.name][start:stop]
            return {"memory": stop - start}
        finally:
            with source.lock:
                source.reading -= 1

    def close(self) -> None:
        self._buffer[:] = b"\xee" * len(self._buffer)
        self._source.note("landing closed")
