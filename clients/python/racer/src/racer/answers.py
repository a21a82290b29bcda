"""What a daemon answers: one function reads the answer to each operation, with suspicion.

Layer: sans-IO, on `wire`. Takes answers of a status below 400 (`refusals` has the others) and gives
`results`. What was read has to be what was asked for: the range, cut only by the object's end, and
the version. Reading raises ProtocolError.
"""

from __future__ import annotations

import time
from itertools import pairwise

from racer.errors import ProtocolError
from racer.json_object import JsonObject
from racer.results import (
    Body,
    Entry,
    Evicted,
    Explanation,
    HostRead,
    Info,
    Listing,
    PageExplanation,
    Pin,
    Pinned,
    Pins,
    Prefetched,
    SharedPart,
    SharedParts,
    Stat,
    Unpinned,
)
from racer.urls import SCHEME, RacerUrl, percent_decode, percent_encode
from racer.wire import ContentRange, ResponseHead

PROTOCOL_VERSION = 1
SHARE_ALIGNMENT = 4096  # Where shared memory starts in an object: the smallest page it may have.


def _require_etag(head: ResponseHead) -> str:
    if head.etag is None:
        raise ProtocolError(f"an answer (status {head.status}) without ETag")
    return head.etag


def read_info(body: bytes) -> Info:
    value = JsonObject.of_body(body, "the answer to /v1/info")
    protocol = value.number("protocol")
    version = value.text("version")
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"racerd {version} speaks protocol {protocol}, this client {PROTOCOL_VERSION}",
            hint="install the client that belongs to this racerd",
        )
    return Info(
        protocol,
        version,
        value.text("cache"),
        value.text("origin"),
        value.number("page_bytes"),
        value.number("frame_bytes"),
        value.text("gpu"),
        value.text("state"),
        value.texts_of("gpus"),
        value.text_or_none("gpu_why"),
        value.number_or_none("share_chunk_bytes") or 0,
    )


def read_stat(url: RacerUrl, head: ResponseHead) -> Stat:
    expires = head.number("racer-expires-in") or 0
    size = head.number("racer-size")
    if size is None:
        size = head.require_number("content-length")
    return Stat(str(url), size, _require_etag(head), time.time() + expires)


def read_body_head(head: ResponseHead, start: int, stop: int | None, etag: str | None) -> Body:
    """Checks that the body to come is the range that was asked for, cut only by the object's end.

    A 200 to a range is accepted where the range is the whole object.
    """
    served = _require_etag(head)
    _check_version(served, etag)
    if head.status == 206:
        got = head.content_range
        if got is None:
            raise ProtocolError("a 206 without a valid Content-Range")
    elif head.status == 200:
        got = ContentRange(0, head.content_length, head.content_length)
    else:
        raise ProtocolError(f"a read is answered with status {head.status}")
    expected = ContentRange(start, got.size if stop is None else min(stop, got.size), got.size)
    length = expected.stop - expected.start
    told = head.number("racer-size")
    if got != expected or head.content_length != length or told not in (None, got.size):
        raise ProtocolError(
            f"asked for bytes {start} to {stop} and got {got.start} to {got.stop} of {got.size},"
            f" with {head.content_length} in the body"
        )
    return Body(start, expected.stop, got.size, served)


def _check_version(served: str, etag: str | None) -> None:
    if etag is not None and served != etag:
        raise ProtocolError(f"the read was pinned to {etag} and was answered from {served}")


def read_host_read(
    head: ResponseHead, body: bytes, part: tuple[int, int], etag: str | None
) -> HostRead:
    """Checks that exactly the part was written, cut only by the object's end."""
    value = JsonObject.of_body(body, "the answer to host-read")
    served = _require_etag(head)
    _check_version(served, etag)
    start, stop = part
    done = HostRead(
        value.number("bytes"),
        value.number("offset"),
        value.number("size"),
        served,
        value.child("rungs").numbers(),
    )
    if done.offset != start or done.bytes != min(stop, done.size) - start:
        raise ProtocolError(
            f"asked for bytes {start} to {stop} of {done.size}, and {done.bytes} bytes from"
            f" {done.offset} were written"
        )
    return done


def read_shared(head: ResponseHead, body: bytes, at: int, etag: str | None) -> SharedPart:
    """Checks that what is shared holds byte `at` of the version that was asked for."""
    value = JsonObject.of_body(body, "the answer to share")
    served = _require_etag(head)
    _check_version(served, etag)
    part = _shared_part(value, value.number("size"), served)
    if not part.start <= at < part.stop:
        raise ProtocolError(
            f"asked for byte {at}, and bytes {part.start} to {part.stop} are shared"
        )
    return part


