"""On whose behalf a read runs, and what it took.

Layer: read, values.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from racerd.runtime.deadline import Deadline


@dataclass(frozen=True, slots=True)
class RequestContext:
    """On whose behalf a read runs. `connection` is the key of fair sharing."""

    connection: Hashable
    deadline: Deadline


@dataclass(slots=True)
class ReadReport:
    """What a read took: `rungs` has the bytes by the rung that served them."""

    bytes: int = 0
    rungs: dict[str, int] = field(default_factory=dict)

    def add(self, rung: str, length: int) -> None:
        self.bytes += length
        self.rungs[rung] = self.rungs.get(rung, 0) + length
