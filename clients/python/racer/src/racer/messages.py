"""What requests ask and what answers say, as values.

Layer: sans-IO, on `wire`. One function builds each request, one reads each answer; every field of a
JSON body is checked for its type, because a number that is really `true` or a string ends as a
wrong length somewhere else. Reading raises ProtocolError; an answer of status 400 or more is
raised as the error it tells of.

Values are named tuples: a dataclass takes a millisecond to make, a dozen of them longer than all
the rest of starting the command `racer`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from racer.errors import (
    BadRequest,
    ProtocolError,
    RacerError,
    RangeNotSatisfiable,
    VersionChanged,
    code_for_status,
    kind_for_code,
)
from racer.urls import SCHEME, RacerUrl, percent_decode, percent_encode
from racer.wire import ContentRange, Request, ResponseHead, is_etag

PROTOCOL_VERSION = 1
RUNGS = ("memory", "cufile", "disk", "peer", "origin")
HOST_READ = "host-read"
GPU_READ = "gpu-read"


# --- values -----------------------------------------------------------------------------------


class Info(NamedTuple):
    """What a daemon says about itself and about one cache."""

    protocol: int
    version: str
    cache: str
    origin: str
    page_bytes: int
    frame_bytes: int
    gpu: str
    state: str
    gpus: tuple[str, ...] = ()
    gpu_why: str | None = None  # Why `gpu` is not "ready".
    share_chunk_bytes: int = 0  # How objects are cut for `share`; 0 where no memory is shared.


class Stat(NamedTuple):
    """One version of an object. Until `expires_at` (of `time.time()`) racerd answers for it
    without asking the origin."""

    url: str
    size: int
    etag: str
    expires_at: float


class Entry(NamedTuple):
    """A line of a listing: an object, or (`is_prefix`) all that lies under a common prefix."""

    url: str
    size: int | None = None
    etag: str | None = None
    is_prefix: bool = False


class Listing(NamedTuple):
    """One answer of a listing; `after` is where the next one starts, percent-encoded, or None."""

    entries: tuple[Entry, ...]
    after: str | None


class HostRead(NamedTuple):
    """The daemon wrote `bytes` into the target. `rungs` tells which rung gave how many."""

    bytes: int
    offset: int
    size: int
    etag: str
    rungs: Mapping[str, int]


def add_rungs(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds the bytes by rung of one read to those of others."""
    for rung, count in more.items():
        total[rung] = total.get(rung, 0) + count


class Body(NamedTuple):
    """The head of a streamed body: `[start, stop)` of an object of `size` bytes follows."""

    start: int
    stop: int
    size: int
    etag: str


class SharedPart(NamedTuple):
    """Bytes `[start, stop)` of an object of `size` bytes; `rungs` tells where they came from."""

    start: int
    stop: int
    size: int
    etag: str
    rungs: Mapping[str, int]


class Prefetched(NamedTuple):
    """The range is in the cache now."""

    pages: int
    bytes: int
    rungs: Mapping[str, int]


class Evicted(NamedTuple):
    """What was dropped from the cache."""

    pages: int
    bytes: int


class Pinned(NamedTuple):
    """What a pin names of what the node's disks hold now, and the disk bytes still to be pinned."""

    pages: int
    bytes: int
    room_bytes: int


class Unpinned(NamedTuple):
    """Whether there was such a pin, and the disk bytes that may be pinned now."""

    removed: bool
    room_bytes: int


class Pin(NamedTuple):
    """One pin of a cache: of the object at `url` or, with `prefix`, of all under it."""

    url: str
    prefix: bool
    pages: int
    bytes: int


class Pins(NamedTuple):
    """All pins of a cache, and the disk bytes that may still be pinned, by all caches together."""

    pins: tuple[Pin, ...]
    room_bytes: int


class PageExplanation(NamedTuple):
    """Which rung would serve page number `page` now, why not an earlier one, and what the last
    read of it took."""

    page: int
    rung: str
    why: Mapping[str, str]
    last_rung: str | None = None
    last_age_seconds: float | None = None


class Explanation(NamedTuple):
    """`next_page` is the first page that the daemon left out of a long answer, or None."""

    url: str
    etag: str
    size: int
    pages: tuple[PageExplanation, ...] = ()
    next_page: int | None = None


SHARE_ALIGNMENT = 4096  # Where shared memory starts in an object: the smallest page it may have.


# --- requests ---------------------------------------------------------------------------------


def _range(start: int, stop: int | None) -> tuple[str, str]:
    return ("Range", f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}")


def _pinned(etag: str | None) -> tuple[tuple[str, str], ...]:
    if etag is None:
        return ()
    if not is_etag(etag):
        raise BadRequest(
            f"{etag!r} is not an ETag", hint="pass it as `stat` gave it, quotes (and W/) included"
        )
    return (("If-Match", etag),)


def info_request() -> Request:
    return Request("GET", "/v1/info")


def stat_request(url: RacerUrl, etag: str | None) -> Request:
    return Request("HEAD", f"/v1/objects/{url.path}", _pinned(etag))