def read_shared_parts(head: ResponseHead, body: bytes, etag: str | None) -> SharedParts:
    """Checks that what is shared is in order, and of the version that was asked for."""
    value = JsonObject.of_body(body, "the answer about what is shared")
    served, size = _require_etag(head), value.number("size")
    _check_version(served, etag)
    parts = tuple(
        _shared_part(JsonObject(item, "a shared piece"), size, served)
        for item in value.items("pieces")
    )
    if any(before.stop > after.start for before, after in pairwise(parts)):
        raise ProtocolError("shared pieces overlap, or are out of order")
    return SharedParts(size, served, parts, value.number_or_none("share_chunk_bytes") or 0)


def _shared_part(value: JsonObject, size: int, etag: str) -> SharedPart:
    start = value.number("offset")
    stop = start + value.number("bytes")
    ends_well = stop == size or stop % SHARE_ALIGNMENT == 0
    if not start < stop <= size or start % SHARE_ALIGNMENT or not ends_well:
        raise ProtocolError(f"bytes {start} to {stop} of {size} cannot be a shared piece")
    return SharedPart(start, stop, size, etag, value.child("rungs").numbers())


def read_target_id(body: bytes, size: int) -> str:
    value = JsonObject.of_body(body, "the answer to /v1/targets")
    target = value.text("id")
    if len(target) != 32 or set(target) - set("0123456789abcdef"):
        raise ProtocolError(f"{target[:40]!r} is not the id of a target")
    if value.number("bytes") != size:
        raise ProtocolError(f"a target of {size} bytes was registered as {value.number('bytes')}")
    return target


def read_listing(url: RacerUrl, body: bytes) -> Listing:
    value = JsonObject.of_body(body, "the answer to a listing")
    if not url.bucket:
        names = [item for item in value.items("buckets") if isinstance(item, str)]
        if len(names) != len(value.items("buckets")):
            raise ProtocolError("a listing of buckets holds something else than names")
        buckets = [RacerUrl(url.cache, name) for name in names]
        return Listing(tuple(Entry(str(bucket), is_prefix=True) for bucket in buckets), None)
    entries = []
    for item in value.items("objects"):
        line = JsonObject(item, "an object of a listing")
        name = _listed(url, line.text("key"))
        entries.append(Entry(name, line.number_or_none("size"), line.text_or_none("etag")))
    for item in value.items("prefixes"):
        if not isinstance(item, str):
            raise ProtocolError("a listing holds a prefix that is not a string")
        entries.append(Entry(_listed(url, item), is_prefix=True))
    return Listing(tuple(entries), value.text_or_none("next"))


def _listed(url: RacerUrl, key_encoded: str) -> str:
    """The URL of a listed key. Raises ProtocolError for a key that does not lie under `url`."""
    try:
        key = percent_decode(key_encoded)
    except ValueError as error:
        raise ProtocolError(f"a listing with the malformed key {key_encoded[:80]!r}") from error
    if not key.startswith(url.key):
        raise ProtocolError(f"a listing of {url} with the key {key_encoded[:80]!r}")
    bucket = percent_encode(url.bucket.encode())
    # Keys longer than a URL's limit can be listed though not read: no RacerUrl here.
    return f"{SCHEME}{url.cache}/{bucket}/{percent_encode(key)}"


def read_prefetched(body: bytes) -> Prefetched:
    value = JsonObject.of_body(body, "the answer to prefetch")
    return Prefetched(value.number("pages"), value.number("bytes"), value.child("rungs").numbers())


def read_evicted(body: bytes) -> Evicted:
    value = JsonObject.of_body(body, "the answer to evict")
    return Evicted(value.number("pages"), value.number("bytes"))


def read_pinned(body: bytes) -> Pinned:
    value = JsonObject.of_body(body, "the answer to pin")
    return Pinned(value.number("pages"), value.number("bytes"), value.number("room_bytes"))


def read_unpinned(body: bytes) -> Unpinned:
    value = JsonObject.of_body(body, "the answer to unpin")
    return Unpinned(value.truth("removed"), value.number("room_bytes"))


def read_pins(cache: str, body: bytes) -> Pins:
    value = JsonObject.of_body(body, "the answer to pins")
    pins = []
    for item in value.items("pins"):
        line = JsonObject(item, "a pin")
        bucket = RacerUrl(cache, line.text("bucket"))
        url = _listed(bucket, line.text("key"))
        pins.append(Pin(url, line.truth("prefix"), line.number("pages"), line.number("bytes")))
    return Pins(tuple(pins), value.number("room_bytes"))


def read_explanation(url: RacerUrl, body: bytes) -> Explanation:
    value = JsonObject.of_body(body, "the answer to explain")
    pages = []
    for item in value.items("pages"):
        page = JsonObject(item, "a page of an explanation")
        last = page.child_or_none("last")
        pages.append(
            PageExplanation(
                page.number("index"),
                page.text("rung"),
                page.child("why").texts(),
                last.text("rung") if last is not None else None,
                last.seconds("age_seconds") if last is not None else None,
            )
        )
    return Explanation(
        str(url),
        value.text("etag"),
        value.number("size"),
        tuple(pages),
        value.number_or_none("next_index"),
    )
