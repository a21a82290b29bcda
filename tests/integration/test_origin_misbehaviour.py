"""Origins, and proxies in front of them, that misbehave: never a wrong byte, never a stuck read."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RacerError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin import http_client
from racerd.origin.factory import make_origin
from racerd.origin.protocol import CancelToken, Origin
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics
from tests.servers.certificates import make_certificates
from tests.servers.obstore_rest import no_sockets_left
from tests.servers.scripted import (
    LAST_MODIFIED,
    Act,
    Answer,
    ScriptedServer,
    Seen,
    changed,
    cut,
    dripped,
    shifted,
    shortened,
    status,
    well,
    whole,
)

DATA = random.Random(2).randbytes(400_000)
SIZE = len(DATA)
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
OBJECT = ObjectId("cache", "bucket", b"model/weights")
SCHEMES = ("http", "s3", "gs", "az")
STORES = ("s3", "gs", "az")
OURS = ("http", "s3")  # Their bodies are received by our own client, as nothing is encrypted here.


class Patience(CancelToken):
    """A token that remembers how long it was to wait, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.cancelled


class Rig:
    """An origin in front of a scripted server."""

    def __init__(self, server: ScriptedServer, origin: Origin, metrics: Metrics) -> None:
        self.server = server
        self.origin = origin
        self.metrics = metrics
        self.token = Patience()

    def head(self) -> ObjectVersion:
        return self.origin.head(OBJECT, deadline=Deadline.after(60))

    def fetch(
        self, start: int = 0, stop: int = SIZE, version: ObjectVersion | None = None
    ) -> bytes:
        pinned = version or ObjectVersion(OBJECT, self.server.etag, SIZE)
        view = self.origin.fetch(
            pinned, start, stop, deadline=Deadline.after(60), cancel=self.token
        )
        return bytes(view)

    def code(self, call: Callable[[], object]) -> str:
        return self.failure(call).code

    def failure(self, call: Callable[[], object]) -> RacerError:
        with pytest.raises(RacerError) as caught:
            call()
        error = caught.value
        assert SECRET not in f"{error.message} {error.hint} {error!r} {error.__cause__!r}"
        return error

    def retries(self) -> dict[str, int]:
        """Further attempts by reason."""
        found = {}
        for metric in self.metrics.origin_retries.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    found[sample.labels["reason"]] = int(sample.value)
        return found

    def gets(self) -> list[Seen]:
        return [seen for seen in self.server.requests if seen.method == "GET"]


Make = Callable[..., Rig]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(DATA) as server:
        yield server


@pytest.fixture
def make(server: ScriptedServer) -> Iterator[Make]:
    made: list[Origin] = []

    def build(scheme: str, url: str | None = None, **more: object) -> Rig:
        metrics = Metrics()
        options = replace(
            OriginOptions(endpoint=url or server.url, allow_http=True, region="us-east-1"),
            **{"idle_timeout_seconds": 5.0, "retries": 3, **more},
        )
        match scheme:
            case "http":
                url = url or server.url
                options = replace(options, endpoint=None)
            case "s3":
                url = "s3://"
                options = replace(options, access_key_id="id", secret_access_key=Secret(SECRET))
            case "gs":
                url = "gs://"
                options = replace(options, bearer_token=Secret(SECRET))
            case _:
                url = "az://account"
                options = replace(options, sas=Secret(f"sv=2021-08-06&sp=r&sig={SECRET}"))
        origin = make_origin(url, options, cache="cache", metrics=metrics)
        made.append(origin)
        return Rig(server, origin, metrics)

    with no_sockets_left():
        yield build
        server.release()
        for origin in made:
            origin.close()


# --- ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_200_is_good_only_for_everything(make: Make, scheme: str) -> None:
    """F45, F47: a 200 is taken for the whole object and never for a part of it."""
    rig = make(scheme)
    rig.server.do(whole, whole)
    assert rig.fetch() == DATA
    rig.server.acts.clear()
    for start, stop in ((0, SIZE - 1), (1, SIZE), (100, 200)):
        rig.server.do(whole, whole)
        assert rig.code(lambda a=start, b=stop: rig.fetch(a, b)) == "origin_protocol"
        rig.server.acts.clear()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("by", [1, -1, 1000])
