"""Byte ranges: the `Range` field in, a half-open range out, `Content-Range` back.

Layer: wire, pure. One range per request (RFC 9110, section 14.1.2, `bytes` only). What a range
means depends on the object's size, which is not known when the head is read: `parse_range` checks
the words, `ByteRange.resolve` gives them a meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from racerd.errors import ProtocolError, RequestError

# Nineteen digits hold every size there can be, and keep int() cheap.
_RANGE = re.compile(r"bytes=(?:([0-9]{1,19})-([0-9]{0,19})|-([0-9]{1,19}))", re.ASCII)


class RangeNotSatisfiable(RequestError):
    """The range starts at or past the end of the object, which has `size` bytes."""

    def __init__(self, text: str, size: int) -> None:
        super().__init__(
            "range_not_satisfiable",
            f"the range {text} starts at or past the end of the object, which has {size} bytes",
            hint="ask for the size with HEAD; an empty object is read without Range",
        )
        self.size = size


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Either `first` to `last` (inclusive, None for the end), or the last `suffix` bytes."""

    first: int | None
    last: int | None
    suffix: int | None

    @property
    def text(self) -> str:
        if self.suffix is not None:
            return f"bytes=-{self.suffix}"
        return f"bytes={self.first}-{'' if self.last is None else self.last}"

    def resolve(self, size: int) -> tuple[int, int]:
        """Returns [start, stop) within an object of `size` bytes; never an empty range.

        Raises RangeNotSatisfiable.
        """
        if self.suffix is not None:
            start, stop = max(0, size - self.suffix), size
        else:
            assert self.first is not None
            start = self.first
            stop = size if self.last is None else min(self.last + 1, size)
        if start >= size:
            raise RangeNotSatisfiable(self.text, size)
        return start, stop


def parse_range(value: str) -> ByteRange:
    """Returns the range that a `Range` field names. Raises ProtocolError."""
    match = _RANGE.fullmatch(value)
    if match is None:
        raise ProtocolError(
            "bad_request",
            f"the range {value[:60]!r} is not one byte range",
            hint="write bytes=<a>-<b>, bytes=<a>- or bytes=-<n>",
        )
    first, last, suffix = match.groups()
    if suffix is not None:
        return ByteRange(None, None, int(suffix))
    if last and int(last) < int(first):
        raise ProtocolError(
            "bad_request",
            f"the range {value!r} ends before it starts",
            hint="both ends of a range are inclusive: bytes=0-0 is the first byte",
        )
    return ByteRange(int(first), int(last) if last else None, None)


def content_range(start: int, stop: int, size: int) -> str:
    """The `Content-Range` of a 206 that carries [start, stop)."""
    return f"bytes {start}-{stop - 1}/{size}"


def content_range_unsatisfied(size: int) -> str:
    """The `Content-Range` of a 416."""
    return f"bytes */{size}"
