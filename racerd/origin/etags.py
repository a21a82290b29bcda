"""Validators: ETags as origins write them, and the ones derived where an origin has none.

Layer: origin, pure. Source: RFC 9110 section 8.8. A strong ETag is sent as a precondition; a weak
one is only ever compared, because a server must not match it in `If-Match` (section 13.1.1).
"""

from __future__ import annotations

import hashlib
import re
from email.utils import parsedate_to_datetime

_OPAQUE = re.compile(r"[\x21\x23-\x7e]+", re.ASCII)
_DERIVED = 'W/"lm-'


def as_etag(text: str | None) -> str | None:
    """Returns `text` as an ETag with its quotes, or None where it cannot tell versions apart.

    Listings of some stores leave the quotes out; an empty one, or one with characters that no
    header can carry, is as good as none.
    """
    if text is None:
        return None
    text = text.strip()
    weak = text[:2] in ("W/", "w/")
    opaque = text[2:] if weak else text
    if len(opaque) >= 2 and opaque[0] == opaque[-1] == '"':
        opaque = opaque[1:-1]
    if _OPAQUE.fullmatch(opaque) is None:
        return None
    return f'W/"{opaque}"' if weak else f'"{opaque}"'


def derived_etag(last_modified: str | None, size: int | None) -> str | None:
    """A weak ETag from Last-Modified (an HTTP date) and the size, or None without either.

    Two versions of one size written within one second look the same: weaker than any ETag.
    """
    if last_modified is None or size is None:
        return None
    try:
        seconds = int(parsedate_to_datetime(last_modified).timestamp())
    except ValueError:
        return None
    return f'{_DERIVED}{seconds:x}-{size:x}"'


def is_derived(etag: str) -> bool:
    """Whether `etag` came from `derived_etag`."""
    return etag.startswith(_DERIVED)


def file_etag(size: int, mtime_ns: int, inode: int) -> str:
    """The weak ETag of a file: equal only if size, nanosecond mtime and inode all are."""
    packed = f"{size:x}.{mtime_ns:x}.{inode:x}".encode()
    return f'W/"{hashlib.blake2b(packed, digest_size=12, person=b"racer file").hexdigest()}"'