def test_another_range_than_asked_for_is_refused(make: Make, scheme: str, by: int) -> None:
    """F47: Content-Range says which bytes came."""
    rig = make(scheme)
    rig.server.do(shifted(by))
    assert rig.code(lambda: rig.fetch(1000, 2000)) == "origin_protocol"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_last_block_is_short(make: Make, scheme: str) -> None:
    """F46: nothing past the end is asked for, and the short tail is right."""
    rig = make(scheme)
    assert rig.fetch(SIZE - 10, SIZE) == DATA[-10:]
    assert rig.gets()[0].span == (SIZE - 10, SIZE)


@pytest.mark.parametrize("scheme", OURS)
def test_a_server_that_shortens_ranges_is_asked_for_the_rest(make: Make, scheme: str) -> None:
    """F46: a shorter 206, honestly labelled, is progress."""
    rig = make(scheme)
    rig.server.do(*[shortened(150_000)] * 3)
    assert rig.fetch() == DATA
    assert [seen.span for seen in rig.gets()] == [(0, SIZE), (150_000, SIZE), (300_000, SIZE)]
    assert rig.retries() == {"short_range": 2}


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_store_that_shortens_ranges_is_refused(make: Make, scheme: str) -> None:
    """F46: no store does; a proxy that does is named."""
    rig = make(scheme)
    rig.server.do(shortened(150_000))
    assert rig.code(rig.fetch) == "origin_protocol"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_416_means_that_the_object_shrank(make: Make, scheme: str) -> None:
    """F49: the range was inside the version, so that the version is gone."""
    rig = make(scheme)
    rig.server.do(status(416, Content_Range="bytes */5"))
    assert rig.code(lambda: rig.fetch(100, 200)) == "version_changed"


@pytest.mark.parametrize("field", ["bytes 0-", "bytes */400000", "items 0-9/400000", "0-9", None])
def test_206_without_a_usable_content_range_is_refused(make: Make, field: str | None) -> None:
    rig = make("http")
    rig.server.do(changed(Content_Range=field))
    assert rig.code(lambda: rig.fetch(0, 10)) == "origin_protocol"


# --- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_part_is_conditional(make: Make, scheme: str) -> None:
    """R3, F51: If-Match goes with each request (at Google the generation as well)."""
    rig = make(scheme)
    version = rig.head()
    assert rig.fetch(10, 20, version) == DATA[10:20]
    (seen,) = rig.gets()
    assert seen.fields["if-match"] == '"v1"'
    assert ("generation=1" in seen.target) == (scheme == "gs")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_412_means_another_version(make: Make, scheme: str) -> None:
    """F51: and it is not tried again here."""
    rig = make(scheme)
    rig.server.do(status(412))
    assert rig.code(lambda: rig.fetch(0, 10)) == "version_changed"
    assert len(rig.server.requests) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_ignores_the_condition_is_found_out(make: Make, scheme: str) -> None:
    """F55, F65: the ETag of each response is compared."""
    rig = make(scheme)
    rig.server.do(changed(ETag='"v2"'))
    assert rig.code(lambda: rig.fetch(0, 10)) == "version_changed"
    assert rig.retries() == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_size_is_another_version(make: Make, scheme: str) -> None:
    """F54: whatever the ETag says."""
    rig = make(scheme)
    rig.server.do(changed(Content_Range=f"bytes 0-9/{SIZE + 1}"))
    assert rig.code(lambda: rig.fetch(0, 10)) == "version_changed"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_part_without_etag_is_not_believed(make: Make, scheme: str) -> None:
    """F53, F55: its version cannot be told."""
    rig = make(scheme)
    rig.server.do(*[changed(ETag=None)] * 8)
    assert rig.code(lambda: rig.fetch(0, 10)) == "origin_protocol"


@pytest.mark.parametrize("etag", [None, "", '""', '"', "W/", 'W/""', '"a"b"', '"é"'])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_object_without_a_usable_etag_is_refused(
    make: Make, scheme: str, etag: str | None
) -> None:
    """F53: all its versions would look the same; the error says what to do."""
    rig = make(scheme)
    rig.server.do(*[changed(ETag=etag)] * 8)
    assert rig.code(rig.head) == "origin_protocol"


