"""The server's side of a connection as a state machine."""

from __future__ import annotations

import pytest

from racerd.wire.connection import (
    EXCESS_BYTES_MAX,
    FLOOD,
    TRANSITIONS,
    Dropped,
    Ended,
    LocalProtocolError,
    Refused,
    Request,
    ServerConnection,
    State,
    Step,
)
from racerd.wire.heads import ResponseHead

HEAD = b"HEAD /v1/objects/b/k HTTP/1.1\r\n\r\n"
GET = b"GET /v1/objects/b/k HTTP/1.1\r\n\r\n"
READ = b"POST /v1/host-read/b/k HTTP/1.1\r\n\r\n"
OK = ResponseHead(200, (), 2)


def connection() -> ServerConnection[str]:
    return ServerConnection()


def answer(wire: ServerConnection[str], body_bytes: int = 2) -> tuple[bytes, bool]:
    head = wire.respond(ResponseHead(200, (), 2))
    wire.send_body(body_bytes)
    return head, wire.end_response()


def test_exchanges_follow_one_another() -> None:
    wire = connection()
    for _ in range(3):
        [request] = wire.receive(GET)
        assert isinstance(request, Request) and request.head.target == "/v1/objects/b/k"
        assert answer(wire) == (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", True)
    assert wire.receive_eof() == [Ended("closed")]
    assert wire.receive_eof() == []


def test_a_head_may_come_byte_by_byte() -> None:
    wire = connection()
    events = [wire.receive(READ[i : i + 1], "d" if i == 0 else "") for i in range(len(READ))]
    assert events[:-1] == [[]] * (len(READ) - 1)
    [request] = events[-1]
    assert isinstance(request, Request) and request.descriptors == ("d",)


def test_head_and_the_start_of_a_host_read_in_one_receive() -> None:
    """R5, R6, F67: the HEAD is served without the descriptor, which is dropped, and it is the
    last exchange."""
    wire = connection()
    request, dropped = wire.receive(HEAD + READ[:9], "d")
    assert isinstance(request, Request) and request.descriptors == ()
    assert dropped == Dropped(("d",))
    assert wire.respond(OK).endswith(b"Connection: close\r\n\r\n")
    assert wire.end_response() is False
    assert wire.state is State.CLOSED


def test_what_comes_during_an_exchange_is_dropped() -> None:
    """R6: pipelining, seen only after the request was taken."""
    wire = connection()
    wire.receive(GET)
    assert wire.receive(READ, "ab") == [Dropped(("a", "b"))]
    assert wire.receive(READ) == []
    head, going_on = answer(wire)
    assert b"Connection: close" in head and not going_on


def test_a_peer_that_never_stops_sending_is_cut_off() -> None:
    wire = connection()
    wire.receive(GET)
    assert wire.receive(b"x" * EXCESS_BYTES_MAX) == []
    assert wire.receive(b"x", "d") == [Dropped(("d",)), Ended(FLOOD)]
    assert wire.state is State.CLOSED


def test_no_body_follows_the_answer_to_head() -> None:
    wire = connection()
    wire.receive(HEAD)
    assert b"Content-Length: 2\r\n" in wire.respond(OK)
    assert wire.end_response() is True


def test_the_client_may_ask_for_the_end() -> None:
    wire = connection()
    wire.receive(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    head, going_on = answer(wire)
    assert b"Connection: close" in head and not going_on


def test_a_malformed_head_is_answered_and_ends_the_connection() -> None:
    wire = connection()
    dropped, refused = wire.receive(b"GET\r\n\r\nGET / HTTP", "d")
    assert dropped == Dropped(("d",))
    assert isinstance(refused, Refused) and refused.error.code == "bad_request"
    assert wire.receive(b"more", "e") == [Dropped(("e",))]
    head, going_on = answer(wire)
    assert b"Connection: close" in head and not going_on


def test_too_many_descriptors_end_the_connection() -> None:
    """R5, F69."""
    for tokens, truncated in (("abcde", False), ("a", True)):
        wire = connection()
        dropped, refused = wire.receive(READ, tokens, truncated=truncated)
        assert dropped == Dropped(tuple(tokens))
        assert isinstance(refused, Refused)


def test_descriptors_of_half_a_head_are_dropped_with_it() -> None:
    """R5: the peer goes away in the middle of a head."""
    wire = connection()
    assert wire.receive(READ[:5], "d") == []
    assert wire.receive_eof() == [Dropped(("d",)), Ended("closed in the middle of a head")]


def test_a_slow_head_is_given_up() -> None:
    wire = connection()
    wire.receive(READ[:5], "d")
    dropped, refused = wire.give_up_on_head("too slow")
    assert dropped == Dropped(("d",))
    assert isinstance(refused, Refused) and refused.error.message == "too slow"
    assert wire.receive(READ[5:]) == []
    assert answer(wire)[1] is False


def test_a_peer_that_closes_during_an_exchange_is_noticed() -> None:
    """R7."""
    wire = connection()
    wire.receive(GET)
    assert wire.receive_eof() == [Ended("closed")]
    with pytest.raises(LocalProtocolError):
        wire.respond(OK)


def test_the_driver_cannot_break_the_framing() -> None:
    wire = connection()
    with pytest.raises(LocalProtocolError):
        wire.respond(OK)
    wire.receive(GET)
    with pytest.raises(LocalProtocolError):
        wire.end_response()
    with pytest.raises(LocalProtocolError):
        wire.send_body(1)
    wire.respond(OK)
    with pytest.raises(LocalProtocolError):
        wire.respond(OK)
    with pytest.raises(LocalProtocolError, match="2 are announced"):
        wire.send_body(3)
    wire.send_body(1)
    with pytest.raises(LocalProtocolError, match="1 bytes short"):
        wire.end_response()
    wire.send_body(1)
    assert wire.end_response() is True


def test_an_answer_that_cannot_be_written_leaves_one_owed() -> None:
    wire = connection()
    wire.receive(GET)
    with pytest.raises(ValueError):
        wire.respond(ResponseHead(200, (("ETag", "\r\n"),), 0))
    assert answer(wire)[1] is True


def test_the_table_is_complete() -> None:
    """Every state is in it, can be reached, and can end; every step is used."""
    assert set(TRANSITIONS) == set(State)
    reached = {state for row in TRANSITIONS.values() for state in row.values()}
    assert reached == set(State)
    assert {step for row in TRANSITIONS.values() for step in row} == set(Step)
    for state, row in TRANSITIONS.items():
        assert state is State.CLOSED or row[Step.PEER_CLOSED] is State.CLOSED
