"""The door: how much of the event loop's time newcomers get while others are being served.

Layer: serve, pure: a few numbers, no clock, no loop, no socket. Times are seconds of one monotonic
clock, which the caller reads.

A **newcomer** is a connection that has not been served for `PRICE_SECONDS` of the loop's time yet;
from then on it is **established**. Who connects, has work begun and leaves is never more than a
newcomer, however often it comes; who stays becomes established after some dozens of reads.

While an established connection has an exchange under way, or had one a moment ago, newcomers
together get `SHARE` of the loop's time: what one takes is put to the door's account, and the door
is shut for as long as the others need to have their part. Otherwise the door is open and no account
is kept: the share is a bound on what newcomers take from others, never on what nobody else wants.

- Counted are the steps of their own connections. What their reads take elsewhere (flights, threads
  that want the interpreter lock now and then) is about as much again, side by side with the loop.
- A share that was not used is kept for `CREDIT_SECONDS`: somebody who starts with a dozen
  connections is let in at once, and only who goes on coming has to wait.
- Never shut for more than `SHUT_SECONDS_MAX` from one newcomer to the next, whatever they took.
- The account is of those that were let in: one that waits, or leaves while it waits, costs nothing.
"""

from __future__ import annotations

import math

SHARE = 1 / 10  # The others keep nine tenths: that is what is promised to them.
PRICE_SECONDS = 0.010
CREDIT_SECONDS = 1.0
SHUT_SECONDS_MAX = 1.0
# Between two reads a client looks at what it got. It is being served all the same.
CALM_SECONDS = 0.050


class Door:
    """The door of one event loop."""

    __slots__ = ("_entered_at", "_opens_at", "_rested_at", "working")

    def __init__(self) -> None:
        self.working = 0  # Established connections with an exchange under way.
        self._rested_at = -math.inf  # When the last such exchange ended.
        self._opens_at = -math.inf
        self._entered_at = -math.inf

    def work_began(self) -> None:
        """An established connection's exchange begins."""
        self.working += 1

    def work_ended(self, now: float) -> None:
        """An established connection's exchange is over, however it ended."""
        self.working -= 1
        self._rested_at = now

    def contended(self, now: float) -> bool:
        """Whether established connections are being served."""
        return self.working > 0 or now - self._rested_at < CALM_SECONDS

    def wait_seconds(self, now: float) -> float:
        """For how long the next newcomer has to wait, as far as is known now; 0: the door is
        open."""
        if not self.contended(now):
            return 0.0
        return max(0.0, min(self._opens_at, self._entered_at + SHUT_SECONDS_MAX) - now)

    def entered(self, now: float) -> None:
        """A newcomer was let in."""
        self._entered_at = now

    def took(self, seconds: float, now: float) -> bool:
        """A newcomer has had `seconds` of the loop's time. Returns whether that counts."""
        if not self.contended(now):
            return False
        shut = max(self._opens_at, now - CREDIT_SECONDS) + seconds / SHARE
        self._opens_at = min(shut, now + SHUT_SECONDS_MAX)
        return True

    def describe(self, now: float) -> str:
        """For people: open or shut, and why."""
        if not self.contended(now):
            return "open: no established connection is being served"
        wait = self.wait_seconds(now)
        served = f"{self.working} established connections are being served"
        if wait:
            return f"shut for {wait * 1000:.0f} ms: newcomers have had their share while {served}"
        return f"open: newcomers have a share left while {served}"