def test_last_modified_can_stand_in_for_an_etag(make: Make) -> None:
    """F53, F54: opt-in, weak, and compared with each response."""
    rig = make("http", weak_etags=True)
    rig.server.do(changed(ETag=None))
    version = rig.head()
    assert version.weak
    rig.server.do(changed(ETag=None))
    assert rig.fetch(5, 10, version) == DATA[5:10]
    assert "if-match" not in rig.gets()[0].fields
    assert rig.gets()[0].fields["if-unmodified-since"] == LAST_MODIFIED
    rig.server.do(changed(ETag=None, Last_Modified="Thu, 22 Oct 2015 07:28:00 GMT"))
    assert rig.code(lambda: rig.fetch(5, 10, version)) == "version_changed"


@pytest.mark.parametrize("scheme", ["http", "s3", "az"])
def test_weak_etags_are_compared_and_never_sent(make: Make, scheme: str) -> None:
    """F54: a server must not match a weak ETag in If-Match."""
    rig = make(scheme)
    rig.server.etag = 'W/"w1"'
    version = rig.head()
    assert version.etag == 'W/"w1"'
    assert rig.fetch(0, 10, version) == DATA[:10]
    assert all("if-match" not in seen.fields for seen in rig.server.requests)
    rig.server.etag = 'W/"w2"'
    assert rig.code(lambda: rig.fetch(0, 10, version)) == "version_changed"


def test_a_weak_version_is_compared_by_last_modified_as_well(make: Make) -> None:
    """F54: Content-Range total and Last-Modified, each time."""
    rig = make("http")
    rig.server.etag = 'W/"w1"'
    version = rig.head()
    rig.server.do(changed(Last_Modified="Thu, 22 Oct 2015 07:28:00 GMT"))
    assert rig.code(lambda: rig.fetch(0, 10, version)) == "version_changed"


def test_a_generation_that_is_gone_is_a_changed_version(make: Make) -> None:
    """F51: Google answers 404 for a generation that was overwritten."""
    rig = make("gs")
    version = rig.head()
    rig.server.do(status(404))
    assert rig.code(lambda: rig.fetch(0, 10, version)) == "version_changed"


# --- encodings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nobody_is_to_compress_on_the_way(make: Make, scheme: str) -> None:
    """F61: identity; at Google gzip, which stops it from decompressing what is stored so."""
    rig = make(scheme)
    rig.fetch(0, 10, rig.head())
    wanted = "gzip" if scheme == "gs" else "identity"
    assert {seen.fields["accept-encoding"] for seen in rig.server.requests} == {wanted}


def test_a_compressed_head_is_not_believed(make: Make) -> None:
    """F61: the size comes from a range then, which is of what is stored."""
    rig = make("http")
    rig.server.do(changed(Content_Encoding="gzip", Content_Length="77"))
    assert rig.head().size == SIZE
    assert [seen.method for seen in rig.server.requests] == ["HEAD", "GET"]


def test_what_is_compressed_on_the_way_is_refused(make: Make) -> None:
    """F61: no size, no ranges: the error says what to change."""

    def gzipped(server: ScriptedServer, seen: Seen) -> Answer:
        fields = {"ETag": server.etag, "Content-Encoding": "gzip", "Content-Length": "3"}
        return Answer(200, fields, b"\x1f\x8b\x08")

    rig = make("http")
    rig.server.do(gzipped, gzipped, gzipped)
    assert rig.code(rig.head) == "origin_protocol"
    assert rig.code(rig.fetch) == "version_changed"


# --- transfers that break -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("then", ["close", "reset"])
def test_a_broken_transfer_goes_on_where_it_ended(make: Make, scheme: str, then: str) -> None:
    """F57, F59: the next request starts at the offset, under the same validator."""
    rig = make(scheme)
    rig.server.do(cut(250_000, then), cut(50_000, then))
    assert rig.fetch(100, SIZE) == DATA[100:]
    spans = [seen.span for seen in rig.gets()]
    assert len(spans) == 3
    starts = [span[0] for span in spans if span is not None]
    assert starts == sorted(starts) and starts[0] == 100 and starts[-1] > 100
    if then == "close":
        assert starts == [100, 250_100, 300_100]
    assert {seen.fields["if-match"] for seen in rig.gets()} == {'"v1"'}
    if scheme in OURS:
        assert sum(rig.retries().values()) == 2
        assert rig.retries().keys() <= {"short_body", "reset"}


