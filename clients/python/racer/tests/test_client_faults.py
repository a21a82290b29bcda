"""What the client does when the daemon, or the system, does not behave."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import racer
from clients.python.racer.tests.fake_daemon import HANG_UP, FakeDaemon, Reply, Seen, error
from clients.python.racer.tests.patterns import MIB, pattern
from racer.landing import RING_SLOTS
from racer.memory import SharedMemory
from racer.transfer import PART_BYTES, RING_PART_BYTES

# --- errors mirror the wire ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "bad_request", racer.BadRequest),
        (403, "forbidden", racer.Forbidden),
        (404, "not_found", racer.NotFound),
        (412, "version_changed", racer.VersionChanged),
        (416, "range_not_satisfiable", racer.RangeNotSatisfiable),
        (431, "head_too_large", racer.BadRequest),
        (500, "internal", racer.InternalError),
        (502, "origin_unavailable", racer.OriginUnavailable),
        (502, "origin_protocol", racer.OriginUnavailable),
        (502, "corrupt", racer.Corrupt),
        (504, "deadline_exceeded", racer.DeadlineExceeded),
        (418, "a_code_of_tomorrow", racer.RacerError),
    ],
)
def test_errors_mirror_the_wire(
    daemon: FakeDaemon, client: racer.Client, status: int, code: str, kind: type[Exception]
) -> None:
    """L34: what the daemon says went wrong travels to the caller, also through a pickle."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("GET", error(status, code, "elsewhere"))
    with pytest.raises(kind) as caught:
        client.read(url)
    failure = caught.value
    assert type(failure) is kind
    assert isinstance(failure, racer.RacerError)
    assert (failure.code, failure.status, failure.retry) == (code, status, "elsewhere")
    assert failure.hint == "a hint"
    assert str(url) in failure.message
    assert "a hint" in str(failure)
    copied = pickle.loads(pickle.dumps(failure))
    assert (type(copied), copied.__dict__) == (kind, failure.__dict__)
    assert daemon.count("GET") == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, racer.NotFound), (403, racer.Forbidden), (412, racer.VersionChanged)],
)
def test_errors_without_a_body(
    daemon: FakeDaemon, client: racer.Client, status: int, kind: type[Exception]
) -> None:
    """An answer to HEAD has no body: the status says what it is."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("HEAD", error(status, "whatever", ETag='"v2"'))
    with pytest.raises(kind) as caught:
        client.stat(url)
    if isinstance(caught.value, racer.VersionChanged):
        assert caught.value.etag == '"v2"'


def test_a_range_behind_the_end(daemon: FakeDaemon, client: racer.Client) -> None:
    """The hint names what a Python program calls."""
    url = daemon.put("llama", "config.json", b"{}")
    with pytest.raises(racer.RangeNotSatisfiable, match="it has 2 bytes, as `stat` tells"):
        client.read(url, 9, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "not_found"), (403, "forbidden"), (502, "origin_unavailable")],
)
def test_the_reason_behind_an_answer_to_head(
    daemon: FakeDaemon, client: racer.Client, status: int, code: str, asynchronous: bool
) -> None:
    """L34: it is asked for with a GET of one byte, once, on the same connection."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.always("v1/objects", error(status, code, Racer_Error=code))
    with pytest.raises(racer.RacerError, match=f"{url}: told {code}") as caught:
        _stat(daemon, client, url, asynchronous)
    assert (caught.value.code, caught.value.hint) == (code, "a hint")
    head, get = daemon.seen[-2:]
    assert (head.method, get.method, get.path) == ("HEAD", "GET", head.path)
    assert get.fields["range"] == "bytes=0-0" and get.fields["if-match"] == '"v1"'
    assert get.connection == head.connection


def _stat(daemon: FakeDaemon, client: racer.Client, url: str, asynchronous: bool) -> None:
    if not asynchronous:
        client.stat(url, etag='"v1"')
        return

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir) as other:
            await other.stat(url, etag='"v1"')

    asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reply", [None, HANG_UP, error(403, "forbidden"), Reply(raw=b"x\r\n\r\n")])
