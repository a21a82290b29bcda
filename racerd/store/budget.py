"""How much may be written to a disk: flash wears by what is written to it.

Layer: store, pure: time comes from the caller, in seconds of any monotonic clock. Not thread-safe.
"""

from __future__ import annotations

_SECONDS_PER_DAY = 86_400.0


class WriteBudget:
    """A bucket that fills with `bytes_per_day` in a day and holds that much; None has no limit.

    It is full at the start, so that an empty cache fills at full speed. Copies of what is kept may
    `spend` more than there is: what is new waits then until that is made up for.
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
        if self._per_day is not None:
            if size > self._fill(now):
                return False
            self._left -= size
        return True

    def spend(self, now: float, size: int) -> None:
        """Takes `size` bytes, whether or not there are as many."""
        if self._per_day is not None:
            self._left = self._fill(now) - size

    def give_back(self, now: float, size: int) -> None:
        """Takes back a `take`: nothing was written."""
        self.spend(now, -size)

    def left(self, now: float) -> float | None:
        """Bytes that may be written now; None where there is no limit."""
        return None if self._per_day is None else max(0.0, self._filled(now))

    def _fill(self, now: float) -> float:
        self._left, self._filled_at = self._filled(now), now
        return self._left

    def _filled(self, now: float) -> float:
        per_day = float(self._per_day or 0)
        since = now if self._filled_at is None else self._filled_at
        return min(per_day, self._left + max(0.0, now - since) * per_day / _SECONDS_PER_DAY)