@pytest.mark.parametrize("scheme", OURS)
def test_a_transfer_that_breaks_all_the_time_still_ends(make: Make, scheme: str) -> None:
    """F57: each attempt that brought bytes starts the count of failures anew."""
    rig = make(scheme, retries=1)
    rig.server.do(*[cut(30_000)] * 13)
    assert rig.fetch() == DATA
    assert len(rig.gets()) == 14


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_transfer_that_brings_nothing_is_given_up(make: Make, scheme: str) -> None:
    """F57, F59: after a few attempts, with an error and no partial success."""
    rig = make(scheme)
    rig.server.do(*[cut(0)] * 100)
    assert rig.code(rig.fetch) == "origin_unavailable"
    assert sum(rig.retries().values()) == 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_that_changes_in_the_middle_is_not_mixed(make: Make, scheme: str) -> None:
    """F55, F65: the rest of a broken transfer is of another version."""

    def replaced(server: ScriptedServer, seen: Seen) -> Answer:
        server.etag, server.data = '"v2"', bytes(SIZE)
        return server.well(Seen(seen.method, seen.target, {"range": seen.fields["range"]}))

    rig = make(scheme)
    rig.server.do(cut(200_000), replaced)
    pinned = ObjectVersion(OBJECT, '"v1"', SIZE)
    assert rig.code(lambda: rig.fetch(0, SIZE, pinned)) == "version_changed"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slow_but_flowing_is_fine(make: Make, scheme: str) -> None:
    """F58: the idle time-out is shorter than the transfer and does not fire."""
    rig = make(scheme, idle_timeout_seconds=0.5)
    rig.server.do(dripped(40_000, 0.1))
    assert rig.fetch() == DATA
    assert len(rig.gets()) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_transfer_that_stands_still_is_resumed(make: Make, scheme: str) -> None:
    """F58, F66: no byte within the idle time-out ends the attempt, not the fetch."""
    rig = make(scheme, idle_timeout_seconds=0.3)
    rig.server.do(cut(100_000, "stall"))
    assert rig.fetch() == DATA
    starts = [seen.span[0] for seen in rig.gets() if seen.span is not None]
    assert starts == [0, 100_000]
    if scheme in OURS:
        assert rig.retries() == {"idle": 1}


