"""What is asked for on the wire, for every odd key: never another object's name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RacerError
from racerd.ids import ObjectId
from racerd.origin.factory import make_origin
from racerd.origin.names import has_dots, is_printable, plain_path
from racerd.origin.protocol import CancelToken, Origin
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics


class Recorder:
    """Answers every request and remembers the path as it came."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                recorder.paths.append(self.path.partition("?")[0])
                ranged = "Range" in self.headers
                self.send_response(206 if ranged else 200)
                self.send_header("ETag", '"e"')
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
                self.send_header("x-goog-generation", "7")
                self.send_header("Content-Length", "3")
                self.send_header("Connection", "close")
                if ranged:
                    self.send_header("Content-Range", "bytes 0-2/3")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(b"abc")

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    recorder.thread.start()
    yield recorder
    recorder.server.shutdown()
    recorder.thread.join()
    recorder.server.server_close()


@pytest.fixture(scope="module")
def origins(recorder: Recorder) -> Iterator[dict[str, Origin]]:
    s3 = OriginOptions(
        endpoint=recorder.url, allow_http=True, region="us-east-1",
        access_key_id="id", secret_access_key=Secret("secret"),
    )  # fmt: skip
    gs = OriginOptions(endpoint=recorder.url, allow_http=True, anonymous=True)
    az = OriginOptions(endpoint=recorder.url, allow_http=True, account_key=Secret("c2VjcmV0"))
    made = {
        "http": make_origin(recorder.url, OriginOptions(), cache="c", metrics=Metrics()),
        "s3": make_origin("s3://", s3, cache="c", metrics=Metrics()),
        "gs": make_origin("gs://", gs, cache="c", metrics=Metrics()),
        "az": make_origin("az://account", az, cache="c", metrics=Metrics()),
    }
    for origin in made.values():  # Their threads and connections belong to the module.
        origin.head(ObjectId("c", "bucket", b"warm"), deadline=Deadline.after(30))
    yield made
    for origin in made.values():
        origin.close()


SCHEMES = ("http", "s3", "gs", "az")


def _asked(origin: Origin, recorder: Recorder, key: bytes) -> set[bytes]:
    """The decoded paths that a HEAD and a GET of `key` put on the wire."""
    recorder.paths.clear()
    version = origin.head(ObjectId("c", "bucket", key), deadline=Deadline.after(30))
    view = origin.fetch(version, 0, 3, deadline=Deadline.after(30), cancel=CancelToken())
    assert bytes(view) == b"abc"
    return {unquote_to_bytes(path) for path in recorder.paths}


KEYS = [b"plain", b"a b", b"a%20b", b"a+b", b"a#b", b"a?b", "ü→".encode(), b"a//b", b"/a", b"//a",
        b"a/", b"a//", b"/", b"//", b"a///b//c", b"a b//c%/d", b"x/..y", b"...", b"~t'(1)*!",
        b"a&b=c;d", b"a\\b", b"[x]|^`{}<>\"", b"%2e%2e/x", b"//%2E/", b"a\nb",
        b"\x01/\x7f"]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "key"),
    [(scheme, key) for scheme in SCHEMES for key in KEYS if scheme != "az" or is_printable(key)],
)
def test_the_wire_says_the_key(
    origins: dict[str, Origin], recorder: Recorder, scheme: str, key: bytes
) -> None:
    """R30: spaces, '%', '+', '#', '?', unicode, leading, doubled and trailing slashes survive."""
    assert _asked(origins[scheme], recorder, key) == {b"/bucket/" + key}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(min_size=1, max_size=8)
    | st.text(st.sampled_from("a/.%2e#?+ é\x01"), min_size=1, max_size=9).map(str.encode),
    st.sampled_from(SCHEMES),
)
def test_any_key_is_asked_for_as_it_is_or_not_at_all(
    origins: dict[str, Origin], recorder: Recorder, key: bytes, scheme: str
) -> None:
    """R30: whatever the key, the wire never names another object."""
    key = key.replace(b"\0", b"0")
    if has_dots(key) or (scheme == "az" and not is_printable(key)):
        with pytest.raises(RacerError, match="cannot exist"):
            _asked(origins[scheme], recorder, key)
        assert not recorder.paths
    else:
        assert _asked(origins[scheme], recorder, key) == {b"/bucket/" + key}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("key", [b".", b"a/../b", b"./a", b"a/..", b"../other/secret"])
def test_what_cannot_be_named_is_not_found(
    origins: dict[str, Origin], recorder: Recorder, scheme: str, key: bytes
) -> None:
    """R30: URLs resolve dot parts, so that they would name another object, or another bucket."""
    recorder.paths.clear()
    with pytest.raises(RacerError, match="cannot exist"):
        origins[scheme].head(ObjectId("c", "bucket", key), deadline=Deadline.after(30))
    assert not recorder.paths


def test_plain_paths_are_those_that_obstore_leaves_alone() -> None:
    assert plain_path(b"a/b c%2F#") == "a/b c%2F#"
    for odd in (b"/a", b"a/", b"a//b", b"./a", b"a/..", b"\xff", b"a\x01"):
        assert plain_path(odd) is None