def test_the_first_error_stands(
    daemon: FakeDaemon, client: racer.Client, reply: Reply | None, asynchronous: bool
) -> None:
    """L34: where the question for the reason succeeds, is cut off, or fails differently."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("HEAD", error(404, "not_found"))
    daemon.on("GET /v1/objects", reply)
    with pytest.raises(racer.NotFound, match="there is no such object"):
        _stat(daemon, client, url, asynchronous)
    assert daemon.count("v1/objects") == 2
    _stat(daemon, client, url, asynchronous)


def test_an_answer_to_head_names_its_code_in_a_field(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    """L34: without a body, `Racer-Error` still tells what happened."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("HEAD", error(502, "corrupt", Racer_Error="corrupt"))
    with pytest.raises(racer.Corrupt, match="failed verification"):
        client.stat(url)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error": 3}', b'{"error": {"code": 7}}']
)
def test_errors_that_are_not_json(daemon: FakeDaemon, client: racer.Client, body: bytes) -> None:
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("GET", Reply(404, {}, body))
    with pytest.raises(racer.NotFound, match="there is no such object"):
        client.read(url)


# --- trying again -------------------------------------------------------------------------------


def test_overloaded_is_tried_again_after_the_time_it_names(
    daemon: FakeDaemon, client: racer.Client, pauses: list[float]
) -> None:
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("GET", error(503, "overloaded", "same", Retry_After="2"), error(503, "draining"))
    assert client.read(url) == b"{}"
    assert daemon.count("GET") == 3
    assert 2.0 <= pauses[0] <= 2.5
    assert 0.0 < pauses[1] < 1.0


def test_overloaded_longer_than_the_call_may_take(
    daemon: FakeDaemon, client: racer.Client, pauses: list[float]
) -> None:
    """A pause that does not fit the caller's time raises what the daemon said, at once."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.always("GET", error(503, "overloaded", "same", Retry_After="60"))
    with pytest.raises(racer.Overloaded) as caught:
        client.read(url, timeout=5)
    assert caught.value.retry_after == 60.0
    assert daemon.count("GET") == 1
    assert not pauses


def test_overloaded_for_ever_ends(
    daemon: FakeDaemon, client: racer.Client, pauses: list[float]
) -> None:
    url = daemon.put("llama", "config.json", b"{}")
    daemon.always("GET", error(503, "overloaded"))
    with pytest.raises(racer.Overloaded):
        client.read(url)
    assert daemon.count("GET") == 20
    assert len(set(pauses)) == len(pauses)  # Jittered.
    assert max(pauses) < 2.1


def test_a_restart_between_calls_goes_unnoticed(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    with client.landing(MIB) as landing:
        landing.read(url, 0, MIB)
        daemon.stop()
        landing.view[:] = bytes(MIB)
        daemon.start()
        assert landing.read(url, 0, MIB).bytes == MIB
        assert landing.view == pattern(MIB)
    assert client.read(url) == pattern(MIB)


def test_a_restart_takes_a_moment(
    daemon: FakeDaemon, client: racer.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was there may come back: connecting is tried for a bounded time."""
    url = daemon.put("llama", "config.json", b"{}")
    assert client.read(url) == b"{}"
    daemon.stop()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            daemon.start()

    monkeypatch.setattr(time, "sleep", sleep)
    assert client.read(url) == b"{}"
    assert len(waits) == 3


def test_a_daemon_that_never_was_fails_at_once(tmp_path: Path, pauses: list[float]) -> None:
    with racer.Client(run_dir=tmp_path) as client:
        with pytest.raises(racer.DaemonUnavailable, match="there is no socket"):
            client.stat("racer://local/a/b")
    assert not pauses


def test_a_connection_that_ends_is_tried_again_boundedly(
    daemon: FakeDaemon, client: racer.Client, pauses: list[float]
) -> None:
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("GET", HANG_UP, HANG_UP)
    assert client.read(url) == b"{}"
    daemon.always("GET", HANG_UP)
    with pytest.raises(racer.ConnectionLost, match=r"run/local/client/socket ended before"):
        client.read(url)
    assert daemon.count("GET") == 3 + 6


