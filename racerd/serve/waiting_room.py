"""Where newcomers wait for the door, in turn by who they are.

Layer: serve, pure. A process that connects a hundred times waits behind itself: the next to be let
in is the first of the peer that has waited longest for a turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingRoom(Generic[T]):
    """At most `places` that wait. Owns nothing: whoever takes one out looks after it."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._count = 0
        self._queues: OrderedDict[Hashable, deque[T]] = OrderedDict()  # Next in turn first.

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self._places

    @property
    def peers(self) -> int:
        """How many different peers wait."""
        return len(self._queues)

    def add(self, peer: Hashable, one: T) -> None:
        """Seats `one` behind what `peer` has here. Raises ValueError where the room is full."""
        if self.full:
            raise ValueError("the waiting room is full")
        self._queues.setdefault(peer, deque()).append(one)
        self._count += 1

    def take(self) -> T | None:
        """Takes out who is next, None where nobody waits."""
        if not self._queues:
            return None
        peer, queue = next(iter(self._queues.items()))
        one = queue.popleft()
        self._count -= 1
        if queue:
            self._queues.move_to_end(peer)
        else:
            del self._queues[peer]
        return one
