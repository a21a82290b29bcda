"""Names on the wire: percent encoding, paths and queries.

Layer: wire, pure. A name is bytes; it is decoded once and never normalised: `.`, `..`, doubled,
leading and trailing slashes and `+` mean themselves (RFC 3986 gives them no meaning to racerd).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote_from_bytes, unquote_to_bytes

from racerd.errors import ProtocolError

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PREFIX = "/v1/"


@dataclass(frozen=True, slots=True)
class Path:
    """A request target taken apart. `rest` is still encoded; None where no slash leads to it."""

    operation: str
    rest: str | None
    query: Mapping[str, str]


def percent_encode(name: bytes) -> str:
    """Returns `name` with everything but letters, digits and `-._~/` encoded."""
    return quote_from_bytes(name, safe="/~")


def percent_decode(text: str) -> bytes:
    """Returns the bytes that `text` (ASCII) stands for. Raises ProtocolError on a bad escape."""
    if "%" not in text:
        return text.encode("ascii")
    if (bad := _BAD_ESCAPE.search(text)) is not None:
        _refuse(
            f"{text[bad.start() : bad.start() + 3]!r} is not a percent escape",
            "write a percent sign in a name as %25",
        )
    return unquote_to_bytes(text)


def split_target(target: str) -> Path | None:
    """Takes a request target apart, or returns None where it does not start with `/v1/`.

    Raises ProtocolError for a query that repeats a name.
    """
    if not target.startswith(_PREFIX):
        return None
    path, question, query = target.partition("?")
    operation, slash, rest = path[len(_PREFIX) :].partition("/")
    return Path(operation, rest if slash else None, _parse_query(query) if question else {})


def split_bucket(rest: str | None) -> tuple[str, bytes]:
    """Returns bucket and key of `<bucket>/<key>`. The key may be empty here.

    Raises ProtocolError where the slash behind the bucket is missing, or the bucket is not UTF-8.
    """
    bucket_encoded, slash, key = (rest or "").partition("/")
    if not slash:
        _refuse(
            "the path ends before a bucket and its slash",
            "write /v1/<operation>/<bucket>/<key>; the key may be a prefix, or empty, in a listing",
        )
    try:
        bucket = percent_decode(bucket_encoded).decode("utf-8")
    except UnicodeDecodeError:
        _refuse("the bucket's name is not UTF-8", "a key may hold any bytes, a bucket only text")
    return bucket, percent_decode(key)


def _parse_query(query: str) -> dict[str, str]:
    """`a=b&c=d`, still encoded. `+` is a plus."""
    found: dict[str, str] = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name in found:
            _refuse(f"the query says {name!r} twice", "say it once")
        found[name] = value
    return found


def _refuse(message: str, hint: str) -> NoReturn:
    raise ProtocolError("bad_request", message, hint=hint)
