"""How bodies get into memory: straight from the socket, also from S3 stores without encryption."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RacerError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.factory import make_origin
from racerd.origin.protocol import CancelToken, Origin
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics
from racerd.units import MIB
from tests.servers.obstore_rest import no_sockets_left
from tests.servers.scripted import Act, Answer, ScriptedServer, Seen, cut, dripped, status
from tests.support.collector import no_collector

DATA = random.Random(7).randbytes(5 * MIB + 12_345)
SIZE = len(DATA)
OBJECT = ObjectId("cache", "bucket", b"model/weights")
VERSION = ObjectVersion(OBJECT, '"v1"', SIZE)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(DATA) as server:
        yield server


class Rig:
    def __init__(self, server: ScriptedServer, scheme: str, **more: object) -> None:
        self.metrics = Metrics()
        options = OriginOptions(
            endpoint=None if scheme == "http" else server.url,
            allow_http=True,
            idle_timeout_seconds=5.0,
        )
        if scheme == "s3":
            options = replace(options, access_key_id="id", secret_access_key=Secret("secret"))
        options = replace(options, **more)  # type: ignore[arg-type]
        url = server.url if scheme == "http" else "s3://"
        self.origin: Origin = make_origin(url, options, cache="cache", metrics=self.metrics)

    def fetch(self, start: int = 0, stop: int = SIZE, room: memoryview | None = None) -> memoryview:
        return self.origin.fetch(
            VERSION, start, stop, deadline=Deadline.after(60), cancel=CancelToken(), room=room
        )

    def given_up(self) -> float:
        return float(self.metrics.fallbacks.labels("signed_url", "refused")._value.get())


@pytest.fixture(params=["http", "s3"])
def rig(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Rig]:
    with no_sockets_left():
        rig = Rig(server, request.param)
        yield rig
        server.release()
        rig.origin.close()


@pytest.fixture
def s3(server: ScriptedServer) -> Iterator[Rig]:
    with no_sockets_left():
        rig = Rig(server, "s3")
        yield rig
        rig.origin.close()


def is_signed(seen: Seen) -> bool:
    return "X-Amz-Signature=" in seen.target


# --- from the socket to where they belong --------------------------------------------------------


def test_a_body_lands_in_the_room_that_is_offered(rig: Rig) -> None:
    """L9: no copy in between, and nothing beside it is touched."""
    room = memoryview(bytearray(b"\xee" * (SIZE + 100)))
    view = rig.fetch(100, SIZE, room)
    assert view.obj is room.obj and len(view) == SIZE - 100
    assert room[: SIZE - 100] == DATA[100:]
    assert bytes(room[SIZE - 100 :]) == b"\xee" * 200


@pytest.mark.parametrize(
    "at", [0, 1, MIB - 1, MIB, 4 * MIB - 1, 4 * MIB, SIZE - MIB - 1, SIZE - MIB, SIZE - 1]
)
def test_a_body_that_breaks_anywhere_goes_on_there(
    rig: Rig, server: ScriptedServer, at: int
) -> None:
    """F57: also where the thread that receives is not woken for every segment."""
    server.do(cut(at))
    assert rig.fetch() == DATA
    assert [seen.span for seen in server.requests] == [(0, SIZE), (at, SIZE)]


@pytest.mark.parametrize("at", [MIB // 2, SIZE - MIB // 2])
def test_a_body_that_stands_still_anywhere_keeps_what_came(server: ScriptedServer, at: int) -> None:
    """F58, F66: what lies below the mark that wakes the thread is not lost, nor waited for long."""
    with no_sockets_left():
        rig = Rig(server, "http", idle_timeout_seconds=0.3)
        server.do(cut(at, "stall"))
        assert rig.fetch() == DATA
        assert [seen.span for seen in server.requests] == [(0, SIZE), (at, SIZE)]
        server.release()
        rig.origin.close()


def test_a_connection_answers_again_after_a_long_body(rig: Rig, server: ScriptedServer) -> None:
    """F66: the mark that wakes for much of a body must not wait for as much of the next head."""
    for start in (0, 1000, 2000):
        assert rig.fetch(start, SIZE) == DATA[start:]
        assert rig.fetch(start, start + 300_000) == DATA[start : start + 300_000]
    assert server.connections == 1


def test_a_body_that_comes_in_drops_is_received(rig: Rig, server: ScriptedServer) -> None:
    """F58: less than the mark at a time."""
    server.do(dripped(700_001, 0.01))
    assert rig.fetch() == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize("trouble", [status(503), cut(MIB), cut(2 * MIB, "reset")])
def test_attempts_that_failed_keep_no_view_of_the_room(
    rig: Rig, server: ScriptedServer, trouble: Act
) -> None:
    """F57: memory that is shared next must not be kept writable by an error that was got over."""
    server.do(trouble)
    with no_collector():
        room = (ctypes.c_char * SIZE)()
        gone = weakref.ref(room)
        assert rig.fetch(room=memoryview(room).cast("B")) == DATA
        assert len(server.requests) == 2
        del room
        assert gone() is None


# --- signed URLs ---------------------------------------------------------------------------------


def test_only_large_parts_are_worth_a_signed_url(s3: Rig, server: ScriptedServer) -> None:
    """R30: the identity is the same either way; what is signed in the URL is nowhere else."""
    assert s3.fetch() == DATA
    assert s3.fetch(5, 25) == DATA[5:25]
    large, small = server.requests
    assert is_signed(large) and "authorization" not in large.fields
    assert not is_signed(small) and "Credential=id/" in small.fields["authorization"]
    assert large.fields["if-match"] == small.fields["if-match"] == '"v1"'


@pytest.mark.parametrize("number", [400, 403, 307, 501])
def test_a_store_that_refuses_signed_urls_is_read_by_obstore(
    s3: Rig, server: ScriptedServer, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """R30: a bucket's policy may allow signatures in fields only. It is tried once, and said."""

    def picky(server: ScriptedServer, seen: Seen) -> Answer:
        return status(number)(server, seen) if is_signed(seen) else server.well(seen)

    server.do(*[picky] * 3)
    assert s3.fetch() == DATA
    assert s3.fetch(0, 4 * MIB) == DATA[: 4 * MIB]
    assert [is_signed(seen) for seen in server.requests] == [True, False, False]
    assert s3.given_up() == 1
    assert caplog.text.count(f"refuses signed URLs (status {number})") == 1


