"""What bounds one call of an origin: its deadline and its cancel token.

Layer: origin, pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from racerd.origin.failures import cancelled
from racerd.origin.protocol import CancelToken
from racerd.runtime.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Call:
    """`doing` completes "cancelled while …" and "the deadline passed while …"."""

    deadline: Deadline
    cancel: CancelToken
    doing: str

    def check(self) -> None:
        """Raises SourceError `origin_cancelled` or ResourceError `deadline_exceeded`."""
        if self.cancel.cancelled:
            raise cancelled(self.doing)
        self.deadline.check(self.doing)
