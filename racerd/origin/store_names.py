"""Keys as obstore can carry them: split into an odd head and a plain tail.

Layer: origin, pure. obstore's `Path` refuses empty parts, `.` and `..`, and silently drops leading
and trailing slashes, which would name another object. So the head of a key up to its last empty
part goes percent-encoded into the store's base (`stores`); only a plain tail goes through `Path`.
URL clients resolve `.` and `..` parts, however they are encoded: such keys cannot be asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

_SAFE = "-._~"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoreName:
    """`head` is percent-encoded, starts with a slash, and is empty for nearly every key.

    A store whose base is bucket + head asks for bucket + head + "/" + `tail` on the wire.
    """

    head: str
    tail: str


def store_name(key: bytes) -> StoreName | str:
    """Splits `key`, or returns a sentence that says why no origin of this kind can have it."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8"
    if _CONTROL.search(text):
        return "names with control characters cannot be asked for"
    parts = text.split("/")
    if "." in parts or ".." in parts:
        return "URLs have no '.' and '..' parts"
    empty = [index for index, part in enumerate(parts) if not part]
    if not empty:
        return StoreName("", text)
    # Parts up to the last empty one, whose slash is the one between base and tail.
    cut = min(empty[-1] + 1, len(parts) - 1)
    head = "".join("/" + quote(part, safe=_SAFE) for part in parts[:cut])
    return StoreName(head, "/".join(parts[cut:]))


def folder_of(prefix: bytes) -> bytes:
    """The deepest whole folder in `prefix`, without its slash: what obstore can list by."""
    return prefix.rpartition(b"/")[0]