@pytest.mark.parametrize(("number", "code"), [(403, "forbidden"), (404, "not_found")])
def test_who_refuses_everything_has_not_refused_signed_urls(
    s3: Rig, server: ScriptedServer, number: int, code: str
) -> None:
    """R30: obstore's answer counts; when there is another, the short way is taken again."""
    server.do(*[status(number)] * 2)
    with pytest.raises(RacerError) as caught:
        s3.fetch()
    assert caught.value.code == code
    assert s3.fetch() == DATA
    assert [is_signed(seen) for seen in server.requests] == [True, False, True]
    assert s3.given_up() == 0


def test_what_was_gone_for_a_moment_says_nothing_of_signed_urls(
    s3: Rig, server: ScriptedServer
) -> None:
    server.do(status(404))
    assert s3.fetch() == DATA
    assert s3.fetch() == DATA
    assert [is_signed(seen) for seen in server.requests] == [True, False, True]


def test_each_attempt_of_a_body_is_signed_anew(s3: Rig, server: ScriptedServer) -> None:
    """F62: a signature carries its time, and the identity may be another one by then."""
    server.do(status(503, Retry_After="1"))
    assert s3.fetch() == DATA
    first, second = (seen.target.split("X-Amz-Date=")[1][:16] for seen in server.requests)
    assert first != second


def test_nobody_signs_for_an_anonymous_client(server: ScriptedServer) -> None:
    """R30: there is no key to sign with."""
    with no_sockets_left():
        rig = Rig(server, "s3", anonymous=True)
        assert rig.fetch() == DATA
        assert not is_signed(server.requests[0])
        rig.origin.close()
