"""Heads of the client protocol: written, and read with suspicion.

Layer: sans-IO; no socket, no loop, no clock. `Request.encode` writes a head; `HeadReader` takes
bytes as they come and gives a `ResponseHead` once one is complete. A daemon is trusted with bytes
but not with the framing: whatever is not exactly the protocol raises ProtocolError, and the
connection is not used again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from racer.errors import ProtocolError

HEAD_BYTES_MAX = 32 << 10
FIELDS_MAX = 64
BODY_BYTES_MAX = 64 << 20  # Of bodies that are kept whole: JSON. 10,000 keys of 1 KiB fit.
_LENGTH_DIGITS_MAX = 19

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_REQUEST_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_DIGITS = re.compile(r"[0-9]+", re.ASCII)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})", re.ASCII)
_UNSATISFIED_RANGE = re.compile(r"bytes \*/([0-9]{1,19})", re.ASCII)
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')

# A field that decides how an answer is understood must not be there twice.
_ONCE = frozenset(
    (
        "connection",
        "content-length",
        "content-range",
        "etag",
        "racer-expires-in",
        "racer-size",
        "retry-after",
        "transfer-encoding",
    )
)


def is_etag(text: str) -> bool:
    """Whether `text` is one entity tag, quotes (and `W/`) included."""
    return _ETAG.fullmatch(text) is not None


class Request(NamedTuple):
    """A request head. `target` is the path with its query, already encoded."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...] = ()

    def encode(self, deadline_ms: int | None = None) -> bytes:
        """Returns the head's bytes. Raises ValueError where a value would break out of its line."""
        lines = [f"{self.method} {self.target} HTTP/1.1", "Host: racer"]
        for name, value in self.fields:
            if _REQUEST_VALUE.fullmatch(value) is None:
                raise ValueError(f"the value of {name} holds a control character: {value!r}")
            lines.append(f"{name}: {value}")
        if deadline_ms is not None:
            lines.append(f"Racer-Deadline-Ms: {deadline_ms}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if len(head) > HEAD_BYTES_MAX:
            raise ValueError(f"a request head of {len(head)} bytes; the limit is {HEAD_BYTES_MAX}")
        return head


class ContentRange(NamedTuple):
    """`[start, stop)` of an object of `size` bytes."""

    start: int
    stop: int
    size: int


class ResponseHead:
    """Status and fields of an answer; field names are lower case."""

    __slots__ = ("closes", "content_length", "fields", "status")

    def __init__(self, status: int, fields: dict[str, str], *, to_head: bool = False) -> None:
        self.status = status
        self.fields = fields
        if "transfer-encoding" in fields:
            raise ProtocolError("an answer with Transfer-Encoding: the protocol has none")
        length = self.number("content-length")
        if length is None:
            raise ProtocolError(f"an answer (status {status}) without Content-Length")
        # The answer to HEAD tells the length that GET would have.
        self.content_length = 0 if to_head else length
        self.closes = fields.get("connection", "").lower() == "close"

    def number(self, name: str) -> int | None:
        """Returns the field's whole number, or None where the field is absent."""
        text = self.fields.get(name)
        if text is None:
            return None
        if _DIGITS.fullmatch(text) is None or len(text) > _LENGTH_DIGITS_MAX:
            raise ProtocolError(f"{name} of an answer is not a number: {text[:40]!r}")
        return int(text)

    def require_number(self, name: str) -> int:
        number = self.number(name)
        if number is None:
            raise ProtocolError(f"an answer (status {self.status}) without {name}")
        return number

    @property
    def etag(self) -> str | None:
        text = self.fields.get("etag")
        if text is not None and not is_etag(text):
            raise ProtocolError(f"the ETag of an answer is not one: {text[:80]!r}")
        return text

    @property
    def content_range(self) -> ContentRange | None:
        text = self.fields.get("content-range")
        match = _CONTENT_RANGE.fullmatch(text) if text is not None else None
        if match is None:
            return None
        start, last, size = (int(group) for group in match.groups())
        return ContentRange(start, last + 1, size)

    @property
    def size_of_unsatisfied_range(self) -> int | None:
        match = _UNSATISFIED_RANGE.fullmatch(self.fields.get("content-range", ""))
        return int(match.group(1)) if match is not None else None


class HeadReader:
    """Collects bytes until a response head is complete.

    `rest` is what came behind the head: the start of the body. `to_head` says that the request was
    HEAD, whose answer has no body whatever its Content-Length says.
    """

    def __init__(self, *, to_head: bool = False) -> None:
        self._to_head = to_head
        self._buffer = bytearray()
        self.rest = b""

    @property
    def started(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes) -> ResponseHead | None:
        """Takes the next bytes; returns the head once it is whole. Raises ProtocolError."""
        seen = max(0, len(self._buffer) - 3)
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n", seen)
        if end + 4 > HEAD_BYTES_MAX or (end < 0 and len(self._buffer) > HEAD_BYTES_MAX):
            raise ProtocolError(f"the head of an answer is longer than {HEAD_BYTES_MAX} bytes")
        if end < 0:
            return None
        head = _parse_head(bytes(self._buffer[:end]), to_head=self._to_head)
        self.rest = bytes(self._buffer[end + 4 :])
        if len(self.rest) > head.content_length:
            raise ProtocolError("an answer is followed by bytes that nobody asked for")
        return head


def _parse_head(head: bytes, *, to_head: bool) -> ResponseHead:
    first, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(first)
    if status is None:
        raise ProtocolError(
            f"an answer starts with {first[:60]!r}", hint="is this really racerd's socket?"
        )
    if status.group(1)[0:1] == b"1":
        raise ProtocolError(f"an interim answer, status {status.group(1).decode()}")
    if len(lines) > FIELDS_MAX:
        raise ProtocolError(f"an answer with {len(lines)} fields; the limit is {FIELDS_MAX}")
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise ProtocolError(f"an answer with the malformed field {line[:60]!r}")
        name = match.group(1).decode().lower()
        if name in _ONCE and name in fields:
            raise ProtocolError(f"an answer that has {name} twice")
        fields[name] = match.group(2).decode("latin-1")
    return ResponseHead(int(status.group(1)), fields, to_head=to_head)
