"""When to try again, and after how long.

Layer: bottom, pure but for the clock of the deadline. Only what is known to be passing is tried
again: a daemon that is full, draining or restarting, and a connection that ended. What the daemon
tried for us already (origins, other copies of a page) is not.

    error                         tried again
    ----------------------------  -------------------------------------------------------------
    Overloaded, Draining          after Retry-After, or a doubling pause; OVERLOADED_TRIES at most
    ConnectionLost, MemoryLost    at once, then after a doubling pause; LOST_TRIES at most
    DaemonUnavailable             only where a connection stood before: a restart gets
                                  RESTART_SECONDS
    everything else               never

All within the call's deadline: a pause that does not fit raises the error instead.
"""

from __future__ import annotations

import time

from racer.deadline import Deadline
from racer.errors import ConnectionLost, DaemonUnavailable, MemoryLost, Overloaded, RacerError

OVERLOADED_TRIES = 20
LOST_TRIES = 6
RESTART_SECONDS = 15.0
_PAUSE_SECONDS = 0.05
_PAUSE_SECONDS_MAX = 2.0


class Retries:
    """Counts the tries of one request (or one part of a large read)."""

    def __init__(self, *, restarts: bool) -> None:
        """`restarts` says that the daemon was there before, so that it may come back."""
        self._restarts = restarts
        self._overloaded = 0
        self._lost = 0
        self._down = 0
        self._down_since: float | None = None

    def pause_after(self, error: RacerError, deadline: Deadline) -> float:
        """Returns the seconds to wait before the next try. Raises `error` where none is due."""
        pause = self._pause(error)
        if pause is None or pause >= deadline.remaining:
            raise error
        return pause

    def _pause(self, error: RacerError) -> float | None:
        if isinstance(error, Overloaded):
            self._overloaded += 1
            if self._overloaded >= OVERLOADED_TRIES:
                return None
            if error.retry_after is not None:
                return _jittered(error.retry_after, 0.25)
            return _doubling(self._overloaded)
        if isinstance(error, ConnectionLost | MemoryLost):
            self._lost += 1
            if self._lost >= LOST_TRIES:
                return None
            return 0.0 if self._lost == 1 else _doubling(self._lost - 1)
        if isinstance(error, DaemonUnavailable) and error.retry == "same":
            return self._pause_for_restart()
        return None

    def _pause_for_restart(self) -> float | None:
        if not (self._restarts or self._lost):
            return None
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
        if now - self._down_since > RESTART_SECONDS:
            return None
        self._down += 1
        return _doubling(self._down)


def _doubling(tries: int) -> float:
    pause = min(_PAUSE_SECONDS * 2.0 ** (tries - 1), _PAUSE_SECONDS_MAX)
    return _jittered(pause / 2, 1.0)


def _jittered(seconds: float, share: float) -> float:
    """`seconds`, and up to `share` of it more: those who were refused together come back apart."""
    import random  # Not at the top: most processes never wait, and it is slow to import.

    return seconds * (1.0 + share * random.random())
