"""Typed requests: what a head asks for, checked as far as words can be checked.

Layer: wire, pure. `parse_message` knows every operation of `docs/protocol.md`, and nothing of how
one is carried out. A request class says which descriptors it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NoReturn

from racerd.errors import ProtocolError, RequestError
from racerd.ids import KEY_BYTES_MAX, ObjectId
from racerd.wire.errors import MethodNotAllowed
from racerd.wire.heads import RequestHead
from racerd.wire.names import Path, percent_decode, split_bucket, split_target
from racerd.wire.ranges import ByteRange, parse_range

DEADLINE_SECONDS_DEFAULT = 300.0
DEADLINE_MS_MAX = 86_400_000
LIST_LIMIT_DEFAULT = 1000
LIST_LIMIT_MAX = 10_000

_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
_TARGET_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_GPU = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class Takes(Enum):
    """How many descriptors a request takes."""

    NONE = "none"
    ONE = "one"


class Message:
    """Base of all requests. `operation` labels metrics; `lengthy` ones have an answer that may be
    megabytes long without being an object's bytes."""

    __slots__ = ()
    operation: ClassVar[str]
    lengthy: ClassVar[bool] = False
    takes: ClassVar[Takes] = Takes.NONE


@dataclass(frozen=True, slots=True)
class GetInfo(Message):
    operation: ClassVar[str] = "info"


@dataclass(frozen=True, slots=True)
class ObjectMessage(Message):
    """A request about a range of one object, perhaps pinned to a version.

    `if_match` is an ETag exactly as it was sent, `W/` included. `span` None is the whole object.
    """

    object_id: ObjectId
    if_match: str | None
    span: ByteRange | None


@dataclass(frozen=True, slots=True)
class StatObject(ObjectMessage):
    operation: ClassVar[str] = "head"


@dataclass(frozen=True, slots=True)
class GetObject(ObjectMessage):
    operation: ClassVar[str] = "get"


@dataclass(frozen=True, slots=True)
class Prefetch(ObjectMessage):
    operation: ClassVar[str] = "prefetch"


@dataclass(frozen=True, slots=True)
class Explain(ObjectMessage):
    operation: ClassVar[str] = "explain"
    lengthy: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class HostRead(ObjectMessage):
    """`target_id` names registered memory; None means that a descriptor came with the request."""

    operation: ClassVar[str] = "host-read"
    target_id: str | None
    target_offset: int

    @property
    def takes(self) -> Takes:  # type: ignore[override]  # here it depends on the request
        return Takes.ONE if self.target_id is None else Takes.NONE


@dataclass(frozen=True, slots=True)
class ShareObject(ObjectMessage):
    """The shared memory that holds the first byte of `span`; its end says nothing."""

    operation: ClassVar[str] = "share"


@dataclass(frozen=True, slots=True)
class FindShared(ObjectMessage):
    """What of `span` is shared already; nothing is opened for it."""

    operation: ClassVar[str] = "find-shared"


@dataclass(frozen=True, slots=True)
class GpuRead(ObjectMessage):
    operation: ClassVar[str] = "gpu-read"
    target_id: str
    target_offset: int


@dataclass(frozen=True, slots=True)
class ListBuckets(Message):
    operation: ClassVar[str] = "list"
    lengthy: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ListObjects(Message):
    operation: ClassVar[str] = "list"
    lengthy: ClassVar[bool] = True
    bucket: str
    prefix: bytes
    delimiter: bytes | None
    after: bytes | None
    limit: int


@dataclass(frozen=True, slots=True)
class SelectMessage(Message):
    """A request about an object or, where `prefix` says so, a prefix, which may be empty."""

    bucket: str
    key: bytes
    prefix: bool


@dataclass(frozen=True, slots=True)
class Evict(SelectMessage):
    operation: ClassVar[str] = "evict"


@dataclass(frozen=True, slots=True)
class PinObjects(SelectMessage):
    operation: ClassVar[str] = "pin"


@dataclass(frozen=True, slots=True)
class UnpinObjects(SelectMessage):
    operation: ClassVar[str] = "unpin"


