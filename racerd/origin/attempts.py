"""Tries an origin call again while that helps: few times, jittered, counted, within the deadline.

Layer: origin; blocking.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from racerd.errors import SourceError
from racerd.origin.failures import Transient, cancelled
from racerd.origin.protocol import CancelToken
from racerd.runtime.deadline import Deadline

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 5.0


def attempts(
    call: Callable[[], T],
    *,
    retries: int,
    deadline: Deadline,
    cancel: CancelToken,
    retried: Callable[[str], None],
) -> T:
    """Returns what `call` returns, trying `Transient` failures again up to `retries` times.

    `retried(reason)` is told before each further attempt. Raises the last failure's `final` when
    no attempt is left, or when the pause would not fit into the deadline.
    """
    for attempt in range(retries + 1):
        try:
            return call()
        except Transient as failure:
            pause = _pause_seconds(attempt, failure.retry_after_seconds)
            if attempt == retries or pause >= deadline.remaining_seconds():
                raise failure.final from None
            retried(failure.reason)
        if cancel.wait(pause):
            raise cancelled("waiting to ask the origin again")
    raise SourceError("origin_unavailable", "no attempt was made")


def _pause_seconds(attempt: int, wished: float | None) -> float:
    if wished is not None:
        return wished
    full = min(_PAUSE_SECONDS_MAX, _FIRST_PAUSE_SECONDS * 2.0**attempt)
    return full * random.uniform(0.5, 1.0)
