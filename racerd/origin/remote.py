"""S3, GCS, Azure Blob and HTTP(S) as origins, through obstore.

Layer: origin; blocking, on the origin threads. Every part of a read is conditional on its version:
a strong ETag (or a GCS generation) is sent, and what each response says of itself is compared.

Errors of obstore hold URLs, and a URL may hold a SAS token: they are classified here, and neither
their text nor they themselves are passed on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from email.utils import format_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from racerd.config.origin_options import OriginOptions
from racerd.errors import RacerError, RequestError, SourceError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.attempts import attempts
from racerd.origin.background import BackgroundLoop
from racerd.origin.etags import as_etag, derived_etag
from racerd.origin.failures import (
    Transient,
    broken_protocol,
    bucket_forbidden,
    forbidden,
    not_found,
    not_nameable,
    unavailable,
    version_changed,
)
from racerd.origin.store_names import StoreName, folder_of, store_name
from racerd.origin.parts import PartHead, check_part
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.origin.stores import Store, Stores
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics

if TYPE_CHECKING:
    from obstore import GetOptions

T = TypeVar("T")

_STATUS = re.compile(r"status code: (\d{3})")
_BUSY = {"429": "throttled", "500": "server_error", "502": "server_error",
         "503": "throttled", "504": "server_error", "408": "timeout"}  # fmt: skip


class RemoteOrigin:
    """The object store or web server at `url`."""

    def __init__(self, url: str, options: OriginOptions, *, cache: str, metrics: Metrics) -> None:
        parts = urlsplit(url)
        self._scheme = parts.scheme
        self._url = url
        # s3://bucket and gs://bucket name the only bucket there is.
        only = parts.netloc if parts.scheme in ("s3", "gs") else ""
        self._buckets = options.buckets or ((only,) if only else None)
        self._options = options
        self._cache = cache
        self._metrics = metrics
        self._stores = Stores(url, options)
        self._background = BackgroundLoop(f"origin-{cache}")

    @property
    def description(self) -> str:
        endpoint = self._options.endpoint
        return f"{self._url} at {endpoint}" if endpoint else self._url

    def close(self) -> None:
        self._background.close()
        self._stores.close()

    # --- asking -----------------------------------------------------------------------------

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        name = self._name(object_id)
        cancel = CancelToken()

        def ask() -> ObjectVersion:
            store = self._stores.get(object_id.bucket, name)
            try:
                meta = self._run(
                    lambda: obstore.head_async(store, name.tail),
                    "head",
                    object_id,
                    deadline,
                    cancel,
                )
            except _HeadRefusedError:
                meta = self._meta_of_get(store, name, object_id, deadline, cancel)
            return self._version(object_id, meta)

        return self._attempts(ask, deadline, cancel)

    def _meta_of_get(
        self,
        store: Store,
        name: StoreName,
        object_id: ObjectId,
        deadline: Deadline,
        cancel: CancelToken,
    ) -> Any:
        """What a GET of one byte says of an object whose server refuses HEAD."""

        async def first_byte() -> Any:
            result = await obstore.get_async(store, name.tail, options={"range": (0, 1)})
            await result.bytes_async()
            return result.meta

        return self._run(first_byte, "head", object_id, deadline, cancel)

    def _version(self, object_id: ObjectId, meta: Any) -> ObjectVersion:
        etag = as_etag(meta["e_tag"])
        date = _http_date(meta["last_modified"])
        if etag is None and self._options.weak_etags:
            etag = derived_etag(date, meta["size"])
        if etag is None:
            raise broken_protocol(
                f"{object_id.text} has no usable ETag, so that its versions look the same",
                self.description,
                hint="set `weak_etags = true` for the cache to go by size and Last-Modified",
            )
        token = meta["version"] or (date if etag.startswith("W/") else None)
        return ObjectVersion(object_id, etag, meta["size"], token)

    # --- reading ----------------------------------------------------------------------------

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        *,
        deadline: Deadline,
        cancel: CancelToken,
    ) -> memoryview:
        name = self._name(version.object_id)
        parts: list[memoryview] = []
        at = start
        while at < stop:
            # Usually once; a server that shortens ranges is asked for the rest.
            ask = partial(self._part, version, name, at, stop, deadline, cancel)
            parts.append(self._attempts(ask, deadline, cancel))
            at += len(parts[-1])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _part(
        self,
        version: ObjectVersion,
        name: StoreName,
        start: int,
        stop: int,
        deadline: Deadline,
        cancel: CancelToken,
    ) -> memoryview:
        store = self._stores.get(version.object_id.bucket, name)
        conditions = self._conditions(version)
        whole = start == 0 and stop == version.size

        async def get(**span: tuple[int, int]) -> memoryview:
            options = cast("GetOptions", {**conditions, **span})
            result = await obstore.get_async(store, name.tail, options=options)
            head = _part_head(result, ranged="range" in span)
            usable = check_part(version, start, stop, head, self.description)
            data = memoryview(await result.bytes_async())
            if len(data) != usable - start:
                raise Transient("short_body", unavailable("a body ended early", self.description))
            return data

        data: memoryview
        try:
            data = self._run(
                lambda: get(range=(start, stop)), "get", version.object_id, deadline, cancel
            )
        except _RangeIgnoredError:
            if not whole:
                raise broken_protocol(
                    "it ignores Range and sends whole objects",
                    self.description,
                    hint="use a server or proxy that supports range requests",
                ) from None
            data = self._run(get, "get", version.object_id, deadline, cancel)
        self._metrics.origin_bytes.labels(self._cache).inc(len(data))
        return data

    def _conditions(self, version: ObjectVersion) -> dict[str, Any]:
        if self._scheme == "gs" and version.origin_token:
            return {"version": version.origin_token}
        return {} if version.weak else {"if_match": version.etag}

    # --- listing ----------------------------------------------------------------------------

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
        if self._scheme in ("http", "https"):
            raise RequestError(
                "bad_request",
                f"{self.description} cannot be listed: HTTP has no listings",
                hint="name the objects, or use an origin that can list",
            )
        if delimiter not in (None, b"/"):
            raise RequestError("bad_request", "the delimiter is '/' or none")
        folder = folder_of(prefix)
        name = store_name(folder) if folder else StoreName("", "")
        if isinstance(name, str) or name.head:
            return iter(())
        entries = self._listed(bucket, name.tail, delimiter is not None, after, deadline)
        return (
            entry
            for entry in entries
            if entry.key.startswith(prefix) and (after is None or entry.key > after)
        )

    def _listed(
        self, bucket: str, folder: str, delimited: bool, after: bytes | None, deadline: Deadline
    ) -> Iterator[ListedObject | ListedPrefix]:
        store = self._stores.get(bucket)
        about = ObjectId(self._cache, bucket, folder.encode() or b"/")
        if delimited:
            found = self._attempts(
                lambda: self._run(
                    lambda: obstore.list_with_delimiter_async(store, folder or None),
                    "list", about, deadline, CancelToken(),
                ),
                deadline, CancelToken(),
            )  # fmt: skip
            both: list[ListedObject | ListedPrefix] = [_listed(m) for m in found["objects"]]
            both += [ListedPrefix(p.encode() + b"/") for p in found["common_prefixes"]]
            yield from sorted(both, key=lambda entry: entry.key)
            return
        offset = after.decode("utf-8", "ignore") if after else None
        stream = obstore.list(store, folder or None, offset=offset)
        while True:

            async def following() -> Any:
                try:
                    return await anext(aiter(stream))
                except StopAsyncIteration:
                    return None

            chunk = self._run(following, "list", about, deadline, CancelToken(), final=True)
            if chunk is None:
                return
            yield from (_listed(meta) for meta in chunk)

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        deadline.check("listing buckets")
        return sorted(self._buckets) if self._buckets is not None else None

    # --- the boundary -----------------------------------------------------------------------

    def _check_bucket(self, bucket: str) -> None:
        if self._buckets is not None and bucket not in self._buckets:
            raise bucket_forbidden(bucket, self._buckets)

    def _name(self, object_id: ObjectId) -> StoreName:
        self._check_bucket(object_id.bucket)
        name = store_name(object_id.key)
        if isinstance(name, str):
            raise not_nameable(object_id, self.description, name)
        if name.head and not self._stores.takes_odd_heads:
            raise not_nameable(
                object_id, self.description, "empty parts of a key cannot be asked for there"
            )
        return name

    def _attempts(self, call: Callable[[], T], deadline: Deadline, cancel: CancelToken) -> T:
        return attempts(
            call,
            retries=self._options.retries,
            deadline=deadline,
            cancel=cancel,
            retried=lambda reason: self._metrics.origin_retries.labels(self._cache, reason).inc(),
        )

    def _run(
        self,
        request: Callable[[], Awaitable[Any]],
        operation: str,
        object_id: ObjectId,
        deadline: Deadline,
        cancel: CancelToken,
        *,
        final: bool = False,
    ) -> Any:
        """Runs one request. Raises declared errors and `Transient` only (`final`: no Transient)."""

        start, result = time.monotonic(), "ok"
        try:
            return self._background.run(
                request, doing=f"asking the {self._scheme} origin", deadline=deadline, cancel=cancel
            )
        except RacerError as error:
            result = error.code
            raise
        except (_HeadRefusedError, Transient) as error:
            result = error.reason if isinstance(error, Transient) else "head_refused"
            raise
        except Exception as error:  # noqa: BLE001  obstore's classes are open-ended
            try:
                self._translate(error, operation, object_id)
            except Transient as failure:
                result = failure.reason
                if final:
                    raise failure.final from None
                raise
            except RacerError as translated:
                result = translated.code
                raise
        finally:
            self._metrics.origin_requests.labels(self._cache, operation, result).inc()
            self._metrics.origin_seconds.labels(self._cache, operation).observe(
                time.monotonic() - start
            )

    def _translate(self, error: Exception, operation: str, object_id: ObjectId) -> NoReturn:
        """Raises what `error` means, without its text."""
        where = self.description
        match = _STATUS.search(str(error))
        status = match.group(1) if match else ""
        if isinstance(error, FileNotFoundError):
            raise not_found(object_id, where) from None
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (
            "401",
            "403",
        ):
            raise forbidden(object_id.text, where) from None
        if isinstance(error, PreconditionError) or status in ("412", "416"):
            raise version_changed(object_id, "asked for", None) from None
        text = str(error)
        if operation == "get" and (
            isinstance(error, NotSupportedError) or "non-partial response" in text
        ):
            raise _RangeIgnoredError from None
        if operation == "head" and status in ("405", "501"):
            raise _HeadRefusedError from None
        if "UnexpectedRange" in text or ("got " in text and "Requested " in text):
            raise broken_protocol("another range than was asked for", where) from None
        if status and status not in _BUSY:
            raise broken_protocol(f"status {status}", where) from None
        reason = _BUSY.get(status) or ("timeout" if "timed out" in text else "connection")
        what = f"status {status}" if status else "the connection failed or stood still"
        raise Transient(reason, unavailable(what, where, hint=_network_hint(text))) from None


class _RangeIgnoredError(SourceError):
    """A 200 came where a range was asked for."""

    def __init__(self) -> None:
        super().__init__("origin_protocol", "the range was ignored")


class _HeadRefusedError(Exception):
    """The server has no HEAD."""


def _network_hint(text: str) -> str:
    if "dns" in text.lower():
        return "its host name cannot be resolved; check the URL and the cluster's DNS"
    if "certificate" in text.lower():
        return "its certificate is not trusted; `ca_bundle` names the CA to trust"
    if "builder error" in text:
        return "plain http needs `allow_http = true`"
    return ""


def _part_head(result: Any, *, ranged: bool) -> PartHead:
    meta = result.meta
    start, stop = result.range
    return PartHead(
        partial=ranged,
        start=start,
        stop=stop,
        size=meta["size"],
        etag=as_etag(meta["e_tag"]),
        last_modified=_http_date(meta["last_modified"]),
    )


def _http_date(moment: datetime) -> str | None:
    """obstore says 1970 where there was no Last-Modified."""
    return format_datetime(moment, usegmt=True) if moment.timestamp() > 0 else None


def _listed(meta: Any) -> ListedObject:
    return ListedObject(meta["path"].encode(), meta["size"], as_etag(meta["e_tag"]))