@dataclass(frozen=True, slots=True)
class ListPins(Message):
    operation: ClassVar[str] = "pins"


@dataclass(frozen=True, slots=True)
class RegisterTarget(Message):
    """`gpu` is a UUID as `nvidia-smi` writes it, in lower case; it and `size_bytes` are set for the
    kind `gpu` alone."""

    operation: ClassVar[str] = "targets"
    takes: ClassVar[Takes] = Takes.ONE
    kind: str
    gpu: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseTarget(Message):
    operation: ClassVar[str] = "targets"
    target_id: str


def parse_message(head: RequestHead, cache: str) -> Message:
    """Returns what `head` asks of `cache`.

    Raises ProtocolError `bad_request` (malformed names, fields, queries), RequestError
    `unknown_operation`, MethodNotAllowed.
    """
    path = split_target(head.target)
    methods = None if path is None else _OPERATIONS.get(path.operation)
    if path is None or methods is None:
        raise RequestError(
            "unknown_operation",
            f"there is no operation {head.target[:60]!r}",
            hint=f"paths start with /v1/ and one of: {', '.join(_OPERATIONS)}",
        )
    parse = methods.get(head.method)
    if parse is None:
        raise MethodNotAllowed(head.method, tuple(methods))
    return parse(path, head.fields, cache)


def deadline_seconds(head: RequestHead) -> float:
    """How long the whole exchange may take. Raises ProtocolError."""
    value = head.fields.get("racer-deadline-ms")
    if value is None:
        return DEADLINE_SECONDS_DEFAULT
    return _number("Racer-Deadline-Ms", value, 1, DEADLINE_MS_MAX) / 1000


