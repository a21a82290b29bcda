"""The errors an origin raises, worded once; and the failures that are worth another attempt.

Layer: origin. Messages say which object and which origin, what happened and what to do; they
never hold credentials: an origin is named by its description, which has none.
"""

from __future__ import annotations

from racerd.errors import RacerError, RequestError, Retry, SourceError
from racerd.ids import ObjectId


class Transient(Exception):
    """One attempt failed in a way that another may cure.

    `reason` is a label of `racer_origin_retries_total`: a closed set of words. `final` is what the
    caller sees when no attempt is left. `retry_after_seconds` is the origin's own wish.
    """

    def __init__(
        self, reason: str, final: RacerError, *, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        self.retry_after_seconds = retry_after_seconds


def not_found(subject: str, where: str) -> RequestError:
    return RequestError(
        "not_found",
        f"{subject} does not exist at {where}",
        hint="check the bucket and the key; keys are case-sensitive and never normalised",
    )


def not_nameable(object_id: ObjectId, where: str, why: str) -> RequestError:
    """The origin has no object of that name because it cannot have one."""
    return RequestError(
        "not_found",
        f"{object_id.text} cannot exist at {where}: {why}",
        hint="list the bucket to see the names that exist",
    )


def forbidden(subject: str, where: str, why: str = "", *, hint: str = "") -> RequestError:
    """`hint` for an origin that knows no credentials."""
    return RequestError(
        "forbidden",
        f"{where} refuses access to {subject}{f' ({why})' if why else ''}",
        hint=hint
        or "check the credentials that racerd uses for this cache, and what they may read",
    )


def bucket_forbidden(bucket: str, allowed: tuple[str, ...]) -> RequestError:
    return RequestError(
        "forbidden",
        f"bucket {bucket!r} is not one that this cache may read",
        hint=f"the cache's `buckets` setting allows: {', '.join(sorted(allowed)) or 'none'}",
    )


def version_changed(object_id: ObjectId, expected: str, found: str | None) -> RequestError:
    now = f", it is {found} now" if found else ""
    return RequestError(
        "version_changed",
        f"{object_id.text} is no longer version {expected}{now}",
        hint="ask for the current version and read that",
        retry=Retry.SAME,
    )


def unavailable(
    what: str, where: str, *, hint: str = "", retry_after_seconds: float | None = None
) -> SourceError:
    return SourceError(
        "origin_unavailable",
        f"{where} is not available: {what}",
        hint=hint or "try again later; `racer_origin_retries_total` counts the causes",
        retry=Retry.SAME,
        retry_after_seconds=retry_after_seconds,
    )


def broken_protocol(what: str, where: str, *, hint: str = "") -> SourceError:
    return SourceError(
        "origin_protocol",
        f"{where} answered what it must not: {what}",
        hint=hint or "this origin, or a proxy in front of it, cannot be read from as it is",
    )


def cancelled(doing: str) -> SourceError:
    return SourceError("origin_cancelled", f"cancelled while {doing}", retry=Retry.SAME)
