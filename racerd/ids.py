"""Names of things: caches, objects, versions, pages.

Layer: bottom, pure values. A page is (cache, bucket, key, ETag, index); everything that stores or
seals a page binds all of it, so that a swapped or stale record cannot pass for another.
Keys are bytes: what an origin calls them is the origin's business, and nothing here normalises
dots, slashes or case.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from racerd.errors import RequestError

CACHE_NAME_BYTES_MAX = 82
KEY_BYTES_MAX = 1024
BUCKET_BYTES_MAX = 255

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_CACHE_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def check_cache_name(name: str) -> str:
    """Returns `name` if it is a DNS subdomain of at most 82 bytes, else raises ValueError."""
    if len(name) > CACHE_NAME_BYTES_MAX:
        raise ValueError(
            f"cache name {name[:20]!r}… has {len(name)} bytes, the limit is {CACHE_NAME_BYTES_MAX}"
        )
    if _CACHE_NAME.fullmatch(name) is None:
        raise ValueError(
            f"cache name {name!r} is not a DNS subdomain: lower-case letters, digits, '-' and '.',"
            " each label 1 to 63 long, starting and ending with a letter or digit"
        )
    return name


def _packed(*parts: bytes) -> bytes:
    """Joins `parts` so that no two different tuples give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


@dataclass(frozen=True)
class ObjectId:
    """An object as clients name it. `bucket` is text without '/'; `key` is raw bytes, not empty."""

    cache: str
    bucket: str
    key: bytes

    def __post_init__(self) -> None:
        if not self.bucket or "/" in self.bucket or "\0" in self.bucket:
            raise RequestError("bad_request", f"{self.bucket!r} is not a bucket name")
        try:
            bucket_bytes = len(self.bucket.encode())
        except UnicodeEncodeError:
            raise RequestError(
                "bad_request", f"the bucket name {self.bucket!r} is not UTF-8"
            ) from None
        if bucket_bytes > BUCKET_BYTES_MAX:
            raise RequestError("bad_request", f"a bucket name has at most {BUCKET_BYTES_MAX} bytes")
        if not self.key or b"\0" in self.key:
            raise RequestError("bad_request", "the object key is empty or holds a NUL byte")
        if len(self.key) > KEY_BYTES_MAX:
            raise RequestError(
                "bad_request", f"the object key has {len(self.key)} bytes, at most {KEY_BYTES_MAX}"
            )

    @cached_property
    def packed(self) -> bytes:
        """An injective encoding of all parts, each prefixed with its length (32-bit big endian)."""
        return _packed(self.cache.encode(), self.bucket.encode(), self.key)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over `packed`: an index key, never proof of identity."""
        return hashlib.blake2b(self.packed, digest_size=16, person=b"racer object").digest()

    @property
    def text(self) -> str:
        """For logs and messages: `bucket/key`, with bytes that are not UTF-8 escaped."""
        return f"{self.bucket}/{self.key.decode('utf-8', 'backslashreplace')}"


@dataclass(frozen=True)
class ObjectVersion:
    """One version of an object. `etag` is as clients see it, quotes and `W/` included.

    A weak ETag was derived (size, time, inode, Last-Modified) or is weak at the origin: it is
    compared on every fetch and never sent as a precondition.
    `origin_token` is what the origin calls the version where that is not the ETag (a GCS
    generation, say); it is not part of the identity.
    """

    object_id: ObjectId
    etag: str
    size: int
    origin_token: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectVersion):
            return NotImplemented
        return (self.object_id, self.etag, self.size) == (other.object_id, other.etag, other.size)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def weak(self) -> bool:
        return self.etag.startswith("W/")

    @cached_property
    def packed(self) -> bytes:
        """An injective encoding of object, ETag and size."""
        return self.object_id.packed + _packed(self.etag.encode(), self.size.to_bytes(8, "big"))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over `packed`: an index key, never proof of identity."""
        return hashlib.blake2b(self.packed, digest_size=16, person=b"racer version").digest()


@dataclass(frozen=True)
class PageId:
    """One page of one version. Equality is of the whole identity; `key` is what indexes use."""

    version: ObjectVersion
    index: int

    @property
    def key(self) -> tuple[bytes, int]:
        """(version digest, page index): hashable, small, cheap."""
        return (self.version.digest, self.index)

    @property
    def text(self) -> str:
        return f"{self.version.object_id.text} page {self.index}"
