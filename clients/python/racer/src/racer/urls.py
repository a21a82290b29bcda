"""`racer://<cache>/<bucket>/<key>`: names of objects, and of everything under a prefix.

Layer: bottom, pure. Keys are bytes and are never normalised: dots, doubled, leading and trailing
slashes are part of the name, `+` is a plus. In a URL every byte may be written `%XX`; `%`, `?` and
`#` must be. Letters outside ASCII and spaces may be written as they are, in UTF-8.
"""

from __future__ import annotations

import re

from racer.errors import BadUrl

SCHEME = "racer://"
CACHE_NAME_BYTES_MAX = 82
KEY_BYTES_MAX = 1024

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_CACHE_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/")
_ENCODED = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in range(256)]


def is_cache_name(name: str) -> bool:
    """Whether `name` may name a cache, and so a folder of the run directory."""
    return len(name) <= CACHE_NAME_BYTES_MAX and _CACHE_NAME.fullmatch(name) is not None


def percent_encode(name: bytes) -> str:
    """Returns `name` with everything but letters, digits and `-._~/` written as `%XX`."""
    return "".join([_ENCODED[byte] for byte in name])


def percent_decode(text: str) -> bytes:
    """Returns the bytes that `text` stands for. Raises ValueError on a `%` without two digits."""

    def byte_of(match: re.Match[bytes]) -> bytes:
        digits = match.group(1)
        if digits is None:
            raise ValueError(f"{text!r} has a '%' that two hex digits do not follow")
        return bytes((int(digits, 16),))

    return _ESCAPE.sub(byte_of, text.encode("utf-8", "surrogateescape"))


class RacerUrl:
    """A cache, a bucket and a key; or, with an empty key or bucket, all that lies under them.

    A value: it never changes, compares and hashes. `str()` gives the URL back, in its one
    canonical spelling.
    """

    __slots__ = ("bucket", "cache", "key")

    cache: str
    bucket: str
    key: bytes

    def __init__(self, cache: str, bucket: str = "", key: bytes = b"") -> None:
        if not is_cache_name(cache):
            raise BadUrl(
                f"{cache[:100]!r} is not a cache's name",
                hint="write racer://<cache>/<bucket>/<key>; a cache is named in lower-case letters,"
                " digits, '-' and '.'",
            )
        if "/" in bucket or "\0" in bucket:
            raise BadUrl(f"{bucket!r} is not a bucket's name: it holds '/' or NUL")
        if key and not bucket:
            raise BadUrl("the bucket is missing", hint="write racer://<cache>/<bucket>/<key>")
        if b"\0" in key:
            raise BadUrl("the key holds a NUL byte")
        if len(key) > KEY_BYTES_MAX:
            raise BadUrl(f"the key has {len(key)} bytes, the limit is {KEY_BYTES_MAX}")
        object.__setattr__(self, "cache", cache)
        object.__setattr__(self, "bucket", bucket)
        object.__setattr__(self, "key", key)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a RacerUrl does not change: {name}")

    def __reduce__(self) -> tuple[type[RacerUrl], tuple[str, str, bytes]]:
        return RacerUrl, (self.cache, self.bucket, self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RacerUrl):
            return NotImplemented
        return (self.cache, self.bucket, self.key) == (other.cache, other.bucket, other.key)

    def __hash__(self) -> int:
        return hash((self.cache, self.bucket, self.key))

    def __repr__(self) -> str:
        return f"RacerUrl({self.cache!r}, {self.bucket!r}, {self.key!r})"

    @classmethod
    def parse(cls, url: str | RacerUrl) -> RacerUrl:
        """Reads a URL. Raises BadUrl with what is wrong and how to write it."""
        if isinstance(url, RacerUrl):
            return url
        if not isinstance(url, str):
            raise TypeError(f"a racer URL is a str, not {type(url).__name__}")
        if not url.startswith(SCHEME):
            raise BadUrl(
                f"{url[:100]!r} is not a racer URL", hint="write racer://<cache>/<bucket>/<key>"
            )
        for mark, escape in (("?", "%3F"), ("#", "%23")):
            if mark in url:
                raise BadUrl(
                    f"{url!r} holds {mark!r}, and racer URLs have no query and no fragment",
                    hint=f"where {mark!r} is part of the key, write {escape}",
                )
        cache, _, rest = url[len(SCHEME) :].partition("/")
        bucket, _, key = rest.partition("/")
        try:
            return cls(cache, percent_decode(bucket).decode(), percent_decode(key))
        except UnicodeDecodeError as error:
            raise BadUrl(f"the bucket of {url!r} is not UTF-8") from error
        except BadUrl:
            raise
        except ValueError as error:
            raise BadUrl(str(error), hint="write a percent sign itself as %25") from error

    @classmethod
    def parse_object(cls, url: str | RacerUrl) -> RacerUrl:
        """Reads the URL of one object: bucket and key are there."""
        parsed = cls.parse(url)
        if not parsed.key:
            hint = "write racer://<cache>/<bucket>/<key>"
            if parsed.bucket:
                hint += "; a file directly in the origin's root belongs to no bucket: move it down"
            raise BadUrl(f"{parsed} names no object", hint=hint)
        return parsed

    @property
    def path(self) -> str:
        """`<bucket>/<key>` as a request's path carries it."""
        return f"{percent_encode(self.bucket.encode())}/{percent_encode(self.key)}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.cache}/{self.path}" if self.bucket else f"{SCHEME}{self.cache}/"