def test_evict_is_not_repeated(daemon: FakeDaemon, client: racer.Client) -> None:
    """What is not certain not to have happened is not done twice."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("POST /v1/evict", HANG_UP)
    with pytest.raises(racer.ConnectionLost):
        client.evict(url)
    assert daemon.count("POST /v1/evict") == 1


# --- answers that are not what was asked for ----------------------------------------------------


def _cut_by(daemon: FakeDaemon, missing: int) -> Callable[[Seen], Reply]:
    def cut(seen: Seen) -> Reply:
        reply = daemon._answer(seen, [])
        reply.cut = len(reply.encode()) - missing
        return reply

    return cut


@pytest.mark.parametrize("missing", [1, 9])
def test_a_short_body_is_never_returned(
    daemon: FakeDaemon, client: racer.Client, missing: int
) -> None:
    """F59: a body that ends early is a failed read; the next try may be whole."""
    url = daemon.put("llama", "config.json", b"0123456789")
    daemon.on("GET", _cut_by(daemon, missing))
    assert client.read(url) == b"0123456789"
    daemon.always("GET", _cut_by(daemon, missing))
    with pytest.raises(racer.ConnectionLost, match=f"ended after {10 - missing} of 10 bytes"):
        client.read(url)


def _changed(**changes: str) -> Callable[[FakeDaemon], Callable[[Seen], Reply]]:
    def make(daemon: FakeDaemon) -> Callable[[Seen], Reply]:
        def answer(seen: Seen) -> Reply:
            reply = daemon._answer(seen, [])
            for name, value in changes.items():
                reply.fields[name.replace("_", "-")] = value
            return reply

        return answer

    return make


@pytest.mark.parametrize(
    "change",
    [
        _changed(Content_Range="bytes 1-10/20"),
        _changed(Content_Range="bytes 0-8/20"),
        _changed(Content_Range="bytes 0-9/21"),
        _changed(Content_Range="none"),
        _changed(Racer_Size="12"),
        _changed(Racer_Size="x"),
        _changed(ETag="unquoted"),
        _changed(ETag='"v9"'),
        _changed(Transfer_Encoding="chunked"),
    ],
)
def test_an_answer_about_other_bytes_is_refused(
    daemon: FakeDaemon,
    client: racer.Client,
    change: Callable[[FakeDaemon], Callable[[Seen], Reply]],
) -> None:
    """F47: never bytes of another range, size or version."""
    url = daemon.put("llama", "config.json", b"0123456789" * 2)
    daemon.on("GET", change(daemon))
    with pytest.raises(racer.ProtocolError):
        client.read(url, 0, 10, etag='"v1"')
    assert client.read(url, 0, 10, etag='"v1"') == b"0123456789"


@pytest.mark.parametrize("name", ["bytes", "offset", "size", "rungs"])
@pytest.mark.parametrize("value", [0, True, "5", None, 1.5, -1])
def test_host_read_that_tells_of_other_bytes(
    daemon: FakeDaemon, client: racer.Client, name: str, value: object
) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))

    def answer(seen: Seen) -> Reply:
        reply = daemon._answer(seen, [])
        told = json.loads(reply.body)
        told[name] = value
        reply.body = json.dumps(told).encode()
        return reply

    daemon.on("POST /v1/host-read", answer)
    with client.landing(MIB) as landing:
        with pytest.raises(racer.ProtocolError):
            landing.read(url, 4096, MIB - 4096)


def test_bytes_that_nobody_asked_for(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "config.json", b"{}")
    head = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "v1"\r\nRacer-Size: 2\r\n\r\n'
    daemon.on("GET", Reply(raw=head + b"{}{}"))
    with pytest.raises(racer.ProtocolError, match="nobody asked for"):
        client.read(url)


def test_a_connection_that_speaks_unasked_is_dropped(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    """A late second answer must not be taken for the answer to the next request."""
    first = daemon.put("llama", "first", b"one")
    second = daemon.put("llama", "second", b"two")
    assert client.read(first) == b"one"
    said = threading.Event()
    with daemon._lock:
        for sock in daemon._open.values():
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    said.set()
    assert client.read(second) == b"two"
    assert daemon.connections == 2


def test_connection_close_is_obeyed(daemon: FakeDaemon, client: racer.Client) -> None:
    """R6: after `Connection: close` the connection is not used again."""
    url = daemon.put("llama", "config.json", b"{}")
    daemon.on("GET", _changed(Connection="close")(daemon))
    assert client.read(url) == b"{}"
    assert client.read(url) == b"{}"
    assert daemon.connections == 2


def test_a_daemon_of_another_protocol(daemon: FakeDaemon, client: racer.Client) -> None:
    """L53: says which versions do not go together."""

    def answer(seen: Seen) -> Reply:
        reply = daemon._answer(seen, [])
        reply.body = reply.body.replace(b'"protocol":1', b'"protocol":2')
        return reply

    daemon.on("GET /v1/info", answer)
    with pytest.raises(racer.ProtocolError, match=r"racerd 9\.9 speaks protocol 2"):
        client.info("local")


def test_a_silent_daemon_does_not_hold_the_caller(
    daemon: FakeDaemon, client: racer.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait is bounded, by the deadline that the daemon was told and a little more."""
    url = daemon.put("llama", "weights", pattern(MIB))
    release = threading.Event()
    daemon.on("HEAD", lambda seen: release.wait(30) and None)
    monkeypatch.setattr("racer.deadline.GRACE_SECONDS", 0.0)
    with pytest.raises(racer.DeadlineExceeded, match=r"nothing came for 0\.2 seconds"):
        client.stat(url, timeout=0.2)
    assert 1 <= int(daemon.seen[-1].fields["racer-deadline-ms"]) <= 200
    daemon.on("POST /v1/host-read", lambda seen: release.wait(30) and None)
    with client.landing(MIB) as landing:
        with pytest.raises(racer.DeadlineExceeded):
            landing.read(url, 0, MIB, timeout=0.2)
        assert landing.lost
        release.set()


