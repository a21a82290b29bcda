"""What each operation of the client protocol does: one small handler for each message.

Layer: serve, loop thread. A handler takes a checked message and its exchange, and returns a
response or raises a declared error. It knows no socket. Cancelling a handler cancels its read and
returns once nothing touches the memory that it used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import racerd
from racerd.errors import RequestError
from racerd.gpu.node import GpuNode
from racerd.ids import ObjectVersion
from racerd.read.reader import PageExplanation, Pin, ReadReport, RequestContext, Resolution
from racerd.runtime.deadline import Deadline
from racerd.serve.descriptors import ReceivedDescriptor
from racerd.serve.peer import PeerCredentials
from racerd.serve.reader import Reader
from racerd.serve.responses import (
    Body,
    Response,
    body_response,
    head_response,
    json_response,
)
from racerd.serve.targets import TargetRegistry
from racerd.wire.messages import (
    Evict,
    Explain,
    FindShared,
    GetInfo,
    GetObject,
    GpuRead,
    HostRead,
    ListBuckets,
    ListObjects,
    ListPins,
    Message,
    ObjectMessage,
    PinObjects,
    Prefetch,
    RegisterTarget,
    ReleaseTarget,
    ShareObject,
    StatObject,
    Takes,
    UnpinObjects,
)
from racerd.wire.names import percent_encode
from racerd.wire.ranges import RangeNotSatisfiable, content_range

PROTOCOL_VERSION = 1
EXPLAINED_PAGES_MAX = 4096
SHARED_PIECES_MAX = 16  # A message takes up to 253 descriptors (SCM_MAX_FD).


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a handler may know of the exchange that it answers.

    `descriptors` are the exchange's: a handler takes one over by handing it to a target; the
    connection closes the rest. `holder` is the connection, as the key of what it holds.
    """

    holder: Hashable
    peer: PeerCredentials
    deadline: Deadline
    descriptors: Sequence[ReceivedDescriptor] = ()
    descriptors_room: int = 1  # So many may go with the answer.

    @property
    def context(self) -> RequestContext:
        return RequestContext(self.holder, self.deadline)


