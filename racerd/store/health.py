"""The state of one disk: when it is used, left alone, tried again.

Layer: store, pure: time comes from the caller, in seconds of any monotonic clock. Not thread-safe.

| from     | event                                                    | to       |
| -------- | -------------------------------------------------------- | -------- |
| normal   | 3 failures within 10 s                                   | unstable |
| unstable | no failure for 30 s                                      | normal   |
| unstable | half of the last 8 or more operations within 10 s failed | down     |
| normal, unstable | an operation does not return (a hang)            | down     |
| normal, unstable | the device is gone                               | down     |
| down     | the pause is over and nothing hangs                      | probing  |
| probing  | 3 probes succeeded                                       | normal   |
| probing  | a probe failed or hangs; the pause doubles up to 60 s    | down     |

normal: reads and writes. unstable: reads, no writes, since a disk that fails now and then still
serves most of its pages. down and probing: neither, so that no read waits for a broken disk.
Being full is not a failure.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

UNSTABLE_FAILURES = 3
WINDOW_SECONDS = 10.0
DOWN_OPERATIONS_MIN = 8
DOWN_FAILURE_SHARE = 0.5
QUIET_SECONDS = 30.0
PROBES_WANTED = 3
PAUSE_SECONDS_MIN = 1.0
PAUSE_SECONDS_MAX = 60.0
_OUTCOMES_MAX = 64


class DiskState(Enum):
    NORMAL = "normal"
    UNSTABLE = "unstable"
    DOWN = "down"
    PROBING = "probing"


class DiskHealth:
    """Counts outcomes and decides. `hang_seconds`: how long an operation may take."""

    def __init__(self, hang_seconds: float, *, state: DiskState = DiskState.NORMAL) -> None:
        self._hang_seconds = hang_seconds
        self._state = state
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_OUTCOMES_MAX)
        self._running: dict[int, float] = {}
        self._next_token = 0
        self._last_failure = 0.0
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._resume_at = 0.0
        self._probes_done = 0
        self.reason = ""

    def started(self, now: float) -> int:
        """An operation begins. Returns the token for `finished`."""
        self._next_token += 1
        self._running[self._next_token] = now
        return self._next_token

    def finished(self, token: int, now: float, failure: str | None, *, gone: bool = False) -> None:
        """An operation came back. `failure` says how it failed; `gone`: there is no device."""
        del self._running[token]
        self._outcomes.append((now, failure is None))
        if failure is not None:
            self._failed(now, failure, gone)

    def _failed(self, now: float, failure: str, gone: bool) -> None:
        self._last_failure = now
        recent = [ok for at, ok in self._outcomes if at > now - WINDOW_SECONDS]
        failures = recent.count(False)
        if self._state is DiskState.NORMAL and failures >= UNSTABLE_FAILURES:
            self._state = DiskState.UNSTABLE
            self.reason = failure
        enough = len(recent) >= DOWN_OPERATIONS_MIN
        mostly = failures >= DOWN_FAILURE_SHARE * len(recent)
        if gone or (self._state is DiskState.UNSTABLE and enough and mostly):
            self._go_down(now, failure)

    def _go_down(self, now: float, reason: str) -> None:
        if self._state is DiskState.PROBING:
            self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        if self._state is not DiskState.DOWN:
            self._resume_at = now + self._pause_seconds
        self._state = DiskState.DOWN
        self.reason = reason

    def state(self, now: float) -> DiskState:
        """The state at `now`: notices hangs and quiet times by itself."""
        if self.hung(now):
            self._go_down(now, f"an operation has been running for {self._hang_seconds:g} s")
        elif self._state is DiskState.UNSTABLE and now - self._last_failure >= QUIET_SECONDS:
            self._state = DiskState.NORMAL
            self._pause_seconds = PAUSE_SECONDS_MIN
            self.reason = ""
        return self._state

    @property
    def idle(self) -> bool:
        """Whether no operation is running."""
        return not self._running

    def hung(self, now: float) -> bool:
        """Whether an operation is overdue."""
        return any(now - start >= self._hang_seconds for start in self._running.values())

    def readable(self, now: float) -> bool:
        return self.state(now) in (DiskState.NORMAL, DiskState.UNSTABLE)

    def writable(self, now: float) -> bool:
        return self.state(now) is DiskState.NORMAL

    def start_down(self, now: float, reason: str) -> None:
        """The slab could not be opened."""
        self._go_down(now, reason)

    def probe_due(self, now: float) -> bool:
        """Whether a probe should be made now; the disk is then probing."""
        state = self.state(now)
        if state is DiskState.DOWN and not self.hung(now) and now >= self._resume_at:
            self._state = DiskState.PROBING
            self._probes_done = 0
        return self._state is DiskState.PROBING

    def probed(self, now: float, failure: str | None) -> None:
        """The result of a probe."""
        if self._state is not DiskState.PROBING:
            return
        if failure is not None:
            self._go_down(now, failure)
            return
        self._probes_done += 1
        if self._probes_done >= PROBES_WANTED:
            self._state = DiskState.NORMAL
            self._outcomes.clear()
            self.reason = ""
