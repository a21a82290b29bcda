"""The exchanges that ask for shared memory.

Layer: on `endpoint`; what becomes of the answer is shared with `racer.aio`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.errors import ProtocolError
from racer.exchange import Answer
from racer.refusals import error_of
from racer.results import SharedPart
from racer.shared import SharedChunk, SharedPieces
from racer.urls import RacerUrl

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE


def share(
    endpoint: Endpoint, url: RacerUrl, at: int, etag: str | None, deadline: Deadline
) -> SharedChunk:
    """Returns the shared memory that holds byte `at`; tried again as reads are."""

    def exchange(connection: Connection) -> SharedChunk:
        connection.send(requests.share_request(url, at, etag), deadline)
        answer, descriptors = connection.receive_with_descriptors(deadline)
        return taken_over(answer, descriptors, url, at, etag)

    return endpoint.attempt(exchange, deadline)


def shared(
    endpoint: Endpoint, url: RacerUrl, start: int, etag: str | None, deadline: Deadline
) -> SharedPieces:
    """Returns what is shared already from `start` on; tried again as reads are."""

    def exchange(connection: Connection) -> SharedPieces:
        connection.send(requests.shared_request(url, start, etag), deadline)
        answer, descriptors = connection.receive_with_descriptors(deadline)
        return all_taken_over(answer, descriptors, url, etag)

    return endpoint.attempt(exchange, deadline)


def taken_over(
    answer: Answer, descriptors: list[int], url: RacerUrl, at: int, etag: str | None
) -> SharedChunk:
    """What an answer and its descriptor are, or why it is nothing that can be used.

    Takes the descriptors over, and closes them where this raises.
    """
    head, body = answer
    with _closed_on_error(descriptors):
        if head.status >= 400:
            raise error_of(head, body, about=str(url))
        part = answers.read_shared(head, body, at, etag)
        (chunk,) = _chunks([part], descriptors)
    return chunk


def all_taken_over(
    answer: Answer, descriptors: list[int], url: RacerUrl, etag: str | None
) -> SharedPieces:
    """As `taken_over`, for an answer about all that is shared."""
    head, body = answer
    with _closed_on_error(descriptors):
        if head.status >= 400:
            raise error_of(head, body, about=str(url))
        found = answers.read_shared_parts(head, body, etag)
        chunks = _chunks(found.parts, descriptors)
    return SharedPieces(found.size, found.etag, chunks, found.share_chunk_bytes)


@contextmanager
def _closed_on_error(descriptors: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _chunks(parts: Sequence[SharedPart], descriptors: list[int]) -> list[SharedChunk]:
    """Checks all before the first takes its descriptor over."""
    if len(parts) != len(descriptors):
        raise ProtocolError(
            f"{len(parts)} pieces of shared memory were promised, and {len(descriptors)}"
            " descriptors came"
        )
    for part, descriptor in zip(parts, descriptors, strict=True):
        _check_memory(descriptor, part.stop - part.start)
    return [
        SharedChunk(descriptor, part) for part, descriptor in zip(parts, descriptors, strict=True)
    ]


def _check_memory(descriptor: int, length: int) -> None:
    """Memory that could shrink would end the process that reads it, and memory that could be
    written to would change under it: the kernel's word is taken for both, not the daemon's."""
    if os.fstat(descriptor).st_size < length:
        raise ProtocolError(f"less memory is shared than the {length:,} bytes that were promised")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("what came is no memory that can be sealed") from error
    if seals & _SEALS != _SEALS:
        raise ProtocolError("the shared memory is not sealed against shrinking and writing")