def _info(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    if path.rest is not None:
        _refuse("nothing follows /v1/info", "ask for /v1/info")
    _no_query(path)
    return GetInfo()


def _object_parts(
    path: Path, fields: Mapping[str, str], cache: str
) -> tuple[ObjectId, str | None, ByteRange | None]:
    _no_query(path)
    object_id = ObjectId(cache, *split_bucket(path.rest))
    span = fields.get("range")
    return object_id, _if_match(fields), None if span is None else parse_range(span)


def _object_message(kind: type[ObjectMessage]) -> _Parser:
    def parse(path: Path, fields: Mapping[str, str], cache: str) -> Message:
        return kind(*_object_parts(path, fields, cache))

    return parse


def _host_read(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    target_id = fields.get("racer-target")
    if target_id is not None:
        _check_target_id(target_id)
    offset = _number("Racer-Target-Offset", fields.get("racer-target-offset", "0"), 0, 1 << 62)
    return HostRead(*_object_parts(path, fields, cache), target_id, offset)


def _gpu_read(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    target_id = fields.get("racer-target")
    if target_id is None:
        _refuse("a gpu-read names its target", "send the id of a target of kind gpu: Racer-Target")
    _check_target_id(target_id)
    offset = _number("Racer-Target-Offset", fields.get("racer-target-offset", "0"), 0, 1 << 62)
    return GpuRead(*_object_parts(path, fields, cache), target_id, offset)


def _list(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    if path.rest == "":
        _no_query(path)
        return ListBuckets()
    bucket, prefix = split_bucket(path.rest)
    _check_bucket(bucket, prefix, cache)
    query = _query(path, "delimiter", "limit", "after")
    delimiter = percent_decode(query["delimiter"]) if query.get("delimiter") else None
    if delimiter not in (None, b"/"):
        _refuse("the only delimiter is a slash", "write delimiter=/ or leave it out")
    after = percent_decode(query["after"]) if query.get("after") else None
    limit = _number("limit", query.get("limit", str(LIST_LIMIT_DEFAULT)), 1, LIST_LIMIT_MAX)
    return ListObjects(bucket, prefix, delimiter, after, limit)


def _select_message(kind: type[SelectMessage]) -> _Parser:
    def parse(path: Path, fields: Mapping[str, str], cache: str) -> Message:
        bucket, key = split_bucket(path.rest)
        prefix = _query(path, "prefix").get("prefix", "false")
        if prefix not in ("true", "false"):
            _refuse(f"prefix={prefix[:20]} is neither true nor false", "write prefix=true")
        if prefix == "true":
            _check_bucket(bucket, key, cache)
        else:
            ObjectId(cache, bucket, key)
        return kind(bucket, key, prefix == "true")

    return parse


def _list_pins(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    if path.rest != "":
        _refuse("all pins of a cache are listed together", "ask for /v1/pins/")
    _no_query(path)
    return ListPins()


def _register_target(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    if path.rest is not None:
        _refuse("nothing follows /v1/targets in a POST", "POST to /v1/targets")
    _no_query(path)
    kind = fields.get("racer-target-kind", "host")
    if kind != "gpu":
        return RegisterTarget(kind)
    gpu = fields.get("racer-gpu", "")
    if _GPU.fullmatch(gpu) is None:
        _refuse(
            f"Racer-Gpu {gpu[:48]!r} is not the UUID of a GPU",
            "send it as `nvidia-smi -L` prints it: GPU- and 8-4-4-4-12 hexadecimal digits",
        )
    size = _number("Racer-Target-Bytes", fields.get("racer-target-bytes", ""), 1, 1 << 62)
    return RegisterTarget(kind, "GPU-" + gpu[4:].lower(), size)


def _release_target(path: Path, fields: Mapping[str, str], cache: str) -> Message:
    _no_query(path)
    target_id = path.rest or ""
    _check_target_id(target_id)
    return ReleaseTarget(target_id)


_Parser = Callable[[Path, Mapping[str, str], str], Message]

_OPERATIONS: Mapping[str, Mapping[str, _Parser]] = {
    "info": {"GET": _info},
    "objects": {"GET": _object_message(GetObject), "HEAD": _object_message(StatObject)},
    "list": {"GET": _list},
    "targets": {"POST": _register_target, "DELETE": _release_target},
    "host-read": {"POST": _host_read},
    "gpu-read": {"POST": _gpu_read},
    "share": {"GET": _object_message(FindShared), "POST": _object_message(ShareObject)},
    "prefetch": {"POST": _object_message(Prefetch)},
    "evict": {"POST": _select_message(Evict)},
    "pin": {"POST": _select_message(PinObjects)},
    "unpin": {"POST": _select_message(UnpinObjects)},
    "pins": {"GET": _list_pins},
    "explain": {"GET": _object_message(Explain)},
}


def _query(path: Path, *known: str) -> Mapping[str, str]:
    for name in path.query:
        if name not in known:
            _refuse(
                f"the query says {name[:40]!r}, which this operation does not know",
                f"it knows: {', '.join(known) or 'nothing'}; write a '?' in a name as %3F",
            )
    return path.query


def _no_query(path: Path) -> None:
    if path.query:
        _query(path)


def _check_bucket(bucket: str, prefix: bytes, cache: str) -> None:
    """A prefix may be empty, and is otherwise what a key may be."""
    if len(prefix) > KEY_BYTES_MAX:
        _refuse(f"the prefix is longer than {KEY_BYTES_MAX} bytes", "shorten it")
    ObjectId(cache, bucket, prefix or b"-")


def _if_match(fields: Mapping[str, str]) -> str | None:
    value = fields.get("if-match")
    if value is not None and _ETAG.fullmatch(value) is None:
        _refuse(
            f"If-Match {value[:60]!r} is not one ETag",
            'send one ETag as it was received, quotes and W/ included; "*" and lists are refused',
        )
    return value


def _check_target_id(target_id: str) -> None:
    if _TARGET_ID.fullmatch(target_id) is None:
        _refuse("a target's id is 32 hexadecimal digits", "send the id that POST /v1/targets gave")


def _number(name: str, text: str, smallest: int, largest: int) -> int:
    if _NUMBER.fullmatch(text) is None or not smallest <= int(text) <= largest:
        _refuse(f"{name} {text[:24]!r} is not a number from {smallest} to {largest}", "correct it")
    return int(text)


def _refuse(message: str, hint: str) -> NoReturn:
    raise ProtocolError("bad_request", message, hint=hint)
