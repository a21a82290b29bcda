"""Responses as values, and what becomes of an error.

Layer: serve, pure but for the stream that a response may carry.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from racerd.errors import RacerError
from racerd.wire.errors import CLOSING_CODES, STATUS_OF_CODE, error_body, error_fields
from racerd.wire.heads import ResponseHead

_JSON = ("Content-Type", "application/json")
_BINARY = ("Content-Type", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Body:
    """Plaintext that is sent while it is read. `first` is at hand: reading has begun well.

    Whoever holds the response closes `rest`.
    """

    first: memoryview
    rest: AsyncGenerator[memoryview, None]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. `payload` counts the object's bytes that it hands over, by whatever way.

    `descriptors` go with the first byte. They belong to whoever holds the response, who closes them
    (`let_go`) once the response was sent, or will never be.
    """

    head: ResponseHead
    body: bytes | Body = b""
    close: bool = False
    payload: int = 0
    descriptors: tuple[int, ...] = ()

    def let_go(self) -> None:
        """Closes the descriptors. Once."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def json_response(
    value: Any,
    *,
    status: int = 200,
    fields: tuple[tuple[str, str], ...] = (),
    payload: int = 0,
    descriptors: tuple[int, ...] = (),
) -> Response:
    body = json.dumps(value, separators=(",", ":")).encode()
    head = ResponseHead(status, (*fields, _JSON), len(body))
    return Response(head, body, payload=payload, descriptors=descriptors)


def head_response(fields: tuple[tuple[str, str], ...], size: int) -> Response:
    """The answer to a HEAD: `size` is the length of the body that is not sent."""
    return Response(ResponseHead(200, (*fields, _BINARY), size))


def body_response(
    status: int, fields: tuple[tuple[str, str], ...], length: int, body: Body | None
) -> Response:
    head = ResponseHead(status, (*fields, _BINARY), length)
    return Response(head, b"" if body is None else body, payload=length)


def error_response(error: RacerError, *, head_only: bool) -> Response:
    """The answer that tells of `error`, whose code is one of the protocol's."""
    body = b"" if head_only else error_body(error)
    fields = error_fields(error)
    if not head_only:
        fields.append(_JSON)
    head = ResponseHead(STATUS_OF_CODE[error.code], tuple(fields), len(body))
    return Response(head, body, close=error.code in CLOSING_CODES)
