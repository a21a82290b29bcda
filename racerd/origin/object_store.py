"""S3, Google Cloud Storage and Azure Blob as origins, through obstore.

Layer: origin; blocking, on origin threads, while obstore's own threads move the bytes. Every part
of a read is conditional on its version: the ETag is sent (at Google the generation), and what the
response says of itself is compared (`parts`).

A body arrives whole, in memory of obstore, without another copy of ours. A transfer that breaks is
resumed by obstore at the offset, under the same ETag, which it checks. Over plain http S3's bodies
come by a cheaper way (`signed_bodies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import obstore

from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.call import Call
from racerd.origin.etags import as_etag
from racerd.origin.failures import Transient, broken_protocol, not_nameable, unavailable
from racerd.origin.names import check_nameable, is_printable
from racerd.origin.obstore_failures import RangeIgnored
from racerd.origin.obstore_requests import Requests
from racerd.origin.parts import PartHead, check_part
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.origin.retries import Retries
from racerd.origin.signed_bodies import SignedBodies
from racerd.origin.stores import Located, Stores
from racerd.runtime.deadline import Deadline


class Lister(Protocol):
    """How a kind of store is listed."""

    def list_objects(
        self, bucket: str, prefix: bytes, delimited: bool, after: bytes | None, call: Call
    ) -> Iterator[ListedObject | ListedPrefix]: ...

    def list_buckets(self, call: Call) -> list[str] | None: ...

    def close(self) -> None: ...


class ObjectStoreOrigin:
    """Implements `Origin` for s3://, gs:// and az://. Starts one thread on first use."""

    def __init__(
        self,
        stores: Stores,
        requests: Requests,
        retries: Retries,
        lister: Lister,
        signed_bodies: SignedBodies | None = None,
    ) -> None:
        """Owns all of them."""
        self._stores = stores
        self._requests = requests
        self._retries = retries
        self._lister = lister
        self._signed_bodies = signed_bodies

    @property
    def description(self) -> str:
        return self._requests.where

    def close(self) -> None:
        self._requests.close()
        self._lister.close()
        if self._signed_bodies is not None:
            self._signed_bodies.close()
        self._stores.close()

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        self._check_name(object_id)
        call = Call(deadline, CancelToken(), "asking for the version")
        return self._retries.run(lambda: self._head(object_id, call), call)

    def _check_name(self, object_id: ObjectId) -> None:
        check_nameable(object_id, self._requests.where)
        if self._stores.scheme == "az" and not is_printable(object_id.key):
            why = "a blob's name is Unicode without control characters"
            raise not_nameable(object_id, self._requests.where, why)

    def _head(self, object_id: ObjectId, call: Call) -> ObjectVersion:
        at = self._stores.locate(object_id)
        meta = self._requests.run(lambda: obstore.head_async(at.store, at.path), object_id, call)
        etag = as_etag(meta["e_tag"])
        if etag is None:
            raise broken_protocol(
                f"it sends no usable ETag for {object_id.text}, so versions cannot be told apart",
                self._requests.where,
            )
        generation = meta["version"] if self._stores.scheme == "gs" else None
        return ObjectVersion(object_id, etag, meta["size"], generation)

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        *,
        deadline: Deadline,
        cancel: CancelToken,
        room: memoryview | None = None,
    ) -> memoryview:
        self._check_name(version.object_id)
        call = Call(deadline, cancel, "fetching")

        def by_obstore() -> memoryview:
            return self._retries.run(lambda: self._fetch(version, start, stop, call), call)

        if self._signed_bodies is None:
            return by_obstore()
        return self._signed_bodies.fetch(
            version, start, stop, call, room=room, otherwise=by_obstore
        )

    def _fetch(self, version: ObjectVersion, start: int, stop: int, call: Call) -> memoryview:
        at = self._stores.locate(version.object_id)
        options = self._conditions(version)
        try:
            return self._get(at, version, (start, stop), {**options, "range": (start, stop)}, call)
        except RangeIgnored:
            if start != 0 or stop != version.size:
                raise broken_protocol(
                    "it ignores Range and sends whole objects", self._requests.where
                ) from None
            # A server may answer 200 where the range is the whole object (F45).
            return self._get(at, version, (start, stop), options, call)

    def _get(
        self,
        at: Located,
        version: ObjectVersion,
        span: tuple[int, int],
        options: dict[str, Any],
        call: Call,
    ) -> memoryview:
        async def get() -> memoryview:
            result = await obstore.get_async(at.store, at.path, options=options)  # type: ignore[arg-type]
            head = PartHead(
                "range" in options,
                *result.range,
                size=result.meta["size"],
                etag=as_etag(result.meta["e_tag"]),
            )
            check_part(version, *span, head, self._requests.where)
            return memoryview(await result.bytes_async())

        data: memoryview = self._requests.run(get, version.object_id, call, version)
        if len(data) != span[1] - span[0]:
            raise Transient("short_body", unavailable("the body ended early", self._requests.where))
        return data

    def _conditions(self, version: ObjectVersion) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if version.origin_token is not None:
            options["version"] = version.origin_token
        if not version.weak:
            options["if_match"] = version.etag
        return options

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        call = Call(deadline, CancelToken(), "listing")
        return self._lister.list_objects(bucket, prefix, delimiter is not None, after, call)

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        return self._lister.list_buckets(Call(deadline, CancelToken(), "listing the buckets"))
