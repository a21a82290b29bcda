"""What a model is read from, as a protocol.

Layer: models, bottom. A source is used by several threads: small reads by whoever asks, and one
`SourceLanding` for each thread that reads in bulk. `cancel` may come from any thread: reads that
are running end soon, with an error, and later ones do not start. A `SourceFile` is one version: a
read that meets another one raises VersionChanged; versions are never mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One version of a file. `name` is relative to the source; `url` is the whole name."""

    name: str
    url: str
    size: int
    version: str


class SourceLanding(Protocol):
    """Memory that reads land in, again and again; one thread's."""

    @property
    def view(self) -> memoryview:
        """All of it. What a read put there is valid until the next read."""

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        """Fills `view` from its beginning with [start, stop) of the file; blocks.

        Returns how many bytes came from where ("memory", "disk", "origin", "file" …).
        """

    def close(self) -> None:
        """Gives the memory up; done twice it does nothing."""


class DeviceLanding(Protocol):
    """GPU memory that reads land in, again and again; one thread's."""

    @property
    def buffer(self) -> Any:
        """All of it, as a `GpuBuffer`. Another object after a read that replaced it."""

    def read(self, file: SourceFile, start: int, stop: int) -> Mapping[str, int]:
        """As `SourceLanding.read`. Nothing of ours may be using the memory any more."""

    def close(self) -> None:
        """Gives the memory up; done twice it does nothing."""


class SourceShare(Protocol):
    """Read-only memory with bytes [start, stop) of a file, from its offset 0 on."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...

    @property
    def rungs(self) -> Mapping[str, int]:
        """How many of its bytes came from where for this reader; "shared" if they were there."""

    @property
    def view(self) -> memoryview:
        """All of its bytes. Writing to it changes nobody else's."""

    def fileno(self) -> int:
        """What to map."""

    def close(self) -> None:
        """Closes the descriptor; mappings and views stay good."""


class Source(Protocol):
    """A place with files of a model."""

    @property
    def location(self) -> str:
        """What messages call it, without a slash at the end."""

    @property
    def page_bytes(self) -> int:
        """Reads that end on multiples of this are the cheapest."""

    def names(self) -> Sequence[str]:
        """The names of its files, one level, in no order. Raises NotFound or OSError."""

    def find(self, name: str) -> SourceFile | None:
        """The current version of one file, also below the first level; None if there is none."""

    def read(self, file: SourceFile, start: int, stop: int) -> bytes:
        """A short range, kept whole."""

    def read_whole(self, name: str, bytes_max: int) -> tuple[SourceFile, bytes | None] | None:
        """As `find`, and all bytes of that version: None of them where they are more than
        `bytes_max`."""

    def is_at_hand(self, file: SourceFile) -> bool:
        """Whether reading its first bytes waits for nobody."""

    def landing(self, nbytes: int) -> SourceLanding:
        """Makes touched memory of `nbytes` for the calling thread, which closes it."""

    def reads_into(self, device: object) -> bool:
        """Whether bytes come straight into memory of this GPU; if not, the log says why, once."""

    def device_landing(self, nbytes: int, device: object) -> DeviceLanding | None:
        """GPU memory of `nbytes` for the calling thread, which closes it; None where bytes do not
        come straight into memory of this GPU, or there is none to be had."""

    @property
    def share_bytes(self) -> int:
        """Files are shared in pieces that end on multiples of this; 0 where none is."""

    def shared_already(self, file: SourceFile, at: int) -> SourceShare | None:
        """As `share`, where the piece is there already; else None, without waiting for it."""

    def shared_at_hand(self, file: SourceFile, at: int) -> SourceShare | None:
        """As `shared_already`, where that asks nobody: what was found out before is enough."""

    def share(self, file: SourceFile, at: int) -> SourceShare:
        """The piece of shared memory that holds byte `at`; the caller closes it.

        Raises ShareRefused where it cannot be had, for now or for good.
        """

    def cancel(self) -> None:
        """Ends the reads of all threads, and the source's use but for `close`."""

    def close(self) -> None:
        """Gives everything up; done twice it does nothing. Landings are closed before."""
