"""Ranges over the socket: for what is small, and for what the daemon cannot write by itself.

Layer: on `endpoint`. One range is one exchange, so a lost connection repeats the range and nothing
else; a body that ends early is never returned.
"""

from __future__ import annotations

from racer import answers, requests
from racer.connection import Connection
from racer.deadline import Deadline
from racer.endpoint import Endpoint
from racer.refusals import error_of
from racer.results import Body
from racer.urls import RacerUrl


def get(
    endpoint: Endpoint, url: RacerUrl, start: int, stop: int, etag: str | None, seconds: float
) -> tuple[Body, bytes]:
    """Returns `[start, stop)`, cut at the object's end, and what its head says."""
    deadline = Deadline.after(seconds)

    def exchange(connection: Connection) -> tuple[Body, bytes]:
        answer = connection.exchange(requests.body_request(url, start, stop, etag), deadline)
        if answer.head.status >= 400:
            raise error_of(answer.head, answer.body, about=str(url))
        return answers.read_body_head(answer.head, start, stop, etag), answer.body

    return endpoint.attempt(exchange, deadline)


def get_into(
    endpoint: Endpoint,
    url: RacerUrl,
    start: int,
    view: memoryview,
    etag: str | None,
    seconds: float,
) -> Body:
    """Fills the front of `view` with the object's bytes from `start` on: all of it, unless the
    object ends. On an error it holds nothing to rely on."""
    deadline = Deadline.after(seconds)
    stop = start + len(view)

    def exchange(connection: Connection) -> Body:
        connection.send(requests.body_request(url, start, stop, etag), deadline)
        head = connection.receive_head(deadline)
        if head.status >= 400:
            body = connection.receive_body(deadline)
            raise error_of(head, body, about=str(url))
        try:
            served = answers.read_body_head(head, start, stop, etag)
        except BaseException:
            connection.close()  # What follows cannot be told from anything else.
            raise
        with view[: served.stop - start] as wanted:
            connection.receive_body_into(wanted, deadline)
        return served

    return endpoint.attempt(exchange, deadline)
