"""Bodies of S3 objects over plain http, through signed URLs, straight into memory of ours.

Layer: origin; blocking, on origin threads. obstore hands a body over in memory of its own: it
copies it once more on the way, and so do we. Where nothing has to be decrypted, that is half of
what a fetch costs. So there obstore only signs the URL, with whatever identity it has, and the body
is received by our own client (as listings are, see `s3_listing`).

This is a faster way and nothing else. Whatever a server answers that is neither the part nor a
reason of the part's own (another version, "later") is left to obstore: it asks again, and its
answer counts. A server that refuses signed URLs and answers obstore is not asked this way again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import obstore

from racerd.ids import ObjectVersion
from racerd.origin.buffers import fresh_buffer
from racerd.origin.call import Call
from racerd.origin.http_client import HttpClient, Request, Response, split_url
from racerd.origin.http_status import transient_status
from racerd.origin.obstore_requests import Requests
from racerd.origin.retries import Retries
from racerd.origin.stores import Stores
from racerd.origin.transfer import Transfer
from racerd.units import KIB

_BYTES_MIN = 256 * KIB  # For less it would not pay to sign a URL.
_SIGNED_FOR = timedelta(minutes=5)
_NOT_THERE = (404, 410)


class _Refused(Exception):
    """The server has another opinion of this request: `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class SignedBodies:
    """Of one origin. Owns `client`; stores and requests belong to the origin. Thread-safe."""

    def __init__(
        self,
        client: HttpClient,
        stores: Stores,
        requests: Requests,
        retries: Retries,
        *,
        bytes_per_second_min: int,
        on_given_up: Callable[[int], None],
    ) -> None:
        """`on_given_up` is told, once, the status that signed URLs were refused with."""
        self._client = client
        self._stores = stores
        self._requests = requests
        self._retries = retries
        self._bytes_per_second_min = bytes_per_second_min
        self._on_given_up = on_given_up
        self._given_up = False

    def close(self) -> None:
        self._client.close()

    def fetch(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        call: Call,
        *,
        room: memoryview | None,
        otherwise: Callable[[], memoryview],
    ) -> memoryview:
        """As `Origin.fetch`. `otherwise` is how obstore gets the part, and raises if it cannot."""
        if self._given_up or stop - start < _BYTES_MIN:
            return otherwise()
        buffer = fresh_buffer(stop - start) if room is None else room[: stop - start]
        transfer = Transfer(
            version,
            start,
            buffer,
            where=self._requests.where,
            ask=lambda fields: self._asked(version, fields, call),
            failure=self._failure,
            bytes_per_second_min=self._bytes_per_second_min,
        )
        try:
            self._retries.run(transfer.attempt, call, lambda: transfer.offset)
        except _Refused as refused:
            data = otherwise()
            if refused.status not in _NOT_THERE:  # It was gone for a moment: nobody's opinion.
                self._give_up(refused.status)
            return data
        return buffer

    @contextmanager
    def _asked(
        self, version: ObjectVersion, fields: dict[str, str], call: Call
    ) -> Iterator[Response]:
        """One GET under a URL that is signed anew for each attempt (F62)."""
        at = self._stores.locate(version.object_id)
        url: str = self._requests.run(
            lambda: obstore.sign_async(at.store, "GET", at.path, _SIGNED_FOR),
            version.object_id,
            call,
        )
        address, target = split_url(url.partition("#")[0])
        fields = {"Accept-Encoding": "identity", "User-Agent": "racerd", **fields}
        with self._client.exchange(Request("GET", address, target, fields), call) as response:
            yield response

    def _failure(self, response: Response) -> Exception:
        again = transient_status(
            response.status, response.field("Retry-After"), self._requests.where
        )
        return again or _Refused(response.status)

    def _give_up(self, status: int) -> None:
        if not self._given_up:
            self._given_up = True
            self._on_given_up(status)
