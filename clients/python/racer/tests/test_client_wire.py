"""Heads as they are written and read, and the values in them."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import racer
from racer import answers, requests
from racer.exchange import Exchange, State
from racer.refusals import error_of
from racer.urls import RacerUrl
from racer.wire import HEAD_BYTES_MAX, HeadReader, Request, is_etag

GOOD = b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 5\r\n\r\nhello'


def read_head(data: bytes, *, to_head: bool = False) -> tuple[int, dict[str, str], bytes]:
    reader = HeadReader(to_head=to_head)
    head = reader.feed(data)
    assert head is not None
    return head.status, head.fields, reader.rest


@given(st.lists(st.integers(0, len(GOOD)), max_size=8))
def test_a_head_means_the_same_however_it_is_split(cuts: list[int]) -> None:
    """The same bytes, whole or split, give the same head and the same start of the body."""
    edges = sorted({0, len(GOOD), *cuts})
    reader = HeadReader()
    got, body = None, b""
    for start, stop in pairwise(edges):
        if got is None:
            got = reader.feed(GOOD[start:stop])
            body = reader.rest
        else:
            body += GOOD[start:stop]
    assert got is not None
    assert (got.status, got.fields, body) == read_head(GOOD)


@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_head_or_in_the_declared_error(data: bytes) -> None:
    with contextlib.suppress(racer.ProtocolError):
        HeadReader().feed(b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: none\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nmore",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 65 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * HEAD_BYTES_MAX,
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    ],
)
def test_heads_that_are_refused(head: bytes) -> None:
    with pytest.raises(racer.ProtocolError):
        HeadReader().feed(head)


def test_an_answer_to_head_has_no_body() -> None:
    head = HeadReader(to_head=True).feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert head is not None
    assert head.content_length == 0


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "a\0b", "\x7f"])
def test_values_cannot_break_out_of_their_line(value: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        Request("GET", "/", (("If-Match", value),)).encode()


@pytest.mark.parametrize("etag", ['""', '"a"', 'W/"a b'[:-2] + '"', '"ü"'])
def test_etags(etag: str) -> None:
    assert is_etag(etag)


@pytest.mark.parametrize("etag", ["", "a", '"', '"a', "*", '"a", "b"', 'w/"a"', '"a\r\n"', '"a b"'])
def test_what_is_no_etag_is_not_sent(etag: str) -> None:
    with pytest.raises(racer.BadRequest, match="not an ETag"):
        requests.stat_request(RacerUrl("local", "b", b"k"), etag)


def test_an_exchange_goes_through_its_states() -> None:
    exchange = Exchange("/socket")
    head = exchange.start(Request("GET", "/v1/info"), 1000)
    assert bytes(head) == b"GET /v1/info HTTP/1.1\r\nHost: racer\r\nRacer-Deadline-Ms: 1000\r\n\r\n"
    assert exchange.feed(GOOD[:20]) is None
    assert exchange.feed(GOOD[20:-2]) is not None
    assert exchange.state is State.BODY
    assert exchange.whole_body() is None
    body = memoryview(bytearray(5))
    assert exchange.start_body(body) == 3
    exchange.finish()
    assert exchange.state is State.IDLE
    exchange.start(Request("GET", "/"), 1)
    exchange.feed(GOOD.replace(b"ETag", b"Connection: close\r\nETag"))
    assert exchange.whole_body() == b"hello"
    exchange.finish()
    assert exchange.state is State.CLOSING
    with pytest.raises(AssertionError):
        exchange.start(Request("GET", "/"), 1)


@pytest.mark.parametrize("fed", [b"", GOOD[:5]])
def test_an_end_in_the_head_is_a_lost_connection(fed: bytes) -> None:
    exchange = Exchange("/socket")
    exchange.start(Request("GET", "/"), 1)
    if fed:
        exchange.feed(fed)
    with pytest.raises(racer.ConnectionLost, match="/socket ended"):
        exchange.feed(b"")


def test_a_body_that_is_kept_whole_is_bounded() -> None:
    exchange = Exchange("/socket")
    exchange.start(Request("GET", "/"), 1)
    exchange.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")
    with pytest.raises(racer.ProtocolError, match="a body of 999,999,999,999"):
        exchange.whole_body()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
INFO = {
    "protocol": 1,
    "version": "1",
    "cache": "local",
    "origin": "file:",
    "page_bytes": 1,
    "frame_bytes": 1,
    "gpu": "off",
    "state": "ready",
}
LISTING = {"objects": [{"key": "a", "size": 1, "etag": None}], "prefixes": ["b/"], "next": None}
EXPLAINED = {
    "etag": '"a"',
    "size": 1,
    "pages": [{"index": 0, "rung": "disk", "why": {}, "last": {"rung": "disk", "age_seconds": 1}}],
}


@given(st.sampled_from(["info", "listing", "explain"]), st.data())
def test_json_of_wrong_types_is_a_protocol_error(kind: str, data: st.DataObject) -> None:
    """No field is believed to have a type that it does not have."""
    good: dict[str, object] = {"info": INFO, "listing": LISTING, "explain": EXPLAINED}[kind]
    name = data.draw(st.sampled_from(sorted(good)))
    body = json.dumps(good | {name: data.draw(JSON)}).encode()
    url = RacerUrl("local", "b")
    read = {
        "info": lambda: answers.read_info(body),
        "listing": lambda: answers.read_listing(url, body),
        "explain": lambda: answers.read_explanation(url, body),
    }[kind]
    with contextlib.suppress(racer.ProtocolError):
        read()


@given(st.binary(max_size=60))
def test_bodies_that_are_not_json(body: bytes) -> None:
    with contextlib.suppress(racer.ProtocolError):
        answers.read_evicted(body)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"error": 1}', b'{"error": {"code": 1, "retry": []}}', b"nginx says no"],
)
def test_a_refusal_that_is_told_badly_is_one_all_the_same(body: bytes) -> None:
    head = HeadReader().feed(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100000\r\n\r\n")
    assert head is not None
    error = error_of(head, body, about="this")
    assert isinstance(error, racer.Overloaded) and error.code == "overloaded"


@pytest.mark.parametrize("seconds", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
def test_an_age_that_no_clock_tells_is_a_protocol_error(seconds: str) -> None:
    last = f'{{"rung": "disk", "age_seconds": {seconds}}}'
    page = f'{{"index": 0, "rung": "disk", "why": {{}}, "last": {last}}}'
    body = f'{{"etag": "a", "size": 1, "pages": [{page}]}}'.encode()
    with pytest.raises(racer.ProtocolError, match="age_seconds"):
        answers.read_explanation(RacerUrl("local", "b"), body)


def test_a_listing_of_keys_elsewhere_is_refused() -> None:
    url = RacerUrl("local", "b", b"models/")
    for key in ("other/a", "%zz", "../models/"):
        body = json.dumps({"objects": [], "prefixes": [key], "next": None}).encode()
        with pytest.raises(racer.ProtocolError):
            answers.read_listing(url, body)
