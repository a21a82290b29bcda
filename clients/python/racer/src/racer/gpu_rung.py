"""Whether a daemon writes into the memory of a GPU: the first rung of a read into GPU memory.

Layer: bottom, on `errors`; any thread. A refusal that cannot change is remembered for good, one
that may pass for a few seconds, so that reads do not ask in vain; each reason is said once.
"""

from __future__ import annotations

import time

from racer.errors import BadRequest, GpuError, GpuUnavailable, RacerError, TargetRefused

PAUSE_SECONDS = 5.0
# Said about a target by a daemon that reads into GPU memory, and by any other defect of ours.
_NOT_OF_THE_RUNG = ("target_unknown", "target_too_small")


def is_gpu_refusal(error: RacerError) -> bool:
    """Whether `error` says that the GPU rung does not work (now), rather than this read."""
    return (
        isinstance(error, GpuUnavailable | GpuError)
        or (isinstance(error, TargetRefused) and error.code not in _NOT_OF_THE_RUNG)
        or (
            isinstance(error, BadRequest)
            and error.code in ("unknown_operation", "method_not_allowed")
        )
    )


class GpuRung:
    """Of the daemon of one cache."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._until: dict[str, float | None] = {}  # By UUID; None is for good.
        self._said: set[tuple[str, str]] = set()

    def is_open(self, uuid: str) -> bool:
        """Whether a read into the GPU `uuid` should be tried."""
        if uuid not in self._until:
            return True
        until = self._until[uuid]
        return until is not None and time.monotonic() >= until

    def step_down(self, uuid: str, error: RacerError) -> None:
        """Notes that reads into `uuid` go through host memory because of `error`; says so once."""
        passing = error.retry == "same" or error.code == "gpu_out_of_memory"
        pause = PAUSE_SECONDS if error.retry_after is None else error.retry_after
        self._until[uuid] = time.monotonic() + pause if passing else None
        if (uuid, error.code) in self._said:
            return
        self._said.add((uuid, error.code))
        import logging  # Not at the top: it is slow to import, and most processes never fall back.

        logging.getLogger("racer").warning(
            "cache %s: reading into %s through host memory: %s [%s]",
            self._cache,
            uuid,
            error,
            error.code,
        )