@pytest.mark.parametrize("scheme", OURS)
def test_a_transfer_that_crawls_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """F58, F66: a byte now and then is no progress."""
    monkeypatch.setattr(http_client, "_PACE_WINDOW_SECONDS", 0.1)
    rig = make(scheme, progress_bytes_per_second_min=1_000_000)
    rig.server.do(dripped(10, 0.01))
    assert rig.fetch(0, 300_000) == DATA[:300_000]
    assert rig.retries().keys() == {"slow"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cancelling_wakes_a_transfer_that_stands_still(make: Make, scheme: str) -> None:
    """R7: at once, not after the idle time-out."""
    rig = make(scheme, idle_timeout_seconds=60.0)
    rig.server.do(cut(100_000, "stall"))
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(rig.code(rig.fetch)))
    thread.start()
    assert rig.server.stalled.wait(30)
    rig.token.cancel()
    thread.join(30)
    assert errors == ["origin_cancelled"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_deadline_ends_a_transfer_that_stands_still(make: Make, scheme: str) -> None:
    rig = make(scheme, idle_timeout_seconds=60.0)
    rig.server.do(cut(100_000, "stall"))
    version = ObjectVersion(OBJECT, '"v1"', SIZE)
    late = Deadline.after(0.3)
    call = lambda: rig.origin.fetch(version, 0, SIZE, deadline=late, cancel=CancelToken())  # noqa: E731
    assert rig.code(call) == "deadline_exceeded"


# --- the same under TLS, whose records are received in another way -------------------------------


@pytest.fixture
def private(tmp_path: Path) -> Iterator[tuple[ScriptedServer, OriginOptions]]:
    certificates = make_certificates(tmp_path)
    with ScriptedServer(DATA, tls=certificates.context) as server:
        options = OriginOptions(ca_bundle=str(certificates.ca), idle_timeout_seconds=0.3)
        yield server, options


@pytest.mark.parametrize(
    "act", [well, cut(250_000), cut(100_000, "reset"), cut(100_000, "stall"), dripped(20_000, 0.05)]
)
def test_a_transfer_under_tls_breaks_and_goes_on(
    private: tuple[ScriptedServer, OriginOptions], act: Act
) -> None:
    """F57, F58: resumed at the offset; slow but flowing is fine."""
    server, options = private
    origin = make_origin(server.url, options, cache="cache", metrics=Metrics())
    rig = Rig(server, origin, Metrics())
    server.do(act)
    assert rig.fetch(7, SIZE) == DATA[7:]
    starts = [seen.span[0] for seen in rig.gets() if seen.span is not None]
    assert starts[0] == 7 and starts == sorted(set(starts))
    server.release()
    origin.close()


def test_cancelling_wakes_a_transfer_under_tls(
    private: tuple[ScriptedServer, OriginOptions],
) -> None:
    """R7: and nothing that is not plaintext ever gets into the buffer."""
    server, options = private
    options = replace(options, idle_timeout_seconds=60.0)
    origin = make_origin(server.url, options, cache="cache", metrics=Metrics())
    rig = Rig(server, origin, Metrics())
    server.do(cut(100_000, "stall"))
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(rig.code(rig.fetch)))
    thread.start()
    assert server.stalled.wait(30)
    rig.token.cancel()
    thread.join(30)
    assert errors == ["origin_cancelled"]
    server.release()
    origin.close()


# --- errors and retries -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("act", "code"),
    [
        (status(404), "not_found"),
        (status(403), "forbidden"),
        (status(401), "forbidden"),
        (status(418), "origin_protocol"),
    ],
)
def test_final_answers_are_not_tried_again(make: Make, scheme: str, act: Act, code: str) -> None:
    rig = make(scheme)
    rig.server.do(act, act)
    assert rig.code(rig.head) == code
    assert rig.code(lambda: rig.fetch(0, 10)) == code
    assert len(rig.server.requests) == 2 and rig.retries() == {}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("number", "reason"), [(500, "server_error"), (503, "throttled"), (429, "throttled")]
)
def test_failures_that_may_pass_are_tried_again(
    make: Make, scheme: str, number: int, reason: str
) -> None:
    """R30: few attempts, jittered pauses, counted by reason."""
    rig = make(scheme)
    rig.server.do(*[status(number)] * 3)
    assert rig.fetch(0, 10) == DATA[:10]
    rig.server.do(*[status(number)] * 100)
    before = len(rig.server.requests)
    assert rig.code(lambda: rig.fetch(0, 10)) == "origin_unavailable"
    attempts = len(rig.server.requests) - before
    rig.server.acts.clear()
    # obstore tries twice more by itself within each of our attempts.
    assert attempts == 4 * (1 if scheme == "http" else 3)
    assert rig.retries()[reason] >= 3
    assert all(0 < seconds <= 5 for seconds in rig.token.waited)


def test_retry_after_is_honoured(make: Make) -> None:
    """R30: the origin's wish is waited for, if it is short; else it is passed on."""
    rig = make("http")
    rig.server.do(status(503, Retry_After="7"))
    assert rig.fetch(0, 10) == DATA[:10]
    assert 7 <= rig.token.waited[0] < 13
    rig.server.do(status(429, Retry_After="3600"))
    error = rig.failure(lambda: rig.fetch(0, 10))
    assert (error.code, error.retry_after_seconds) == ("origin_unavailable", 3600)
    assert len(rig.server.requests) == 3


def test_the_clock_of_an_origin_is_not_believed(make: Make) -> None:
    """F63: Retry-After as a date would need the origin's clock: the usual pause is taken."""
    rig = make("http")
    rig.server.do(status(503, Retry_After="Fri, 31 Dec 2199 23:59:59 GMT"))
    assert rig.fetch(0, 10) == DATA[:10]
    assert rig.token.waited[0] <= 5


