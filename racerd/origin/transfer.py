"""One fetch over our own HTTP client: memory that fills over as many attempts as it takes.

Layer: origin; blocking, on origin threads. Every attempt asks for what is missing, under the same
validator, and what its response says of itself is compared (`parts`): bytes of two versions never
meet in one buffer. The body goes from the socket straight into the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from racerd.ids import ObjectVersion
from racerd.origin.etags import as_etag
from racerd.origin.failures import Transient, broken_protocol, unavailable, version_changed
from racerd.origin.http_client import Pace, Response
from racerd.origin.parts import PartHead, check_part, parse_content_range
from racerd.units import MIB

_RECEIVE_BYTES = 4 * MIB

Ask = Callable[[dict[str, str]], AbstractContextManager[Response]]
"""Sends a GET of the object with these fields; yields the response."""


class Transfer:
    """Bytes [start, start + len(buffer)) of `version`. `offset`: up to where they are there."""

    def __init__(
        self,
        version: ObjectVersion,
        start: int,
        buffer: memoryview,
        *,
        where: str,
        ask: Ask,
        failure: Callable[[Response], Exception],
        bytes_per_second_min: int,
    ) -> None:
        """`where` names the origin in messages; `failure` says what a response means that is no
        success and no other version. A body slower than `bytes_per_second_min` is given up."""
        self._version = version
        self._start = start
        self._stop = start + len(buffer)
        self._where = where
        self._ask = ask
        self._failure = failure
        self._bytes_per_second_min = bytes_per_second_min
        self.offset = start
        self.buffer = buffer

    def attempt(self) -> None:
        """Receives from `offset` on. Raises Transient where that ended before the end."""
        with self._ask(self._fields()) as response:
            head = self._head(response)
            usable = check_part(self._version, self.offset, self._stop, head, self._where)
            self._receive(response, usable)
        if self.offset < self._stop:
            raise Transient("short_range", broken_protocol("it shortens ranges", self._where))

    def _fields(self) -> dict[str, str]:
        fields = {"Range": f"bytes={self.offset}-{self._stop - 1}"}
        if not self._version.weak:
            fields["If-Match"] = self._version.etag
        elif self._version.origin_token is not None:
            fields["If-Unmodified-Since"] = self._version.origin_token
        return fields

    def _head(self, response: Response) -> PartHead:
        etag, modified = as_etag(response.field("ETag")), response.field("Last-Modified")
        if response.status in (412, 416):
            # Nothing past the end is ever asked for: 416 says that the object shrank (F49).
            raise version_changed(self._version.object_id, self._version.etag, etag)
        if response.status == 200 and response.content_length is not None:
            return PartHead(
                False, 0, response.content_length, response.content_length, etag, modified
            )
        if response.status == 206:
            parsed = parse_content_range(response.field("Content-Range"))
            if parsed is not None and response.content_length in (None, parsed[1] - parsed[0]):
                return PartHead(True, *parsed, etag, modified)
        if response.status in (200, 206):
            raise broken_protocol(
                f"status {response.status} with a length that is missing or wrong", self._where
            )
        raise self._failure(response)

    def _receive(self, response: Response, usable: int) -> None:
        pace = Pace(self._bytes_per_second_min)
        while self.offset < usable:
            at = self.offset - self._start
            room = self.buffer[at : min(usable - self._start, at + _RECEIVE_BYTES)]
            count = response.receive_into(room)
            if count == 0:
                raise Transient("short_body", unavailable("the body ended early", self._where))
            self.offset += count
            if not pace.add(count) and self.offset < usable:
                raise Transient("slow", unavailable("it sends too slowly", self._where))
