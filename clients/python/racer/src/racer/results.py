"""What the operations of a client give, as values.

Layer: bottom, pure; on nothing. Values are named tuples: a dataclass takes a millisecond to make,
a dozen of them longer than all the rest of starting the command `racer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Info(NamedTuple):
    """What a daemon says about itself and about one cache."""

    protocol: int
    version: str
    cache: str
    origin: str
    page_bytes: int
    frame_bytes: int
    gpu: str
    state: str
    gpus: tuple[str, ...] = ()
    gpu_why: str | None = None  # Why `gpu` is not "ready".
    share_chunk_bytes: int = 0  # How objects are cut for `share`; 0 where no memory is shared.


class Stat(NamedTuple):
    """One version of an object. Until `expires_at` (of `time.time()`) racerd answers for it
    without asking the origin."""

    url: str
    size: int
    etag: str
    expires_at: float


class Entry(NamedTuple):
    """A line of a listing: an object, or (`is_prefix`) all that lies under a common prefix."""

    url: str
    size: int | None = None
    etag: str | None = None
    is_prefix: bool = False


class Listing(NamedTuple):
    """One answer of a listing; `after` is where the next one starts, percent-encoded, or None."""

    entries: tuple[Entry, ...]
    after: str | None


class HostRead(NamedTuple):
    """The daemon wrote `bytes` into the target. `rungs` tells which rung gave how many."""

    bytes: int
    offset: int
    size: int
    etag: str
    rungs: Mapping[str, int]


def add_rungs(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds the bytes by rung of one read to those of others."""
    for rung, count in more.items():
        total[rung] = total.get(rung, 0) + count


class Body(NamedTuple):
    """The head of a streamed body: `[start, stop)` of an object of `size` bytes follows."""

    start: int
    stop: int
    size: int
    etag: str


class Front(NamedTuple):
    """The first bytes of one version of an object of `size` bytes."""

    size: int
    etag: str
    data: bytes


class SharedPart(NamedTuple):
    """Bytes `[start, stop)` of an object of `size` bytes; `rungs` tells where they came from."""

    start: int
    stop: int
    size: int
    etag: str
    rungs: Mapping[str, int]


class SharedParts(NamedTuple):
    """What of an object of `size` bytes is shared, in order."""

    size: int
    etag: str
    parts: tuple[SharedPart, ...]
    share_chunk_bytes: int = 0  # How objects are cut; 0 where the daemon does not tell.


class Prefetched(NamedTuple):
    """The range is in the cache now."""

    pages: int
    bytes: int
    rungs: Mapping[str, int]


class Evicted(NamedTuple):
    """What was dropped from the cache."""

    pages: int
    bytes: int


class Pinned(NamedTuple):
    """What a pin names of what the node's disks hold now, and the disk bytes still to be pinned."""

    pages: int
    bytes: int
    room_bytes: int


class Unpinned(NamedTuple):
    """Whether there was such a pin, and the disk bytes that may be pinned now."""

    removed: bool
    room_bytes: int


class Pin(NamedTuple):
    """One pin of a cache: of the object at `url` or, with `prefix`, of all under it."""

    url: str
    prefix: bool
    pages: int
    bytes: int


class Pins(NamedTuple):
    """All pins of a cache, and the disk bytes that may still be pinned, by all caches together."""

    pins: tuple[Pin, ...]
    room_bytes: int


class PageExplanation(NamedTuple):
    """Which rung would serve page number `page` now, why not an earlier one, and what the last
    read of it took."""

    page: int
    rung: str
    why: Mapping[str, str]
    last_rung: str | None = None
    last_age_seconds: float | None = None


class Explanation(NamedTuple):
    """`next_page` is the first page that the daemon left out of a long answer, or None."""

    url: str
    etag: str
    size: int
    pages: tuple[PageExplanation, ...] = ()
    next_page: int | None = None