class Operations:
    """All operations of one cache."""

    def __init__(
        self,
        reader: Reader,
        targets: TargetRegistry,
        state: Callable[[], str],
        gpus: GpuNode | None = None,
    ) -> None:
        self._gpus = gpus
        self._reader = reader
        self._targets = targets
        self._state = state
        self._handlers: Mapping[type[Message], Callable[[Any, Exchange], Awaitable[Response]]] = {
            GetInfo: self.info,
            StatObject: self.stat,
            GetObject: self.get,
            ListObjects: self.list_objects,
            ListBuckets: self.list_buckets,
            RegisterTarget: self.register_target,
            ReleaseTarget: self.release_target,
            HostRead: self.host_read,
            GpuRead: self.gpu_read,
            ShareObject: self.share,
            FindShared: self.find_shared,
            Prefetch: self.prefetch,
            Evict: self.evict,
            PinObjects: self.pin,
            UnpinObjects: self.unpin,
            ListPins: self.list_pins,
            Explain: self.explain,
        }

    @property
    def streams_awaited(self) -> bool:
        """Whether somebody waits for room that bodies under way have."""
        return self._reader.streams_awaited

    async def handle(self, message: Message, exchange: Exchange) -> Response:
        """Carries `message` out. Raises declared errors only, unless there is a defect."""
        _check_descriptors(message, exchange)
        return await self._handlers[type(message)](message, exchange)

    async def info(self, message: GetInfo, exchange: Exchange) -> Response:
        geometry, gpus = self._reader.geometry, self._gpus
        return json_response(
            {
                "protocol": PROTOCOL_VERSION,
                "version": racerd.__version__,
                "cache": self._reader.name,
                "origin": self._reader.origin_description,
                "page_bytes": geometry.page_bytes,
                "frame_bytes": geometry.frame_bytes,
                "share_chunk_bytes": self._reader.share_chunk_bytes,
                "gpu": "off" if gpus is None else gpus.state,
                "gpus": [] if gpus is None else gpus.uuids,
                "gpu_why": "racerd uses no GPU on this node" if gpus is None else gpus.why,
                "state": self._state(),
            }
        )

    async def stat(self, message: StatObject, exchange: Exchange) -> Response:
        resolution = await self._resolve(message, exchange)
        return head_response(_version_fields(resolution), resolution.version.size)

    async def get(self, message: GetObject, exchange: Exchange) -> Response:
        async def attempt(resolution: Resolution) -> Response:
            version = resolution.version
            start, stop = _span(message, version)
            fields = _version_fields(resolution)
            status = 200
            if message.span is not None:
                status = 206
                fields += (("Content-Range", content_range(start, stop, version.size)),)
            body = await self._begin(version, start, stop, exchange) if start < stop else None
            return body_response(status, fields, stop - start, body)

        return await self._once_more_if_changed(message, exchange, attempt)

    async def _begin(
        self, version: ObjectVersion, start: int, stop: int, exchange: Exchange
    ) -> Body:
        """Reads the first chunk, so that what fails early is answered with its own status."""
        chunks = self._reader.stream(version, start, stop, exchange.context)
        return Body(await anext(chunks), chunks)  # A stream that raised, or was cancelled, is over.

    async def list_objects(self, message: ListObjects, exchange: Exchange) -> Response:
        listing = await self._reader.list_objects(
            message.bucket,
            message.prefix,
            delimiter=message.delimiter,
            after=message.after,
            limit=message.limit,
            deadline=exchange.deadline,
        )
        return json_response(
            {
                "objects": [
                    {"key": percent_encode(entry.key), "size": entry.size, "etag": entry.etag}
                    for entry in listing.objects
                ],
                "prefixes": [percent_encode(prefix) for prefix in listing.prefixes],
                "next": None if listing.next is None else percent_encode(listing.next),
            }
        )

    async def list_buckets(self, message: ListBuckets, exchange: Exchange) -> Response:
        buckets = await self._reader.list_buckets(deadline=exchange.deadline)
        if buckets is None:
            raise RequestError(
                "not_found",
                "the origin of this cache cannot say which buckets it has",
                hint="name the bucket: /v1/list/<bucket>/",
            )
        return json_response({"buckets": list(buckets)})

    async def register_target(self, message: RegisterTarget, exchange: Exchange) -> Response:
        target_id, target = await self._targets.register(
            message, exchange.descriptors[0], exchange.holder, exchange.peer, exchange.deadline
        )
        shown = {"id": target_id, "kind": target.kind, "bytes": target.size_bytes}
        if message.gpu:
            shown["gpu"] = message.gpu
        return json_response(shown, status=201)

    async def release_target(self, message: ReleaseTarget, exchange: Exchange) -> Response:
        await self._targets.release(message.target_id, exchange.peer)
        return json_response({})

    async def host_read(self, message: HostRead, exchange: Exchange) -> Response:
        async def attempt(resolution: Resolution) -> Response:
            version = resolution.version
            start, stop = _span(message, version)
            async with self._destination(message, exchange, stop - start) as destination:
                report = await self._reader.read_into(
                    version, start, stop, destination, exchange.context
                )
            return _read_response(version, start, report)

        return await self._once_more_if_changed(message, exchange, attempt)

    async def gpu_read(self, message: GpuRead, exchange: Exchange) -> Response:
        target = self._targets.find(message.target_id, exchange.peer, kind="gpu")

        async def attempt(resolution: Resolution) -> Response:
            version = resolution.version
            start, stop = _span(message, version)
            with target.lease(message.target_offset, stop - start) as part:
                destination = part.destination
                report = await self._reader.read_into_gpu(
                    version, start, stop, destination, exchange.context
                )
            return _read_response(version, start, report, gpu=destination.device.name)

        return await self._once_more_if_changed(message, exchange, attempt)

    @asynccontextmanager
    async def _destination(
        self, message: HostRead, exchange: Exchange, length: int
    ) -> AsyncIterator[memoryview]:
        """Leases `length` bytes of the target that `message` names or brought with it."""
        if message.target_id is not None:
            target = self._targets.find(message.target_id, exchange.peer, kind="host")
            with target.lease(message.target_offset, length) as destination:
                yield destination
            return
        target = self._targets.one_shot(
            exchange.descriptors[0].duplicate(), message.target_offset, length
        )
        await target.open()
        try:
            with target.lease(0, length) as destination:
                yield destination
        finally:
            await target.release()

    async def share(self, message: ShareObject, exchange: Exchange) -> Response:
        async def attempt(resolution: Resolution) -> Response:
            version = resolution.version
            start, stop = _span(message, version)
            if start == stop:
                raise RangeNotSatisfiable("bytes=0-", version.size)
            piece = await self._reader.share(version, start, exchange.context)
            shown = {
                "offset": piece.start,
                "bytes": piece.stop - piece.start,
                "size": version.size,
                "rungs": _rungs(piece.report),
            }
            return json_response(
                shown,
                fields=(("ETag", version.etag),),
                payload=piece.stop - piece.start,
                descriptors=(piece.descriptor,),
            )

        return await self._once_more_if_changed(message, exchange, attempt)

    async def find_shared(self, message: FindShared, exchange: Exchange) -> Response:
        version = (await self._resolve(message, exchange)).version
        start, stop = _span(message, version)
        room = min(exchange.descriptors_room, SHARED_PIECES_MAX)
        pieces = self._reader.shared(version, start, stop, room)
        shown = [
            {
                "offset": piece.start,
                "bytes": piece.stop - piece.start,
                "rungs": _rungs(piece.report),
            }
            for piece in pieces
        ]
        return json_response(
            {
                "size": version.size,
                "share_chunk_bytes": self._reader.share_chunk_bytes,
                "pieces": shown,
            },
            fields=(("ETag", version.etag),),
            payload=sum(piece.stop - piece.start for piece in pieces),
            descriptors=tuple(piece.descriptor for piece in pieces),
        )

    async def prefetch(self, message: Prefetch, exchange: Exchange) -> Response:
        async def attempt(resolution: Resolution) -> Response:
            version = resolution.version
            start, stop = _span(message, version)
            report = await self._reader.prefetch(version, start, stop, exchange.context)
            first, end = self._pages(start, stop)
            shown = {"pages": end - first, "bytes": report.bytes, "rungs": _rungs(report)}
            return json_response(shown, fields=(("ETag", version.etag),))

        return await self._once_more_if_changed(message, exchange, attempt)

    async def evict(self, message: Evict, exchange: Exchange) -> Response:
        pages, count = await self._reader.evict(message.bucket, message.key, prefix=message.prefix)
        return json_response({"pages": pages, "bytes": count})

    async def pin(self, message: PinObjects, exchange: Exchange) -> Response:
        pins = self._reader.pins
        pin = await pins.pin(message.bucket, message.key, prefix=message.prefix)
        return json_response(
            {"pages": pin.pages, "bytes": pin.bytes, "room_bytes": pins.room_bytes}
        )

    async def unpin(self, message: UnpinObjects, exchange: Exchange) -> Response:
        pins = self._reader.pins
        removed = await pins.unpin(message.bucket, message.key, prefix=message.prefix)
        return json_response({"removed": removed, "room_bytes": pins.room_bytes})

    async def list_pins(self, message: ListPins, exchange: Exchange) -> Response:
        pins = self._reader.pins
        shown = [_pin(pin) for pin in await pins.all()]
        return json_response({"pins": shown, "room_bytes": pins.room_bytes})

    async def explain(self, message: Explain, exchange: Exchange) -> Response:
        version = (await self._resolve(message, exchange)).version
        start, stop = _span(message, version)
        first, end = self._pages(start, stop)
        shown_end = min(end, first + EXPLAINED_PAGES_MAX)
        if shown_end < end:
            stop = shown_end * self._reader.geometry.page_bytes
        pages = await self._reader.explain(version, start, stop)
        shown = {
            "etag": version.etag,
            "size": version.size,
            "pages": [_explanation(page) for page in pages],
            "next_index": shown_end if shown_end < end else None,
        }
        return json_response(shown, fields=(("ETag", version.etag),))

    async def _resolve(self, message: ObjectMessage, exchange: Exchange) -> Resolution:
        return await self._reader.resolve(
            message.object_id, if_match=message.if_match, deadline=exchange.deadline
        )

    async def _once_more_if_changed(
        self,
        message: ObjectMessage,
        exchange: Exchange,
        attempt: Callable[[Resolution], Awaitable[Response]],
    ) -> Response:
        """For what hands out nothing before it returns: an unpinned read starts over once."""
        return await self._reader.once_more_if_changed(
            message.object_id,
            if_match=message.if_match,
            deadline=exchange.deadline,
            attempt=attempt,
        )

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        """The pages that [start, stop) touches, half-open."""
        page_bytes = self._reader.geometry.page_bytes
        return start // page_bytes, -(-stop // page_bytes)


