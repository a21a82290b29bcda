"""Time that is left for a call.

Layer: bottom. A deadline is a point on the monotonic clock; it travels with a call and never moves.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from racer.errors import DeadlineExceeded

# The daemon ends an exchange at the deadline and says so; only a daemon that hangs is left to us.
GRACE_SECONDS = 5.0
_HEADER_MS_MAX = 86_400_000


class Deadline(NamedTuple):
    """`end` is on `time.monotonic`'s scale; `seconds` is what the caller asked for."""

    end: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        if not seconds > 0:
            raise ValueError(f"a timeout of {seconds} seconds: it must be positive")
        return cls(time.monotonic() + seconds, seconds)

    @property
    def remaining(self) -> float:
        """Seconds left; 0.0 when there are none."""
        return max(0.0, self.end - time.monotonic())

    def check(self) -> float:
        """Returns the seconds left. Raises DeadlineExceeded when there are none."""
        remaining = self.remaining
        if remaining <= 0:
            raise self.exceeded()
        return remaining

    def with_grace(self) -> Deadline:
        """When to stop waiting for a daemon that was told the deadline and does not keep it."""
        return Deadline(self.end + GRACE_SECONDS, self.seconds + GRACE_SECONDS)

    @property
    def header_ms(self) -> int:
        """The value of `Racer-Deadline-Ms` now."""
        return min(_HEADER_MS_MAX, max(1, int(self.remaining * 1000)))

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"nothing came for {self.seconds:g} seconds",
            hint="give the call a longer timeout=, or look at the daemon's log and metrics",
        )
