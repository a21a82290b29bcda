"""Errors on the wire agree with the document, and defects tell nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import racerd
from racerd.errors import (
    DeviceError,
    IntegrityError,
    RacerError,
    RequestError,
    ResourceError,
    Retry,
    SourceError,
)
from racerd.wire.errors import (
    STATUS_OF_CODE,
    MethodNotAllowed,
    error_body,
    error_fields,
    internal_error,
    outer_error,
)
from racerd.wire.ranges import RangeNotSatisfiable

DOCUMENT = Path(racerd.__file__).parent.parent / "docs" / "protocol.md"


def documented() -> dict[str, int]:
    text = DOCUMENT.read_text()
    found: dict[str, int] = {}
    for status, codes in re.findall(r"^\| (\d{3}) \| (`[^|]+`) \|", text, re.M):
        found |= {code: int(status) for code in re.findall(r"`(\w+)`", codes)}
    targets = text.partition("## Shared memory")[2].partition("## Errors")[0]
    for row in re.findall(r"^\| (`[^|]+) \|", targets, re.M):
        for code, status in re.findall(r"`(\w+)`(?: \((\d{3})\))?", row):
            found.setdefault(code, int(status or 422))
    return found


def test_the_document_and_the_table_agree() -> None:
    assert documented() == dict(STATUS_OF_CODE)


def test_a_body_says_what_happened_and_what_to_do() -> None:
    error = RequestError("not_found", "no", hint="look", retry=Retry.ELSEWHERE)
    assert json.loads(error_body(error)) == {
        "error": {"code": "not_found", "message": "no", "hint": "look", "retry": "elsewhere"}
    }
    assert error_fields(error) == [("Racer-Error", "not_found")]


def test_fields_that_go_with_an_error() -> None:
    changed = RequestError("version_changed", "")
    changed.current_etag = '"new"'
    assert ("ETag", '"new"') in error_fields(changed)
    assert ("Content-Range", "bytes */7") in error_fields(RangeNotSatisfiable("bytes=9-", 7))
    assert ("Allow", "GET, HEAD") in error_fields(MethodNotAllowed("PUT", ("GET", "HEAD")))
    for seconds, shown in ((None, "1"), (0.2, "1"), (2.1, "3")):
        busy = ResourceError("overloaded", "", retry_after_seconds=seconds)
        assert ("Retry-After", shown) in error_fields(busy)


def test_inner_codes_are_called_by_their_kind() -> None:
    for inner, outer in (
        (IntegrityError("corrupt_tag", "m"), "corrupt"),
        (SourceError("origin_cancelled", "m"), "origin_unavailable"),
        (ResourceError("closed", "m", retry_after_seconds=2.0), "overloaded"),
        (RequestError("forbidden", "m"), "forbidden"),
    ):
        told = outer_error(inner)
        assert told is not None
        assert (told.code, told.message) == (outer, "m")
        assert told.retry_after_seconds == inner.retry_after_seconds


def test_defects_are_not_told() -> None:
    for defect in (
        DeviceError("disk_failed", "/dev/secret", native=5),
        RacerError("some_step", "payload"),
    ):
        assert outer_error(defect) is None
    assert b"payload" not in error_body(internal_error())
