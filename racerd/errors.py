"""The errors that cross layers.

Layer: bottom. Every error has a stable `code` (it travels over the wire and into metrics), a
`retry` advice, a message for a person that says what happened, and a `hint` that says what to do.
A message never holds payload, keys or tokens. A cache miss is `None`, not an error.

Each layer translates foreign exceptions once, at its boundary, and chains them.
"""

from __future__ import annotations

from enum import Enum


class Retry(Enum):
    """What a caller may do after an error."""

    NEVER = "never"  # The same request will fail again.
    SAME = "same"  # The same request may succeed later.
    ELSEWHERE = "elsewhere"  # Another source (rung, disk, node) may succeed now.


class RacerError(Exception):
    """Base of all declared errors.

    `code` is stable, lower snake case. `retry_after_seconds` is set where waiting helps.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        retry: Retry = Retry.NEVER,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.retry = retry
        self.retry_after_seconds = retry_after_seconds


class ConfigError(RacerError):
    """Settings that cannot be served. `problems` lists every one of them, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("config", "; ".join(problems), hint="run `racerd check-config`")
        self.problems = problems


class RequestError(RacerError):
    """The request is at fault: not found, forbidden, bad range, version changed, bad target."""

    # The version that the object has now, where whoever raises `version_changed` knows it.
    current_etag: str | None = None


class ProtocolError(RacerError):
    """The peer broke the wire protocol; the connection cannot go on after the answer."""


class ResourceError(RacerError):
    """This node cannot serve now: overloaded, deadline passed, draining, closed."""


class SourceError(RacerError):
    """An origin or a peer failed to deliver."""


class IntegrityError(RacerError):
    """Bytes failed a CRC or a tag. They are never returned; the copy is dropped and counted."""


class DeviceError(RacerError):
    """A disk, GPU or NIC failed. Keeps the native code (an errno, a CUresult, a cuFile error)."""

    def __init__(self, code: str, message: str, *, native: int, hint: str = "") -> None:
        super().__init__(code, message, hint=hint, retry=Retry.ELSEWHERE)
        self.native = native
