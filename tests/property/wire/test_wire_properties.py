"""The wire by properties: splits change nothing, descriptors leave once, errors are declared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from racerd.errors import RacerError
from racerd.wire.connection import Dropped, Event, Refused, Request, ServerConnection, State
from racerd.wire.errors import STATUS_OF_CODE, error_body, error_fields
from racerd.wire.heads import HEAD_BYTES_MAX, RequestHead, ResponseHead
from racerd.wire.messages import deadline_seconds, parse_message
from racerd.wire.names import percent_decode, percent_encode, split_bucket
from racerd.wire.ranges import RangeNotSatisfiable, content_range, parse_range
from tests.support.kernel_stream import KernelStream

METHODS = st.sampled_from(["GET", "HEAD", "POST", "DELETE", "get", "G\x00T", ""])
LINES = st.sampled_from(
    [
        "Host: racer", "Range: bytes=0-9", "range: bytes=-5", 'If-Match: "x"', "Connection: close",
        "Content-Length: 0", "Content-Length: 7", "Transfer-Encoding: chunked", "X: \xff", "X:", "",
        "X : y", " folded", "no colon", "Racer-Target-Offset: 12", "Racer-Deadline-Ms: 0",
        "a\tb: c", "A: " + "x" * 20_000,
    ]
)  # fmt: skip
TARGETS = st.sampled_from(
    [
        "/v1/info", "/v1/objects/b/k", "/v1/objects/b/%zz", "/v1/list/b/?limit=3", "/v1/targets",
        "/v1/targets/" + "0" * 32, "/v1/host-read/b/k", "/v1/evict/b/?prefix=true", "nothing", "/#",
        "/v1/objects/b/" + "%20" * 400, "/v1/explain/%FF/k",
    ]
)  # fmt: skip


@st.composite
def head_like(draw: st.DrawFn) -> bytes:
    """Something between a good head and noise."""
    version = draw(st.sampled_from(["HTTP/1.1"] * 8 + ["HTTP/1.0", "x"]))
    end = draw(st.sampled_from(["\r\n"] * 8 + ["\n", "\r"]))
    lines = draw(st.lists(LINES, max_size=6))
    text = end.join([f"{draw(METHODS)} {draw(TARGETS)} {version}", *lines, "", ""])
    return text.encode("latin-1") + draw(st.sampled_from([b"", b"", b"", b"GET", b"\xff"]))


def good_head(draw: st.DrawFn) -> bytes:
    lines = ["GET /v1/objects/b/k HTTP/1.1", *["X: y"] * draw(st.integers(0, 3)), "", ""]
    return "\r\n".join(lines).encode()


def outline(events: Sequence[Event[int]]) -> list[object]:
    """What is left of events when the time at which things are dropped does not matter."""
    shown: list[object] = []
    for event in events:
        if isinstance(event, Refused):
            shown.append((event.error.code, event.error.message))
        elif not isinstance(event, Dropped):
            shown.append(event)
    return shown


def answer_all(wire: ServerConnection[int], events: Sequence[Event[int]]) -> None:
    """Answers what is owed, so that the next head may come."""
    if any(isinstance(event, Request | Refused) for event in events):
        wire.respond(ResponseHead(204, (), 0))
        wire.end_response()


@given(data=head_like(), cuts=st.lists(st.integers(1, 40_000), max_size=12))
def test_whole_or_split_the_events_are_the_same(data: bytes, cuts: list[int]) -> None:
    """R5, R6: how the kernel cuts a stream has no meaning."""
    whole: ServerConnection[int] = ServerConnection()
    expected = whole.receive(data)
    split: ServerConnection[int] = ServerConnection()
    events: list[Event[int]] = []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, stop in itertools.pairwise(edges):
        events += split.receive(data[start:stop])
    assert outline(events) == outline(expected)
    assert split.state is whole.state
    if whole.state is State.BUSY:
        # What remained behind the head is known by the time of the answer.
        assert split.close_after_response == whole.close_after_response


@given(st.data())
def test_each_request_gets_its_own_descriptors(data: st.DataObject) -> None:
    """R5, F67: a client that waits for answers, heads sent in any pieces, received in any sizes."""
    stream, wire = KernelStream(), ServerConnection[int]()
    tokens = itertools.count()
    for _ in range(data.draw(st.integers(1, 4))):
        head = data.draw(st.composite(good_head)())
        own = [next(tokens) for _ in range(data.draw(st.integers(0, 4)))]
        cut = data.draw(st.integers(1, len(head)))
        stream.send(head[:cut], own)
        stream.send(head[cut:])
        events: list[Event[int]] = []
        for received, came in stream.drain(iter(lambda: data.draw(st.integers(1, 80)), None)):
            events += wire.receive(received, came)
        [request] = events
        assert isinstance(request, Request)
        assert list(request.descriptors) == own
        answer_all(wire, events)


@given(st.data())
def test_every_descriptor_leaves_exactly_once(data: st.DataObject) -> None:
    """R5, R6: whatever a peer sends, in whatever order, and whenever it stops."""
    stream, wire = KernelStream(), ServerConnection[int]()
    tokens = itertools.count()
    chunks = st.one_of(head_like(), st.binary(min_size=1, max_size=40))
    for chunk in data.draw(st.lists(chunks, min_size=1, max_size=6)):
        stream.send(chunk, [next(tokens) for _ in range(data.draw(st.integers(0, 6)))])
    received_tokens: list[int] = []
    left: list[int] = []
    for received, came in stream.drain(iter(lambda: data.draw(st.integers(1, 50_000)), None)):
        if wire.state is State.CLOSED:
            break
        received_tokens += came
        events = wire.receive(received, came, truncated=data.draw(st.integers(0, 20)) == 20)
        if data.draw(st.booleans()):
            answer_all(wire, events)
        left += descriptors_in(events)
    left += descriptors_in(wire.receive_eof() if data.draw(st.booleans()) else wire.close())
    assert sorted(left) == received_tokens
    assert wire.close() == []


def descriptors_in(events: Sequence[Event[int]]) -> list[int]:
    found: list[int] = []
    for event in events:
        if isinstance(event, Request | Dropped):
            found += event.descriptors
    return found


@given(st.one_of(head_like(), st.binary(min_size=1, max_size=HEAD_BYTES_MAX + 10)))
def test_only_declared_errors_come_of_untrusted_bytes(data: bytes) -> None:
    """Each refusal has a status, a body and fields that can be sent."""
    wire: ServerConnection[int] = ServerConnection()
    for event in wire.receive(data):
        if isinstance(event, Refused):
            check_error(event.error)
        elif isinstance(event, Request):
            try:
                deadline_seconds(event.head)
                parse_message(event.head, "cache")
            except RacerError as error:
                check_error(error)


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "DELETE"]),
    target=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=60),
    operation=st.sampled_from(
        ["objects/", "list/", "targets/", "host-read/", "prefetch/", "evict/", "explain/", ""]
    ),
    fields=st.dictionaries(
        st.sampled_from(["range", "if-match", "racer-target", "racer-target-offset"]),
        st.text(st.characters(max_codepoint=0xFF), max_size=30),
    ),
)
def test_any_target_is_a_message_or_a_declared_error(
    method: str, target: str, operation: str, fields: dict[str, str]
) -> None:
    with suppress(RacerError):
        parse_message(RequestHead(method, f"/v1/{operation}{target}", fields), "cache")


def check_error(error: RacerError) -> None:
    assert error.code in STATUS_OF_CODE
    assert error.message
    assert error_body(error)
    ResponseHead(STATUS_OF_CODE[error.code], tuple(error_fields(error)), 0).serialise(close=True)


@given(st.binary(max_size=300))
def test_names_survive_the_round_trip(name: bytes) -> None:
    """Any bytes are a key; nothing is normalised on the way."""
    encoded = percent_encode(name)
    assert percent_decode(encoded) == name
    assert split_bucket(f"bucket/{encoded}") == ("bucket", name)


@given(
    first=st.integers(0, 300),
    last=st.one_of(st.none(), st.integers(0, 300)),
    suffix=st.one_of(st.none(), st.integers(0, 300)),
    size=st.integers(0, 200),
)
def test_ranges_agree_with_a_slice(
    first: int, last: int | None, suffix: int | None, size: int
) -> None:
    """F46, F49, F50: a range is what Python's slice of the object would be, or 416 where that is
    empty."""
    everything = range(size)
    if suffix is not None:
        text, wanted = f"bytes=-{suffix}", everything[max(0, size - suffix) :]
    elif last is None:
        text, wanted = f"bytes={first}-", everything[first:]
    elif last < first:
        return
    else:
        text, wanted = f"bytes={first}-{last}", everything[first : last + 1]
    try:
        start, stop = parse_range(text).resolve(size)
    except RangeNotSatisfiable:
        assert len(wanted) == 0
        return
    assert everything[start:stop] == wanted
    assert content_range(start, stop, size) == f"bytes {wanted[0]}-{wanted[-1]}/{size}"
