"""How much may be written to a disk: flash wears by what is written to it.

Layer: store, pure: time comes from the caller, in seconds of any monotonic clock. Not thread-safe.
"""

from __future__ import annotations

_SECONDS_PER_DAY = 86_400.0


class WriteBudget:
    """A bucket that fills with `bytes_per_day` in a day and holds that much; None has no limit.

    It is full at the start, so that an empty cache fills at full speed.
    """

    def __init__(self, bytes_per_day: int | None) -> None:
        self._per_day = bytes_per_day
        self._left = float(bytes_per_day or 0)
        self._filled_at: float | None = None

    @property
    def limited(self) -> bool:
        return self._per_day is not None

    def take(self, now: float, size: int) -> bool:
        """Takes `size` bytes if there are as many; returns whether there were."""
        left = self.left(now)
        if left is None:
            return True
        self._left = left
        self._filled_at = now
        if size > self._left:
            return False
        self._left -= size
        return True

    def left(self, now: float) -> float | None:
        """Bytes that may be written now; None where there is no limit."""
        if self._per_day is None or self._filled_at is None:
            return self._per_day
        grown = max(0.0, now - self._filled_at) * self._per_day / _SECONDS_PER_DAY
        return min(float(self._per_day), self._left + grown)
