"""Plain HTTP(S) servers as origins: a bucket is the first path part below the cache's URL.

Layer: origin. Deviation: read through our own client and not through obstore, which hides status,
Content-Range, Content-Encoding and Retry-After, has naming rules of its own, and cannot fill
memory of ours. A plain server cannot list.

A version is the server's ETag. A weak one, or one derived from Last-Modified where `weak_etags`
allows it, is compared with every response together with Last-Modified (F54), and never sent in
If-Match; If-Unmodified-Since is sent instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from racerd.config.origin_options import Secret
from racerd.errors import RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.buffers import fresh_buffer
from racerd.origin.call import Call
from racerd.origin.etags import as_etag, derived_etag
from racerd.origin.failures import broken_protocol
from racerd.origin.http_client import HttpClient, Request, Response, split_url
from racerd.origin.http_redirects import following
from racerd.origin.http_status import NO_HEAD, failure_of
from racerd.origin.names import check_nameable, encoded
from racerd.origin.parts import parse_content_range
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix
from racerd.origin.retries import Retries
from racerd.origin.transfer import Transfer
from racerd.runtime.deadline import Deadline


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How a server is read. `weak_etags` lets objects without any ETag be read."""

    bearer_token: Secret | None = None
    weak_etags: bool = False
    progress_bytes_per_second_min: int = 0


class HttpOrigin:
    """Implements `Origin` for http:// and https://. Owns `client`."""

    def __init__(
        self, base_url: str, client: HttpClient, retries: Retries, settings: HttpSettings
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._client = client
        self._retries = retries
        self.settings = settings

    @property
    def description(self) -> str:
        return self._base_url

    def close(self) -> None:
        self._client.close()

    # --- versions ---------------------------------------------------------------------------

    def head(self, object_id: ObjectId, *, deadline: Deadline) -> ObjectVersion:
        """Asks by HEAD, or by a GET of one byte where the answer to HEAD will not do."""
        call = Call(deadline, CancelToken(), "asking for the version")
        version = self._retries.run(lambda: self._head(object_id, call), call)
        return version or self._retries.run(lambda: self._probe(object_id, call), call)

    def _head(self, object_id: ObjectId, call: Call) -> ObjectVersion | None:
        with self.ask("HEAD", object_id, {}, call) as response:
            if response.status in NO_HEAD:
                return None
            if response.status != 200:
                raise self.failure(response, object_id)
            if response.content_length is None or _is_encoded(response):
                # The length of a body that is compressed on the way says nothing (F61).
                return None
            return self._version(object_id, response, response.content_length)

    def _probe(self, object_id: ObjectId, call: Call) -> ObjectVersion:
        with self.ask("GET", object_id, {"Range": "bytes=0-0"}, call) as response:
            content_range = (response.field("Content-Range") or "").strip()
            if response.status == 416 and content_range == "bytes */0":
                return self._version(object_id, response, 0)
            if response.status not in (200, 206):
                raise self.failure(response, object_id)
            size = None
            if response.status == 206:
                parsed = parse_content_range(content_range)
                size = parsed[2] if parsed is not None else None
            elif not _is_encoded(response):
                size = response.content_length
            if size is None:
                raise broken_protocol(
                    f"it does not tell the size of {object_id.text}",
                    self.description,
                    hint="serve objects with Content-Length, and not compressed on the way",
                )
            return self._version(object_id, response, size)

    def _version(self, object_id: ObjectId, response: Response, size: int) -> ObjectVersion:
        modified = response.field("Last-Modified")
        etag = as_etag(response.field("ETag"))
        if etag is None and self.settings.weak_etags:
            etag = derived_etag(modified, size)
        if etag is None:
            raise broken_protocol(
                f"it sends no usable ETag for {object_id.text}, so versions cannot be told apart",
                self.description,
                hint="let the server send ETags, or set the cache's `weak_etags` to go by size and"
                " Last-Modified (changes within one second go unseen)",
            )
        return ObjectVersion(object_id, etag, size, modified if etag.startswith("W/") else None)

    # --- bytes ------------------------------------------------------------------------------

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
        call = Call(deadline, cancel, "fetching")
        buffer = fresh_buffer(stop - start) if room is None else room[: stop - start]
        object_id = version.object_id
        transfer = Transfer(
            version,
            start,
            buffer,
            where=self.description,
            ask=lambda fields: self.ask("GET", object_id, fields, call),
            failure=lambda response: self.failure(response, object_id),
            bytes_per_second_min=self.settings.progress_bytes_per_second_min,
        )
        self._retries.run(transfer.attempt, call, lambda: transfer.offset)
        return transfer.buffer

    def ask(
        self, method: str, object_id: ObjectId, fields: dict[str, str], call: Call
    ) -> AbstractContextManager[Response]:
        """An exchange about an object: a context manager of the response."""
        check_nameable(object_id, self.description)
        bucket = encoded(object_id.bucket.encode())
        address, target = split_url(f"{self._base_url}/{bucket}/{encoded(object_id.key)}")
        fields = {"Accept-Encoding": "identity", "User-Agent": "racerd", **fields}
        if self.settings.bearer_token is not None:
            fields["Authorization"] = f"Bearer {self.settings.bearer_token.reveal()}"
        request = Request(method, address, target, fields)
        return following(self._client, request, call, self.description)

    def failure(self, response: Response, object_id: ObjectId) -> Exception:
        """What a response means that is no success."""
        after = response.field("Retry-After")
        return failure_of(response.status, after, object_id.text, self.description)

    # --- listings ---------------------------------------------------------------------------

    def list_objects(
        self,
        bucket: str,
        prefix: bytes,
        *,
        delimiter: bytes | None,
        after: bytes | None,
        deadline: Deadline,
    ) -> Iterator[ListedObject | ListedPrefix]:
        raise RequestError(
            "not_found",
            f"{self.description} is a plain HTTP server and cannot list",
            hint="name objects in full, or use an s3://, gs://, az:// or file:// origin",
        )

    def list_buckets(self, *, deadline: Deadline) -> list[str] | None:
        return None


def _is_encoded(response: Response) -> bool:
    return (response.field("Content-Encoding") or "identity").strip().lower() != "identity"
