"""What a disk tells about itself: figures for people, and the facts behind its troubles.

Layer: store; from any thread, no I/O. Only looks: what it sees may be older by a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.store.budget import WriteBudget
from racerd.store.live import LiveSlab
from racerd.store.mount import Mount
from racerd.store.recovery import Progress
from racerd.store.troubles import Condition
from racerd.store.watch import DiskWatch


@dataclass(frozen=True, slots=True)
class DiskReport:
    """A disk as shown to people. `reason` says why it is not normal; sizes are bytes.

    `troubles`: what is wrong with it, in sentences.
    """

    path: str
    state: str
    reason: str
    direct: bool
    pages: int
    live_bytes: int
    capacity_bytes: int
    index_bytes: int
    recovering: bool
    recovery: Progress
    troubles: tuple[str, ...]


def condition_of(mount: Mount | None, watch: DiskWatch, budget: WriteBudget) -> Condition:
    """How the disk is now; without a mount its slab is not open."""
    now = watch.now()
    state, reason, left = watch.state, watch.reason, budget.left(now)
    if mount is None:
        return Condition(state=state, reason=reason, budget_left=left)
    live, writer = mount.live, mount.writer
    return Condition(
        state=state,
        reason=reason,
        opened=True,
        recovering=not live.progress.done,
        progress=live.progress,
        direct=live.slab.device.direct,
        full_seconds=writer.full_seconds(now),
        at_floor=writer.at_floor,
        segments=live.engine.segments.taking_space,
        budget_left=left,
        record_bytes=live.slab.geometry.full_record_bytes,
        full_quotas=_full_quotas(live),
        evictions_unnoted=live.tombstones.given_up,
    )


def _full_quotas(live: LiveSlab) -> dict[str, int]:
    """Caches that have no room for a further page under their quota."""
    size = live.slab.geometry.full_record_bytes
    with live.lock:
        limits = live.engine.quotas.items()
        return {cache: limit for cache, limit in limits if live.engine.over_quota(cache, size) > 0}
