"""The settings of the read layer, with the defaults that suit a node with a few fast disks.

Layer: read, pure values. `app` fills it from the configuration; tests make their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.errors import ConfigError
from racerd.pages import PageGeometry
from racerd.units import MIB, format_bytes


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Bounds and patience. Bytes, pages and seconds; every one of them is a hard limit."""

    # Budgets of the node.
    plaintext_bytes: int = 512 * MIB  # Plaintext from origins, and what streams hold (a quarter).
    reading_bytes: int = 256 * MIB  # Pages queued for a disk or being read.
    opening_bytes: int = 128 * MIB  # Work handed to the `open` threads and not finished.
    dirty_bytes: int = 256 * MIB  # Sealed pages waiting for a disk.
    share_bytes: int = 0  # Memory shared between readers; see `shares`. 0 is off.
    share_idle_seconds: float = 30.0  # How long shared memory is kept that nobody uses.

    # Windows: pages in progress.
    request_pages: int = 8
    connection_pages: int = 16
    waiters_max: int = 4096  # Pages that may wait for one budget, over all connections.

    # Patience.
    admission_seconds: float = 10.0  # A connection served nothing for so long is told to go.
    frames_seconds: float = 2.0  # For arena slots, while every page stays in use.
    disk_seconds: float = 2.0  # For one disk read, before the next rung is asked.
    fetch_seconds: float = 600.0  # For one page from an origin, whoever waits for it.
    head_seconds: float = 30.0  # For the version of an object.
    write_seconds: float = 1.0  # For room in the write queue, while the disk makes progress.
    progress_seconds: float = 0.5  # A disk that finished no write for so long makes none.

    # Versions.
    version_seconds: float = 60.0  # How long a version is taken for current.
    absence_seconds: float = 1.0  # How long `not_found` and `forbidden` are remembered.
    versions_max: int = 65_536

    # Sizes.
    run_bytes: int = 4 * MIB  # One turn of an `open` thread: about a millisecond.
    stream_chunk_bytes: int = 1 * MIB
    stream_chunks: int = 4  # Chunks that a stream holds, the one handed out included.
    stream_pages_ahead: int = 2  # Pages that a stream asks for before it comes to them.
    record_pages: int = 65_536  # Pages whose last read `explain` remembers.

    promote_share: float = 0.25  # See `partial`.

    @property
    def streams_bytes(self) -> int:
        """The part of the plaintext budget that streams may hold."""
        return max(self.plaintext_bytes // 4, self.stream_chunk_bytes)

    def check(self, geometry: PageGeometry) -> None:
        """Raises ConfigError with every limit that cannot hold a single page."""
        problems = [
            f"{name} is {format_bytes(value)}, but must hold a page of"
            f" {format_bytes(geometry.page_bytes)}"
            for name, value in (
                (
                    "the plaintext budget less the part of streams",
                    self.plaintext_bytes - self.streams_bytes,
                ),
                ("the reading budget", self.reading_bytes),
                ("the opening budget", self.opening_bytes),
            )
            if value < geometry.page_bytes
        ]
        problems += [
            f"{name} must be at least 1, not {value}"
            for name, value in (
                ("the window of a request", self.request_pages),
                ("the window of a connection", self.connection_pages),
                ("the chunks of a stream", self.stream_chunks),
            )
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)