def test_each_attempt_is_signed_anew(make: Make) -> None:
    """F62: a signature carries its time; that of a listing is made when it is sent."""
    rig = make("s3")
    rig.server.do(status(503, Retry_After="1"))
    rig.code(lambda: list(rig.origin.list_objects(
        "bucket", b"", delimiter=None, after=None, deadline=Deadline.after(30))))  # fmt: skip
    first, second = (seen.target.split("X-Amz-Date=")[1][:16] for seen in rig.gets())
    assert first != second


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_origin_that_is_down_says_where_it_failed(make: Make, scheme: str) -> None:
    """L5: connecting, the name, and TLS are told apart."""
    rig = make(scheme, url="http://127.0.0.1:1", retries=1)
    error = rig.failure(rig.head)
    assert error.code == "origin_unavailable" and "connect" in error.message
    assert rig.retries() == {"connect": 1}
    rig = make(scheme, url="http://no-such-host.invalid", retries=0)
    error = rig.failure(rig.head)
    assert error.code == "origin_unavailable" and "resolved" in error.message


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_redirects_are_followed_without_credentials_for_others(
    make: Make, server: ScriptedServer, method: str
) -> None:
    """R30: hubs redirect to a CDN, which must not get the hub's token."""
    with ScriptedServer(DATA) as cdn:
        rig = make("http", bearer_token=Secret(SECRET))
        server.do(status(302, Location=f"{cdn.url}/signed?x=1"))
        assert (rig.head().size if method == "HEAD" else len(rig.fetch())) == SIZE
        assert server.requests[0].fields["authorization"] == f"Bearer {SECRET}"
        assert cdn.requests[0].target == "/signed?x=1"
        assert "authorization" not in cdn.requests[0].fields
        rig.origin.close()


def test_redirects_in_circles_end(make: Make) -> None:
    rig = make("http")
    rig.server.do(*[status(307, Location="/again")] * 10)
    assert rig.code(rig.head) == "origin_protocol"


@pytest.mark.parametrize("number", [405, 501])
def test_a_server_without_head_is_asked_for_a_byte(make: Make, number: int) -> None:
    """F50: also of an empty object, whose first byte is 416."""
    rig = make("http")
    rig.server.do(status(number))
    assert rig.head().size == SIZE
    rig.server.data = b""
    rig.server.do(status(number), status(416, Content_Range="bytes */0", ETag='"empty"'))
    assert rig.head() == ObjectVersion(OBJECT, '"empty"', 0)


def test_a_connection_that_the_server_closed_is_not_used_again(make: Make) -> None:
    """A pooled connection may be closed while it is idle: that is no failure."""
    rig = make("http")

    def goodbye(server: ScriptedServer, seen: Seen) -> Answer:
        answer = server.well(seen)
        answer.stop_after = len(answer.body)
        return answer

    rig.server.do(goodbye)
    assert rig.fetch(0, 10) == DATA[:10]
    assert rig.fetch(10, 20) == DATA[10:20]
    assert rig.server.connections == 2
    assert rig.retries() == {}


def test_connections_are_used_again(make: Make) -> None:
    rig = make("http")
    for start in range(0, 100, 10):
        assert rig.fetch(start, start + 10) == DATA[start : start + 10]
    assert rig.server.connections == 1


def test_a_chunked_body_is_read(make: Make) -> None:
    def chunked(server: ScriptedServer, seen: Seen) -> Answer:
        answer = server.well(seen)
        chunks = [answer.body[i : i + 1000] for i in range(0, len(answer.body), 1000)]
        lines = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
        fields = {**answer.without("Content-Length").fields, "Transfer-Encoding": "chunked"}
        return Answer(answer.status, fields, lines)

    rig = make("http")
    rig.server.do(chunked)
    assert rig.fetch(0, 5500) == DATA[:5500]


@pytest.mark.parametrize("garbage", [b"hello\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01"])
def test_what_is_no_http_is_an_error(make: Make, garbage: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(garbage)

        thread = threading.Thread(target=serve)
        thread.start()
        rig = make("http", url=f"http://127.0.0.1:{port}", retries=0)
        assert rig.code(rig.head) in ("origin_protocol", "origin_unavailable")
        thread.join()
