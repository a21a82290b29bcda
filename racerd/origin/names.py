"""Keys on the wire: raw bytes, percent-encoded once, never normalised.

Layer: origin, pure. Source: RFC 3986. Everything but unreserved characters and "/" is encoded, so
that "?", "#", "%", "+" and bytes that are not UTF-8 are part of the name.

A "." or ".." part is the one thing a URL path cannot carry: clients, proxies and servers resolve
it (RFC 3986 section 5.2.4, and WHATWG URL even where it is percent-encoded), and the request would
name another object, or leave the bucket. Such a name does not exist at an origin reached by URL.
"""

from __future__ import annotations

import re
from urllib.parse import quote_from_bytes

from racerd.ids import ObjectId
from racerd.origin.failures import not_nameable

_DOTS = (b".", b"..")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


def encoded(key: bytes) -> str:
    """Returns `key` for use in a URL path, slashes kept."""
    return quote_from_bytes(key, safe="/~")


def check_nameable(object_id: ObjectId, where: str) -> None:
    """Raises RequestError `not_found` for a name that no URL path can carry."""
    if object_id.bucket.encode() in _DOTS or has_dots(object_id.key):
        raise not_nameable(object_id, where, "a URL cannot carry a '.' or '..' part")


def has_dots(key: bytes) -> bool:
    return any(part in _DOTS for part in key.split(b"/"))


def plain_path(key: bytes) -> str | None:
    """Returns `key` as a path that obstore carries unchanged, or None where it would not.

    Its `Path` refuses empty parts, dot parts and control characters, and drops a leading or a
    trailing slash without a word, which would name another object.
    """
    if not is_printable(key) or not all(key.split(b"/")) or has_dots(key):
        return None
    return key.decode()


def is_printable(key: bytes) -> bool:
    """Whether `key` is UTF-8 without ASCII control characters."""
    return is_text(key) and _CONTROL.search(key) is None


def is_text(name: bytes) -> bool:
    """Whether `name` is UTF-8."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_head(name: bytes) -> str:
    """The longest head of `name` that is UTF-8: it does not come after `name` in byte order."""
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        return name[: error.start].decode()
