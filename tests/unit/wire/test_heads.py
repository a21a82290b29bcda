"""Request heads: what is taken, what is refused and why; response heads."""

from __future__ import annotations

import pytest

from racerd.errors import ProtocolError
from racerd.wire.heads import (
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    RequestHead,
    ResponseHead,
    head_length,
    parse_request_head,
)


def parse(text: str) -> RequestHead:
    data = text.encode("latin-1")
    assert head_length(data) == len(data)
    return parse_request_head(data)


def refusal(data: str | bytes) -> ProtocolError:
    raw = data.encode("latin-1") if isinstance(data, str) else data
    try:
        length = head_length(raw)
        assert length is not None, "the head is incomplete, not refused"
        parse_request_head(raw[:length])
    except ProtocolError as error:
        return error
    raise AssertionError("the head is not refused")


def test_a_head_is_taken_apart() -> None:
    head = parse(
        "POST /v1/host-read/b/k%20?x=y HTTP/1.1\r\nHost: racer\r\nRANGE:bytes=0-9  \r\n"
        'If-Match:   "a b"\r\nX-Unknown: \xff\r\nX-Unknown: twice\r\n\r\n'
    )
    assert (head.method, head.target) == ("POST", "/v1/host-read/b/k%20?x=y")
    assert head.fields == {"host": "racer", "range": "bytes=0-9", "if-match": '"a b"'}
    assert not head.wants_close


@pytest.mark.parametrize("value", ["close", "Close", "keep-alive, close", "x,CLOSE "])
def test_a_client_may_ask_for_the_connection_to_end(value: str) -> None:
    assert parse(f"GET /v1/info HTTP/1.1\r\nConnection: {value}\r\n\r\n").wants_close


def test_an_empty_field_is_a_field() -> None:
    assert parse("GET / HTTP/1.1\r\nRange:\r\n\r\n").fields == {"range": ""}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("GET /\r\n\r\n", "not method, target and version"),
        ("GET  / HTTP/1.1\r\n\r\n", "not method, target and version"),
        ("GET /a b HTTP/1.1\r\n\r\n", "not method, target and version"),
        ("GET / HTTP/1.0\r\n\r\n", "not HTTP/1.1"),
        ("GET / HTTP/2.0\r\n\r\n", "not HTTP/1.1"),
        ("GET / http/1.1\r\n\r\n", "not HTTP/1.1"),
        ("get / HTTP/1.1\r\n\r\n", "not a method"),
        ("GET v1/info HTTP/1.1\r\n\r\n", "does not start with a slash"),
        ("GET http://h/v1/info HTTP/1.1\r\n\r\n", "does not start with a slash"),
        ("GET /v1/#x HTTP/1.1\r\n\r\n", "'#'"),
        ("GET /\xe9 HTTP/1.1\r\n\r\n", "not ASCII"),
        ("\r\nGET / HTTP/1.1\r\n\r\n", "empty line"),
        ("GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", "folded"),
        ("GET / HTTP/1.1\r\nA : b\r\n\r\n", "space stands before the colon"),
        ("GET / HTTP/1.1\r\nA b\r\n\r\n", "no colon"),
        ("GET / HTTP/1.1\r\n: b\r\n\r\n", "not a field name"),
        ("GET / HTTP/1.1\r\nA(b: c\r\n\r\n", "not a field name"),
        ("GET / HTTP/1.1\nHost: x\r\n\r\n", "CR or LF stands alone"),
        ("GET / HTTP/1.1\rHost: x\r\n\r\n", "CR or LF stands alone"),
        ("GET / HTTP/1.1\r\nA: b\x00\r\n\r\n", "0x00"),
        ("GET / HTTP/1.1\r\nA:\tb\r\n\r\n", "0x09"),
        ("GET / HTTP/1.1\r\nA: \x7f\r\n\r\n", "0x7f"),
        ("GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\n", "no body"),
        ("GET / HTTP/1.1\r\nContent-Length: 00\r\n\r\n", "no body"),
        ("GET / HTTP/1.1\r\nContent-Length: +0\r\n\r\n", "no body"),
        ("GET / HTTP/1.1\r\nContent-Length: 0, 0\r\n\r\n", "no body"),
        ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "transfer-encoding"),
        ("GET / HTTP/1.1\r\nUpgrade: h2c\r\n\r\n", "upgrade"),
        ("GET / HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", "expect"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: str, words: str) -> None:
    """R6: nobody can disagree about where a request ends."""
    error = refusal(data)
    assert error.code == "bad_request"
    assert words in error.message
    assert error.hint


@pytest.mark.parametrize(
    "name",
    [
        "Host", "Content-Length", "Connection", "Transfer-Encoding", "Range", "If-Match",
        "Racer-Deadline-Ms", "Racer-Target", "Racer-Target-Offset", "Racer-Target-Kind",
    ],
)  # fmt: skip
def test_a_known_field_occurs_once(name: str) -> None:
    error = refusal(f"GET / HTTP/1.1\r\n{name}: 0\r\n{name.upper()}: 0\r\n\r\n")
    assert "twice" in error.message


def test_a_head_may_be_as_long_as_the_limit_and_no_longer() -> None:
    start = "GET / HTTP/1.1\r\nX: "
    longest = start + "x" * (HEAD_BYTES_MAX - len(start) - 4) + "\r\n\r\n"
    assert parse(longest).fields == {}
    assert refusal(longest.replace("X: ", "X: y")).code == "head_too_large"


def test_a_head_that_never_ends_is_refused_at_the_limit() -> None:
    endless = b"GET / HTTP/1.1\r\nX: ".ljust(HEAD_BYTES_MAX - 1, b"x")
    assert head_length(endless) is None
    assert refusal(endless + b"x").code == "head_too_large"


def test_too_many_fields_are_refused() -> None:
    assert parse("GET / HTTP/1.1\r\n" + "X: y\r\n" * FIELDS_MAX + "\r\n").fields == {}
    error = refusal("GET / HTTP/1.1\r\n" + "X: y\r\n" * (FIELDS_MAX + 1) + "\r\n")
    assert error.code == "head_too_large"


def test_what_can_never_become_a_head_is_refused_before_it_ends() -> None:
    with pytest.raises(ProtocolError, match="CR or LF stands alone"):
        head_length(b"GET / HTTP/1.1\n")


def test_a_line_end_may_come_in_two_pieces() -> None:
    assert head_length(b"GET / HTTP/1.1\r") is None
    assert head_length(b"GET / HTTP/1.1\r\n", searched=15) is None
    assert head_length(b"GET / HTTP/1.1\r\n\r", searched=16) is None
    assert head_length(b"GET / HTTP/1.1\r\n\r\n", searched=17) == 18
    with pytest.raises(ProtocolError, match="stands alone"):
        head_length(b"GET / HTTP/1.1\rX", searched=15)


def test_a_response_head_is_serialised() -> None:
    head = ResponseHead(416, (("Content-Range", "bytes */5"), ("ETag", '"\xe9"')), 7)
    assert head.serialise(close=False) == (
        b"HTTP/1.1 416 Requested Range Not Satisfiable\r\nContent-Range: bytes */5\r\n"
        b'ETag: "\xe9"\r\nContent-Length: 7\r\n\r\n'
    )
    assert head.serialise(close=True).endswith(b"\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\n", "\r", "\N{SNOWMAN}"])
def test_a_response_field_cannot_break_the_framing(value: str) -> None:
    with pytest.raises(ValueError):
        ResponseHead(200, (("ETag", value),), 0).serialise(close=False)