def _check_descriptors(message: Message, exchange: Exchange) -> None:
    count = len(exchange.descriptors)
    wanted = 1 if message.takes is Takes.ONE else 0
    if count > wanted:
        raise RequestError(
            "descriptor_unexpected",
            f"{count} descriptors came with a request that takes {wanted}",
            hint="send one descriptor with POST /v1/targets, or with a host-read that names no"
            " target; none with anything else",
        )
    if count < wanted:
        raise RequestError(
            "descriptor_missing",
            "no descriptor came with a request that takes one",
            hint="send a memfd as SCM_RIGHTS with the first byte of the request,"
            " or name a registered target in Racer-Target",
        )


def _span(message: ObjectMessage, version: ObjectVersion) -> tuple[int, int]:
    """[start, stop) of a request; the whole object without `Range`. Raises 416."""
    return (0, version.size) if message.span is None else message.span.resolve(version.size)


def _version_fields(resolution: Resolution) -> tuple[tuple[str, str], ...]:
    return (
        ("ETag", resolution.version.etag),
        ("Racer-Size", str(resolution.version.size)),
        ("Racer-Expires-In", str(max(0, int(resolution.expires_in_seconds)))),
        ("Accept-Ranges", "bytes"),
    )


def _rungs(report: ReadReport) -> dict[str, int]:
    return {rung: count for rung, count in report.rungs.items() if count}


def _read_response(version: ObjectVersion, start: int, report: ReadReport, **more: str) -> Response:
    shown = {
        "bytes": report.bytes,
        "offset": start,
        "size": version.size,
        "rungs": _rungs(report),
        **more,
    }
    return json_response(shown, fields=(("ETag", version.etag),), payload=report.bytes)


def _pin(pin: Pin) -> dict[str, Any]:
    return {
        "bucket": pin.bucket,
        "key": percent_encode(pin.key),
        "prefix": pin.prefix,
        "pages": pin.pages,
        "bytes": pin.bytes,
    }


def _explanation(page: PageExplanation) -> dict[str, Any]:
    last = page.last
    return {
        "index": page.index,
        "rung": page.rung,
        "why": dict(page.why),
        "last": None if last is None else {"rung": last[0], "age_seconds": round(last[1], 3)},
    }