def body_request(url: RacerUrl, start: int, stop: int | None, etag: str | None) -> Request:
    """A streamed read of `[start, stop)`; all of the object where start is 0 and stop None."""
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("GET", f"/v1/objects/{url.path}", (*fields, *_pinned(etag)))


def host_read_request(
    url: RacerUrl,
    part: tuple[int, int],
    etag: str | None,
    *,
    target: str | None,
    target_offset: int,
    operation: str = HOST_READ,
) -> Request:
    """A read of `[start, stop)` into a registered target, or (None) a descriptor sent with it.

    `operation` is GPU_READ for a target in GPU memory.
    """
    fields = [_range(*part), *_pinned(etag)]
    if target is not None:
        fields.append(("Racer-Target", target))
    if target_offset:
        fields.append(("Racer-Target-Offset", str(target_offset)))
    return Request("POST", f"/v1/{operation}/{url.path}", tuple(fields))


def register_request() -> Request:
    return Request("POST", "/v1/targets", (("Racer-Target-Kind", "host"),))


def register_gpu_request(uuid: str, nbytes: int) -> Request:
    """Registers an exported allocation of `nbytes` on the GPU `uuid` ("GPU-…")."""
    fields = (
        ("Racer-Target-Kind", "gpu"),
        ("Racer-Gpu", uuid),
        ("Racer-Target-Bytes", str(nbytes)),
    )
    return Request("POST", "/v1/targets", fields)


def release_request(target: str) -> Request:
    return Request("DELETE", f"/v1/targets/{target}")


def list_request(
    url: RacerUrl, *, delimiter: bytes | None, after: str | None, limit: int
) -> Request:
    if not url.bucket:
        return Request("GET", "/v1/list/")
    query = [f"limit={limit}"]
    if delimiter is not None:
        # A slash is plain in a path but not in every reader's idea of a query.
        query.append(f"delimiter={percent_encode(delimiter)}")
    if after is not None:
        query.append(f"after={after}")
    return Request("GET", f"/v1/list/{url.path}?{'&'.join(query)}")


def share_request(url: RacerUrl, at: int, etag: str | None) -> Request:
    """Asks for the shared memory that holds byte `at`."""
    return Request("POST", f"/v1/share/{url.path}", (_range(at, None), *_pinned(etag)))


def prefetch_request(url: RacerUrl, start: int, stop: int | None, etag: str | None) -> Request:
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("POST", f"/v1/prefetch/{url.path}", (*fields, *_pinned(etag)))


def evict_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("evict", url, prefix)


def pin_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("pin", url, prefix)


def unpin_request(url: RacerUrl, *, prefix: bool) -> Request:
    return _select_request("unpin", url, prefix)


def pins_request() -> Request:
    return Request("GET", "/v1/pins/")


def _select_request(operation: str, url: RacerUrl, prefix: bool) -> Request:
    """About one object or, with `prefix`, about all that lies under the URL."""
    return Request("POST", f"/v1/{operation}/{url.path}{'?prefix=true' if prefix else ''}")


def explain_request(url: RacerUrl, start: int, stop: int | None) -> Request:
    fields = () if start == 0 and stop is None else (_range(start, stop),)
    return Request("GET", f"/v1/explain/{url.path}", fields)


# --- answers ----------------------------------------------------------------------------------


# What to say where the answer tells no more than its code: an answer to HEAD has no body.
_SENTENCES = {
    "corrupt": "its bytes failed verification, and no source had good ones",
    "deadline_exceeded": "the daemon did not get an answer in time",
    "draining": "the daemon is shutting down",
    "forbidden": "the origin, or a policy of this node, says no",
    "not_found": "there is no such object",
    "origin_protocol": "the origin answered what it must not",
    "origin_unavailable": "the origin cannot be reached",
    "overloaded": "the daemon has no room now",
    "version_changed": "the object is not the version that was asked for",
}


def error_of(head: ResponseHead, body: bytes, *, about: str) -> RacerError:
    """The error that an answer of status 400 or more tells of. `about` names what was asked."""
    detail: Any = None
    if body:
        try:
            detail = json.loads(body).get("error")
        except (ValueError, AttributeError):
            detail = None  # Said by something else than racerd; the status still has a meaning.
    if not isinstance(detail, dict):
        detail = {}
    told = head.fields.get("racer-error", "") or code_for_status(head.status)
    code = _text_or(detail.get("code"), told)
    sentence = _SENTENCES.get(code, f"the daemon answers {code}, status {head.status}")
    message = _text_or(detail.get("message"), sentence)
    retry = detail.get("retry")
    kind = kind_for_code(code)
    retry_after = head.number("retry-after")
    error = kind(
        f"{about}: {message}",
        code=code,
        hint=_text_or(detail.get("hint"), ""),
        retry=retry if retry in ("never", "same", "elsewhere") else None,
        retry_after=float(retry_after) if retry_after is not None else None,
        status=head.status,
    )
    if isinstance(error, VersionChanged):
        error.etag = head.etag
    if isinstance(error, RangeNotSatisfiable):
        error.size = head.size_of_unsatisfied_range
        if error.size:
            error.hint = f"it has {error.size:,} bytes, as `stat` tells: start before its end"
    return error


