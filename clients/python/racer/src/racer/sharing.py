"""One exchange that asks for shared memory.

Layer: on `endpoint`; what becomes of the answer is shared with `racer.aio`.
"""

from __future__ import annotations

import fcntl
import os

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.errors import ProtocolError
from racer.exchange import Answer
from racer.refusals import error_of
from racer.shared import SharedChunk
from racer.urls import RacerUrl

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE


def share(
    endpoint: Endpoint, url: RacerUrl, at: int, etag: str | None, deadline: Deadline
) -> SharedChunk:
    """Returns the shared memory that holds byte `at`; tried again as reads are."""

    def exchange(connection: Connection) -> SharedChunk:
        connection.send(requests.share_request(url, at, etag), deadline)
        answer, descriptor = connection.receive_with_descriptor(deadline)
        return taken_over(answer, descriptor, url, at, etag)

    return endpoint.attempt(exchange, deadline)


def taken_over(
    answer: Answer, descriptor: int | None, url: RacerUrl, at: int, etag: str | None
) -> SharedChunk:
    """What an answer and its descriptor are, or why it is nothing that can be used.

    Takes the descriptor over, and closes it where this raises.
    """
    head, body = answer
    try:
        if head.status >= 400:
            raise error_of(head, body, about=str(url))
        part = answers.read_shared(head, body, at, etag)
        if descriptor is None:
            raise ProtocolError("shared memory was promised, and no descriptor came")
        _check_memory(descriptor, part.stop - part.start)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return SharedChunk(descriptor, part)


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
