"""What every origin of a cache has in common: which buckets may be named, and what is counted.

Layer: origin. Wraps one origin and is one; `make_origin` puts it in front.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.failures import bucket_forbidden
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix, Origin
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics


class OriginFront:
    """Implements `Origin` around `origin`. `buckets` None allows every bucket."""

    def __init__(
        self, origin: Origin, buckets: tuple[str, ...] | None, *, cache: str, metrics: Metrics
    ) -> None:
        self._origin = origin
        self._buckets = buckets
        self._cache = cache
        self._metrics = metrics

    @property
    def description(self) -> str:
        return self._origin.description

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        self._check_bucket(object_id.bucket)
        with self._counted("head"):
            return self._origin.head(object_id, deadline=deadline)

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
        self._check_bucket(version.object_id.bucket)
        if not 0 <= start < stop <= version.size:
            raise ValueError(f"bytes {start} to {stop} of an object of {version.size}")
        with self._counted("fetch"):
            view = self._origin.fetch(
                version, start, stop, deadline=deadline, cancel=cancel, room=room
            )
        self._metrics.origin_bytes.labels(self._cache).inc(len(view))
        return view

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        self._check_bucket(bucket)
        if delimiter not in (None, b"/"):
            raise RequestError("bad_request", "the delimiter of a listing is '/' or none")
        with self._counted("list"):
            yield from self._origin.list_objects(
                bucket, prefix, delimiter=delimiter, after=after, deadline=deadline
            )

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        if self._buckets is not None:
            return sorted(self._buckets)
        with self._counted("list_buckets"):
            return self._origin.list_buckets(deadline=deadline)

    def close(self) -> None:
        self._origin.close()

    def _check_bucket(self, bucket: str) -> None:
        if self._buckets is not None and bucket not in self._buckets:
            raise bucket_forbidden(bucket, self._buckets)

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        started, result = time.monotonic(), "ok"
        try:
            yield
        except RacerError as error:
            result = error.code
            raise
        finally:
            self._metrics.origin_requests.labels(self._cache, operation, result).inc()
            self._metrics.origin_seconds.labels(self._cache, operation).observe(
                time.monotonic() - started
            )