def _text_or(value: object, default: str) -> str:
    return value if isinstance(value, str) and value else default


class _Object:
    """A JSON object of an answer, read field by field with its type."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{what} is not a JSON object")
        self._value: dict[str, Any] = value
        self._what = what

    @classmethod
    def of_body(cls, body: bytes, what: str) -> _Object:
        try:
            return cls(json.loads(body), what)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{what} is not JSON: {error}") from error

    def _wrong(self, name: str, kind: str) -> ProtocolError:
        return ProtocolError(f"{self._what}: {name!r} is not {kind}")

    def number(self, name: str) -> int:
        value = self._value.get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a whole number")
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self._value.get(name) is None else self.number(name)

    def seconds(self, name: str) -> float:
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def truth(self, name: str) -> bool:
        value = self._value.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self._value.get(name) is None else self.text(name)

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def texts_of(self, name: str) -> tuple[str, ...]:
        """A list of strings; none where it is absent."""
        items = [] if self._value.get(name) is None else self.items(name)
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(name, "a list of strings")
        return tuple(items)

    def child(self, name: str) -> _Object:
        return _Object(self._value.get(name), f"{self._what}, {name}")

    def child_or_none(self, name: str) -> _Object | None:
        return None if self._value.get(name) is None else self.child(name)

    def numbers(self) -> dict[str, int]:
        return {name: self.number(name) for name in self._value}

    def texts(self) -> dict[str, str]:
        return {name: self.text(name) for name in self._value}


def _require_etag(head: ResponseHead) -> str:
    if head.etag is None:
        raise ProtocolError(f"an answer (status {head.status}) without ETag")
    return head.etag


def read_info(body: bytes) -> Info:
    value = _Object.of_body(body, "the answer to /v1/info")
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
    if (
        got != expected
        or head.content_length != length
        or head.number("racer-size")
        not in (
            None,
            got.size,
        )
    ):
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
    value = _Object.of_body(body, "the answer to host-read")
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
    value = _Object.of_body(body, "the answer to share")
    served = _require_etag(head)
    _check_version(served, etag)
    start, size = value.number("offset"), value.number("size")
    stop = start + value.number("bytes")
    ends_well = stop == size or stop % SHARE_ALIGNMENT == 0
    if not start <= at < stop <= size or start % SHARE_ALIGNMENT or not ends_well:
        raise ProtocolError(
            f"asked for byte {at}, and bytes {start} to {stop} of {size} are shared"
        )
    return SharedPart(start, stop, size, served, value.child("rungs").numbers())


def read_target_id(body: bytes, size: int) -> str:
    value = _Object.of_body(body, "the answer to /v1/targets")
    target = value.text("id")
    if len(target) != 32 or set(target) - set("0123456789abcdef"):
        raise ProtocolError(f"{target[:40]!r} is not the id of a target")
    if value.number("bytes") != size:
        raise ProtocolError(f"a target of {size} bytes was registered as {value.number('bytes')}")
    return target


def read_listing(url: RacerUrl, body: bytes) -> Listing:
    value = _Object.of_body(body, "the answer to a listing")
    if not url.bucket:
        names = [item for item in value.items("buckets") if isinstance(item, str)]
        if len(names) != len(value.items("buckets")):
            raise ProtocolError("a listing of buckets holds something else than names")
        buckets = [RacerUrl(url.cache, name) for name in names]
        return Listing(tuple(Entry(str(bucket), is_prefix=True) for bucket in buckets), None)
    entries = []
    for item in value.items("objects"):
        line = _Object(item, "an object of a listing")
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
    value = _Object.of_body(body, "the answer to prefetch")
    return Prefetched(value.number("pages"), value.number("bytes"), value.child("rungs").numbers())


def read_evicted(body: bytes) -> Evicted:
    value = _Object.of_body(body, "the answer to evict")
    return Evicted(value.number("pages"), value.number("bytes"))


def read_pinned(body: bytes) -> Pinned:
    value = _Object.of_body(body, "the answer to pin")
    return Pinned(value.number("pages"), value.number("bytes"), value.number("room_bytes"))


def read_unpinned(body: bytes) -> Unpinned:
    value = _Object.of_body(body, "the answer to unpin")
    return Unpinned(value.truth("removed"), value.number("room_bytes"))


def read_pins(cache: str, body: bytes) -> Pins:
    value = _Object.of_body(body, "the answer to pins")
    pins = []
    for item in value.items("pins"):
        line = _Object(item, "a pin")
        bucket = RacerUrl(cache, line.text("bucket"))
        url = _listed(bucket, line.text("key"))
        pins.append(Pin(url, line.truth("prefix"), line.number("pages"), line.number("bytes")))
    return Pins(tuple(pins), value.number("room_bytes"))


def read_explanation(url: RacerUrl, body: bytes) -> Explanation:
    value = _Object.of_body(body, "the answer to explain")
    pages = []
    for item in value.items("pages"):
        page = _Object(item, "a page of an explanation")
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
