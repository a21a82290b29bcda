"""Answers that refuse: the error that an answer of status 400 or more tells of.

Layer: sans-IO, on `wire` and `errors`. Whatever the body holds, an error comes of it: what it does
not tell, or tells with a wrong type, is filled in from the status, because a refusal that is told
badly is one all the same.
"""

from __future__ import annotations

import json
from typing import Any

from racer.errors import (
    RacerError,
    RangeNotSatisfiable,
    VersionChanged,
    code_for_status,
    kind_for_code,
)
from racer.wire import ResponseHead

# What to say where the answer tells no more than its code: an answer to HEAD has no body.
_SENTENCES = {
    "corrupt": "its bytes failed verification, and no source had good ones",
    "deadline_exceeded": "the daemon did not get an answer in time",
    "draining": "the daemon is shutting down",
    "forbidden": "the origin, or a policy of this node, says no",
    "not_found": "there is no such object",
    "origin_protocol": "the origin answered what it must not",
    "origin_unavailable": "the origin cannot be reached",
    "overloaded": "the daemon has no room now",
    "version_changed": "the object is not the version that was asked for",
}


def error_of(head: ResponseHead, body: bytes, *, about: str) -> RacerError:
    """The error that an answer of status 400 or more tells of. `about` names what was asked."""
    detail: Any = None
    if body:
        try:
            detail = json.loads(body).get("error")
        except (ValueError, AttributeError, RecursionError):
            detail = None  # Said by something else than racerd; the status still has a meaning.
    if not isinstance(detail, dict):
        detail = {}
    told = head.fields.get("racer-error", "") or code_for_status(head.status)
    code = _text_or(detail.get("code"), told)
    sentence = _SENTENCES.get(code, f"the daemon answers {code}, status {head.status}")
    message = _text_or(detail.get("message"), sentence)
    retry = detail.get("retry")
    kind = kind_for_code(code)
    retry_after = head.number("retry-after")
    error = kind(
        f"{about}: {message}",
        code=code,
        hint=_text_or(detail.get("hint"), ""),
        retry=retry if retry in ("never", "same", "elsewhere") else None,
        retry_after=float(retry_after) if retry_after is not None else None,
        status=head.status,
    )
    if isinstance(error, VersionChanged):
        error.etag = head.etag
    if isinstance(error, RangeNotSatisfiable):
        error.size = head.size_of_unsatisfied_range
        if error.size:
            error.hint = f"it has {error.size:,} bytes, as `stat` tells: start before its end"
    return error


def _text_or(value: object, default: str) -> str:
    return value if isinstance(value, str) and value else default
