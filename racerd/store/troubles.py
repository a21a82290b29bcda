"""What is wrong with a disk, in sentences for people: /debug/disks shows them.

Layer: store, pure. The metrics count the same things; here is what they mean now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from racerd.store.health import DiskState
from racerd.store.recovery import Progress
from racerd.units import format_bytes

_MEANING = {
    DiskState.UNSTABLE: "it is read, and takes no new pages until it has been well for a while",
    DiskState.DOWN: "it is left alone, reads pass it by, and it is tried again now and then",
    DiskState.PROBING: "it is being tried, and used again when it works",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """All that the sentences are made of. Sizes are bytes; `budget_left` None: there is no limit.

    What has a default is known of an open slab only. `full_quotas`: caches that are at their limit
    on this disk. `segments`: those that take space. `evictions_unnoted`: tombstones that were
    given up.
    """

    state: DiskState
    reason: str
    budget_left: float | None
    opened: bool = False
    recovering: bool = False
    progress: Progress = field(default_factory=Progress)
    direct: bool = False
    full_seconds: float = 0.0
    at_floor: bool = False
    segments: int = 0
    record_bytes: int = 0
    full_quotas: Mapping[str, int] = field(default_factory=dict)
    evictions_unnoted: int = 0


def troubles(now: Condition) -> Iterator[str]:
    """Yields a sentence for each trouble; none for a disk that is well."""
    if now.state in _MEANING:
        yield f"{now.state.value}: {now.reason}; {_MEANING[now.state]}"
    if not now.opened:
        return
    progress = now.progress
    if now.recovering:
        yield (
            f"recovering ({progress.state}): {progress.segments_done} of"
            f" {progress.segments_total} segments; what is found is served already"
        )
    if progress.segments_unreadable:
        yield f"{progress.segments_unreadable} segments could not be read and are not used"
    if not now.direct:
        yield "the file system refuses direct I/O: slower, and the page cache takes memory"
    if now.full_seconds > 0:
        yield f"the medium is full: nothing is written for {now.full_seconds:.0f} s"
    if now.at_floor:
        yield f"the file system is at its floor of free space: {floor_meaning(now.segments)}"
    if now.budget_left is not None and now.budget_left < now.record_bytes:
        yield (
            "what may be written in a day is spent: new pages are not kept until more may be;"
            f" {format_bytes(int(now.budget_left))} left"
        )
    for cache, limit in now.full_quotas.items():
        yield f"the cache {cache} is at its quota, {format_bytes(limit)} here: its old pages go"
    if now.evictions_unnoted:
        yield (
            f"{now.evictions_unnoted} evictions could not be noted on the slab: these pages may be"
            " there again after a restart"
        )


def floor_meaning(segments: int) -> str:
    """What the floor of free space does to new pages of a slab of that many segments."""
    if segments == 0:
        return "the slab has no room, no pages are kept on it"
    return "the slab does not grow, new pages take the place of old ones"


def floor_reason(ratio: float, wanted: int) -> str:
    """Why a slab does not grow by `wanted` bytes, or gives some back where that is 0; and what to
    do. `ratio` is the share of the file system that stays free."""
    if not ratio:
        return f"its file system has no room for another {format_bytes(wanted)} (free some)"
    percent = f"{ratio * 100:g}%"
    if wanted:
        why = f"another {format_bytes(wanted)} would leave less than {percent} of its file system"
        return f"{why} free (free some space, or lower free_space_floor)"
    return f"less than {percent} of its file system is free (free some, or lower free_space_floor)"
