"""Errors on the wire: status, JSON body and extra fields of each declared error.

Layer: wire, pure. The table in `docs/protocol.md` is this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from racerd.errors import (
    IntegrityError,
    ProtocolError,
    RacerError,
    RequestError,
    ResourceError,
    Retry,
    SourceError,
)
from racerd.wire.ranges import RangeNotSatisfiable, content_range_unsatisfied

STATUS_OF_CODE: Mapping[str, int] = {
    "bad_request": 400,
    "descriptor_missing": 400,
    "descriptor_unexpected": 400,
    "forbidden": 403,
    "not_found": 404,
    "target_unknown": 404,
    "unknown_operation": 404,
    "method_not_allowed": 405,
    "version_changed": 412,
    "range_not_satisfiable": 416,
    "share_off": 422,
    "gpu_unknown": 422,
    "target_hugetlb": 422,
    "target_misaligned": 422,
    "target_not_gpu_memory": 422,
    "target_not_memory": 422,
    "target_read_only": 422,
    "target_sparse": 422,
    "target_too_small": 422,
    "target_unsealed": 422,
    "target_wrong_gpu": 422,
    "target_wrong_kind": 422,
    "head_too_large": 431,
    "internal": 500,
    "corrupt": 502,
    "origin_protocol": 502,
    "origin_unavailable": 502,
    "draining": 503,
    "gpu_lost": 503,
    "gpu_out_of_memory": 503,
    "gpu_unavailable": 503,
    "overloaded": 503,
    "share_full": 503,
    "targets_too_many": 503,
    "deadline_exceeded": 504,
    "pin_refused": 507,
}

# The connection ends after these: where one request ends and the next starts may be in doubt.
CLOSING_CODES = frozenset({"bad_request", "head_too_large"})

# What errors with codes of their own (a tag, an errno, a step inside) are called outside.
_OUTER_CODES: tuple[tuple[type[RacerError], str], ...] = (
    (IntegrityError, "corrupt"),
    (SourceError, "origin_unavailable"),
    (ResourceError, "overloaded"),
    (ProtocolError, "bad_request"),
)


class MethodNotAllowed(RequestError):
    """The operation exists, but not with this method."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(
            "method_not_allowed",
            f"{method} is not a method of this operation",
            hint=f"use {' or '.join(allowed)}",
        )
        self.allowed = allowed


def outer_error(error: RacerError) -> RacerError | None:
    """Returns `error` as clients may see it, or None where it is a defect of ours to them.

    An error whose code is not one of the protocol's gets the code of its kind, and keeps its words.
    """
    if error.code in STATUS_OF_CODE:
        return error
    for kind, code in _OUTER_CODES:
        if isinstance(error, kind):
            outer = RacerError(
                code,
                error.message,
                hint=error.hint,
                retry=error.retry,
                retry_after_seconds=error.retry_after_seconds,
            )
            outer.__cause__ = error
            return outer
    return None


def internal_error() -> RacerError:
    """What a client is told of a defect: nothing of it."""
    return RacerError(
        "internal",
        "racerd failed to answer because of a defect of its own",
        hint="the daemon's log has the trace",
        retry=Retry.SAME,
    )


def error_body(error: RacerError) -> bytes:
    """The JSON body of an error, compact."""
    shown = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "retry": error.retry.value,
    }
    return json.dumps({"error": shown}, separators=(",", ":")).encode()


def error_fields(error: RacerError) -> list[tuple[str, str]]:
    """The fields that go with an error, beside those of its body."""
    fields = [("Racer-Error", error.code)]
    if STATUS_OF_CODE[error.code] == 503:
        seconds = max(1, math.ceil(error.retry_after_seconds or 0.0))
        fields.append(("Retry-After", str(seconds)))
    if isinstance(error, MethodNotAllowed):
        fields.append(("Allow", ", ".join(error.allowed)))
    if isinstance(error, RangeNotSatisfiable):
        fields.append(("Content-Range", content_range_unsatisfied(error.size)))
    if isinstance(error, RequestError) and error.current_etag is not None:
        fields.append(("ETag", error.current_etag))
    return fields
