"""Deadlines on the monotonic clock. They travel with a request and only shrink.

Layer: bottom. The wall clock may jump; nothing here reads it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from racerd.errors import ResourceError, Retry


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on `time.monotonic()`, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def remaining_seconds(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, or this one if it comes first."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def check(self, doing: str) -> None:
        """Raises ResourceError `deadline_exceeded` once the time is up."""
        if time.monotonic() >= self.at:
            raise deadline_exceeded(doing)


def deadline_exceeded(doing: str) -> ResourceError:
    return ResourceError(
        "deadline_exceeded",
        f"the deadline of the request passed while {doing}",
        hint="ask again with a longer Racer-Deadline-Ms, or see /debug/flights for what is slow",
        retry=Retry.SAME,
    )