# --- memory that the daemon may still write to --------------------------------------------------


def test_memory_of_an_unanswered_read_is_not_used_again(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    """R7: a late write of a read that was given up cannot reach bytes that count."""
    url = daemon.put("llama", "weights", pattern(MIB))
    with client.landing(MIB) as landing:
        daemon.on("POST /v1/host-read", HANG_UP)
        with pytest.raises(racer.ConnectionLost):
            landing.read(url, 0, MIB)
        assert landing.lost
        with pytest.raises(racer.MemoryLost, match="make a new one"):
            landing.read(url, 0, MIB)


def test_a_long_read_goes_on_after_the_daemon_died(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    """R7: what was handed out stays, the rest is read again; writes that come late to the memory
    of the read that was not answered reach nobody."""
    data = pattern(5 * RING_PART_BYTES)
    url = daemon.put("llama", "weights", data)
    old: list[int] = []

    def die(seen: Seen) -> Reply:
        old.append(os.dup(daemon.targets[seen.fields["racer-target"]][0]))
        daemon.hang_up()
        return HANG_UP

    def write_late(seen: Seen) -> None:
        if old:
            os.pwrite(old[0], b"\xff" * RING_PART_BYTES, 0)

    daemon.on("POST /v1/host-read", None, None, die)
    daemon.always("POST", write_late)
    buffer = bytearray(len(data))
    try:
        assert client.read_into(url, buffer) == len(data)
    finally:
        for fd in old:
            os.close(fd)
    assert buffer == data
    assert len(old) == 1
    assert daemon.count("POST /v1/targets") > RING_SLOTS


def test_a_slot_that_was_given_up_is_replaced(daemon: FakeDaemon, client: racer.Client) -> None:
    """R7: it is not among those that the next try, or the next read, may take."""
    url = daemon.put("llama", "weights", pattern(MIB))
    daemon.on("POST /v1/host-read", HANG_UP)
    assert client.read(url) == pattern(MIB)
    assert client.read(url) == pattern(MIB)
    assert daemon.count("POST /v1/host-read") == 3
    assert daemon.count("POST /v1/targets") == 2
    assert len(daemon.targets) == 1


def test_a_mapping_is_made_again_after_the_daemon_died(
    daemon: FakeDaemon, client: racer.Client
) -> None:
    data = pattern(2 * PART_BYTES)
    url = daemon.put("llama", "weights", data)
    daemon.on("POST /v1/host-read", None, HANG_UP)
    with client.map(url) as view:
        assert view == data
    assert daemon.count("POST /v1/targets") == 2


def test_a_daemon_that_forgot_the_target(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    with client.landing(MIB) as landing:
        daemon.on("POST /v1/host-read", error(404, "target_unknown"))
        assert landing.read(url, 0, MIB).bytes == MIB
    assert daemon.count("POST /v1/targets") == 2


def test_readers_that_fail_give_their_slots_back(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    for _ in range(2 * RING_SLOTS):
        daemon.on("POST /v1/host-read", error(502, "corrupt"))
        with pytest.raises(racer.Corrupt):
            client.read(url)
    assert client.read(url) == pattern(MIB)
    assert daemon.count("POST /v1/targets") == 1


# --- the ladder ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["target_not_memory", "target_unsealed", "target_hugetlb", "target_read_only"]
)
def test_a_refused_target_falls_back_to_the_stream_and_says_so_once(
    daemon: FakeDaemon, client: racer.Client, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """R4, L42: one warning, with the reason; no bytes are lost."""
    data = pattern(PART_BYTES + MIB)
    url = daemon.put("llama", "weights", data)
    daemon.always("POST", error(422, code))
    with caplog.at_level(logging.WARNING, logger="racer"):
        assert client.read(url) == data
        with client.map(url) as view:
            assert view == data
        buffer = bytearray(len(data))
        client.read_into(url, buffer)
        assert buffer == data
        with client.landing(PART_BYTES + 5) as landing:
            done = landing.read(url, 3, PART_BYTES + 5)
            assert done.rungs == {"stream": PART_BYTES + 5}
            assert landing.view == data[3 : PART_BYTES + 8]
    assert len(caplog.records) == 1
    assert f"told {code}" in caplog.text
    assert daemon.count("POST") == 1


def _holes_are_sparse(seen: Seen) -> Reply | None:
    """A daemon on a kernel that cannot tell allocated pages from holes."""
    for fd in seen.descriptors:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        hole = os.lseek(own, 0, os.SEEK_HOLE)
        os.close(own)
        if hole < os.fstat(fd).st_size:
            return error(422, "target_sparse")
    return None


def test_memory_is_touched_where_the_daemon_wants_it(
    daemon: FakeDaemon, client: racer.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """R4, R8: that is no reason to fall back."""
    data = pattern(PART_BYTES + MIB)
    url = daemon.put("llama", "weights", data)
    daemon.always("POST", _holes_are_sparse)
    assert client.read(url) == data
    with client.map(url, 0, MIB) as view:
        assert view == data[:MIB]
    mapped = client.map(url)
    assert mapped.view == data
    assert mapped.rungs == {"memory": len(data)}
    mapped.close()

    async def main() -> None:
        async with racer.AsyncClient(run_dir=daemon.run_dir) as other:
            assert await other.read(url) == data
            async with other.map(url, 0, MIB) as view:
                assert view == data[:MIB]

    asyncio.run(main())
    assert not caplog.records


def test_a_daemon_without_host_reads(
    daemon: FakeDaemon, client: racer.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """R4."""
    url = daemon.put("llama", "weights", pattern(MIB))
    daemon.always("POST", error(404, "unknown_operation"))
    assert client.read(url) == pattern(MIB)
    assert "over the socket" in caplog.text


def test_no_shared_memory_falls_back_too(
    daemon: FakeDaemon,
    client: racer.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R4, F74: what the system does not give is an error with its reason, not a signal."""
    url = daemon.put("llama", "weights", pattern(MIB))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert client.read(url) == pattern(MIB)
    with pytest.raises(racer.MemoryUnavailable, match="has no room for 1,048,576 bytes"):
        client.map(url)
    with pytest.raises(racer.MemoryUnavailable):
        client.landing(MIB)
    monkeypatch.undo()
    assert client.read(url) == pattern(MIB)
    assert daemon.count("POST /v1/host-read") == 1
    assert len(caplog.records) == 1


# --- which daemon -------------------------------------------------------------------------------


def test_a_socket_of_another_cache_is_not_read_from(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Requests do not carry the cache: the client asks before it reads another's object."""
    daemon.put("llama", "config.json", b"{}")
    link = tmp_path / "elsewhere"
    link.symlink_to(daemon.path)
    with racer.Client(socket=link) as client:
        assert client.read("racer://local/llama/config.json") == b"{}"
        with pytest.raises(racer.BadUrl, match="serves the cache 'local'"):
            client.read("racer://other/llama/config.json")
    with racer.Client(socket=daemon.path) as client:
        with pytest.raises(racer.BadUrl, match="serves the cache 'local'"):
            client.map("racer://other/llama/config.json")
    assert daemon.count("GET /v1/objects") == 1


def test_two_caches(daemon: FakeDaemon, client: racer.Client) -> None:
    daemon.put("llama", "config.json", b"local")
    with FakeDaemon(daemon.run_dir, "two") as other:
        url = other.put("llama", "config.json", b"other")
        assert client.read(url) == b"other"
        assert client.read("racer://local/llama/config.json") == b"local"
        assert client.caches() == ["local", "two"]


# --- closing ------------------------------------------------------------------------------------


def test_a_closed_client_says_so(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    client.read(url)
    client.close()
    client.close()
    with pytest.raises(racer.Closed):
        client.read(url)


def test_abort_ends_the_reads_of_other_threads(daemon: FakeDaemon, client: racer.Client) -> None:
    url = daemon.put("llama", "weights", pattern(MIB))
    asked, release = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        asked.set()
        release.wait(30)

    daemon.always("POST /v1/host-read", hold)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            client.read(url)
        except racer.RacerError as failure:
            ended.append(failure)

    thread = threading.Thread(target=read)
    thread.start()
    asked.wait(30)
    client.abort()
    thread.join(30)
    release.set()
    assert len(ended) == 1


def test_memory_that_is_dropped_is_freed(daemon: FakeDaemon) -> None:
    """Nothing has to be closed to be given back (the fixture looks)."""
    url = daemon.put("llama", "weights", pattern(MIB))
    client = racer.Client(run_dir=daemon.run_dir)
    client.read(url)
    mapped = client.map(url)
    landing = client.landing(MIB)
    landing.read(url, 0, MIB)
    memory = SharedMemory.allocate(4096)
    del mapped, landing, memory, client
