"""Heads of HTTP/1.1 messages: a strict parser of requests and a serialiser of responses.

Layer: wire, pure. A head is the request line, the fields and the blank line; there is never a body
behind a request. What a head must be is in `docs/protocol.md`; this is less than RFC 9112 allows
on purpose: no folding, no bare LF, no transfer codings, so that no two readers of the same bytes
can disagree about where a request ends.

Whether a head is refused, and why, does not depend on how its bytes were split: every check looks
at a prefix of the head first by characters, then by size, and only a whole head by its words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn

from racerd.errors import ProtocolError

HEAD_BYTES_MAX = 32_768
FIELDS_MAX = 64

FRAMING_FIELDS = frozenset(
    {"connection", "content-length", "expect", "host", "transfer-encoding", "upgrade"}
)
REQUEST_FIELDS = frozenset(
    {
        "if-match",
        "racer-deadline-ms",
        "racer-gpu",
        "racer-target",
        "racer-target-bytes",
        "racer-target-kind",
        "racer-target-offset",
        "range",
    }
)
_KNOWN_FIELDS = FRAMING_FIELDS | REQUEST_FIELDS

_CR = 0x0D
# Everything that may stand in a head but CR and LF: printable ASCII and obs-text.
_PLAIN_BYTES = bytes([*range(0x20, 0x7F), *range(0x80, 0x100)])
_BAD_BYTE = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n|\Z)|(?<!\r)\n")
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x22\x24-\x7e]*) HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ ]*(.*?)[ ]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request that is well formed. Nothing here is decoded or looked up yet.

    `target` is the request target as sent: an absolute path with an optional query. `fields` holds
    the fields that the protocol knows, by lower-case name, without surrounding spaces; unknown ones
    are left out.
    """

    method: str
    target: str
    fields: Mapping[str, str]

    @property
    def wants_close(self) -> bool:
        """Whether the client asked for the connection to end after this exchange."""
        options = self.fields.get("connection", "")
        return "close" in (option.strip().lower() for option in options.split(","))


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response's status and fields. `content_length` is the only framing there is.

    After a `HEAD`, no body follows whatever `content_length` says: see `ServerConnection`.
    """

    status: int
    fields: tuple[tuple[str, str], ...]
    content_length: int

    def serialise(self, *, close: bool) -> bytes:
        """Returns the bytes. Raises ValueError for a field that would break the framing."""
        lines = [f"HTTP/1.1 {self.status} {_reason(self.status)}"]
        lines.extend(f"{name}: {value}" for name, value in self.fields)
        lines.append(f"Content-Length: {self.content_length}")
        if close:
            lines.append("Connection: close")
        head = "\r\n".join(lines).encode("latin-1")
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise ValueError("a response field holds a line break")
        return head + b"\r\n\r\n"


def head_length(data: bytes | bytearray, searched: int = 0) -> int | None:
    """Returns the length of the head that `data` starts with, or None while it is incomplete.

    `searched` is how many bytes earlier calls have seen already; they are not searched again.
    Raises ProtocolError as soon as what is there cannot become a head.
    """
    end = data.find(b"\r\n\r\n", max(0, searched - 3))
    length = end + 4 if end >= 0 else None
    visible = min(len(data) if length is None else length, HEAD_BYTES_MAX)
    # A CR that ended the part checked before is looked at again, with what follows it.
    first = searched - 1 if searched and data[searched - 1] == _CR else searched
    _check_bytes(data[first:visible])
    if length is None:
        if len(data) < HEAD_BYTES_MAX:
            return None
    elif length <= HEAD_BYTES_MAX:
        return length
    raise ProtocolError(
        "head_too_large",
        f"the head of the request is longer than {HEAD_BYTES_MAX} bytes",
        hint="shorten the key or leave out fields that racerd does not know",
    )


def parse_request_head(head: bytes) -> RequestHead:
    """Returns the request in `head`, whose end `head_length` has found.

    Raises ProtocolError `bad_request` or `head_too_large`, with the reason in words.
    """
    line, *field_lines = head[:-4].split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        _refuse_request_line(line)
    if len(field_lines) > FIELDS_MAX:
        raise ProtocolError(
            "head_too_large",
            f"the head has {len(field_lines)} fields, at most {FIELDS_MAX}",
            hint="leave out fields that racerd does not know",
        )
    fields = _known_fields(field_lines)
    _check_framing(fields)
    return RequestHead(match[1].decode("ascii"), match[2].decode("ascii"), fields)


def _known_fields(lines: Iterable[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            _refuse_field_line(line)
        name = match[1].decode("ascii").lower()
        if name not in _KNOWN_FIELDS:
            continue
        if name in fields:
            _refuse(f"the field {name} occurs twice", "send it once")
        fields[name] = match[2].decode("latin-1")
    return fields


def _check_framing(fields: Mapping[str, str]) -> None:
    if fields.get("content-length", "0") != "0":
        _refuse("a request has no body, so Content-Length must be 0 or absent", "send no body")
    for name in ("transfer-encoding", "upgrade", "expect"):
        if name in fields:
            _refuse(f"the field {name} is refused: a request has no body", f"leave out {name}")


def _check_bytes(part: bytes | bytearray) -> None:
    # The fast way first: without the plain bytes, nothing but CRLF pairs may be left. Only a last
    # CR that still waits for its LF takes the slow way and passes.
    if len(part.translate(None, _PLAIN_BYTES)) == 2 * part.count(b"\r\n"):
        return
    match = _BAD_BYTE.search(part)
    if match is None:
        return
    if match[0] in (b"\r", b"\n"):
        _refuse("a CR or LF stands alone in the head", "end each line with CRLF")
    _refuse(
        f"the control character 0x{match[0][0]:02x} stands in the head",
        "percent-encode it in a name; leave it out of a field",
    )


def _refuse_request_line(line: bytes) -> NoReturn:
    parts = line.split(b" ")
    shown = line[:80].decode("latin-1")
    if not line:
        _refuse("the head starts with an empty line", "send nothing between two requests")
    if len(parts) != 3:
        _refuse(
            f"the request line {shown!r} is not method, target and version",
            "write `GET /v1/… HTTP/1.1`, with single spaces, and percent-encode spaces in names",
        )
    method, target, version = parts
    if version != b"HTTP/1.1":
        _refuse(f"the version {version[:16].decode('latin-1')!r} is not HTTP/1.1", "use HTTP/1.1")
    if not target.startswith(b"/"):
        _refuse("the request target does not start with a slash", "write the path alone")
    if re.fullmatch(rb"[A-Z]{1,16}", method) is None:
        _refuse(f"{method[:20].decode('latin-1')!r} is not a method", "use GET, HEAD, POST, DELETE")
    _refuse(
        "the request target holds a '#' or a byte that is not ASCII",
        "percent-encode everything but letters, digits and -._~/ in names",
    )


def _refuse_field_line(line: bytes) -> NoReturn:
    if line[:1] == b" ":
        _refuse("a field is folded over two lines", "write each field on one line")
    name, colon, _ = line.partition(b":")
    shown = name[:40].decode("latin-1")
    if not colon:
        _refuse(f"the line {shown!r} has no colon", "write `Name: value`")
    if name.endswith(b" "):
        _refuse(f"a space stands before the colon of {shown!r}", "write `Name: value`")
    _refuse(f"{shown!r} is not a field name", "write `Name: value`")


def _refuse(message: str, hint: str) -> NoReturn:
    raise ProtocolError("bad_request", message, hint=hint)


def _reason(status: int) -> str:
    return HTTPStatus(status).phrase
