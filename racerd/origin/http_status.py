"""What the status of an HTTP response means to a reader.

Layer: origin, pure but for the response it looks at. Source: RFC 9110 section 15.
"""

from __future__ import annotations

from racerd.errors import RacerError
from racerd.origin.failures import Transient, broken_protocol, forbidden, not_found, unavailable

REDIRECTS = (301, 302, 303, 307, 308)
NO_HEAD = (405, 501)
_SERVER_ERRORS = (408, 425, 500, 502, 504)
_THROTTLED = (429, 503)


def failure_of(
    status: int, retry_after: str | None, subject: str, where: str
) -> RacerError | Transient:
    """Returns what a response about `subject` that is no success means."""
    if status in (401, 403):
        return forbidden(subject, where, f"status {status}")
    if status in (404, 410):
        return not_found(subject, where)
    transient = transient_status(status, retry_after, where)
    return transient or broken_protocol(f"status {status} for {subject}", where)


def transient_status(status: int, retry_after: str | None, where: str) -> Transient | None:
    """What a status means that may be another one soon, else None."""
    if status in _THROTTLED:
        seconds = retry_after_seconds(retry_after)
        final = unavailable(
            f"it is overloaded (status {status})", where, retry_after_seconds=seconds
        )
        return Transient("throttled", final, retry_after_seconds=seconds)
    if status in _SERVER_ERRORS:
        return Transient("server_error", unavailable(f"it failed (status {status})", where))
    return None


def retry_after_seconds(text: str | None) -> float | None:
    """Returns the seconds of a Retry-After field. A date is ignored: no foreign clock (F63)."""
    text = (text or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else None
