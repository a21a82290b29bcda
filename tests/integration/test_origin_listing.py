"""Listings of S3 over several pages, from servers with and without manners."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote_plus

import pytest

from racerd.config.origin_options import OriginOptions, Secret
from racerd.errors import RacerError
from racerd.origin.factory import make_origin
from racerd.origin.protocol import ListedObject, ListedPrefix, Origin
from racerd.origin.stores import Stores
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics
from tests.servers.obstore_rest import no_sockets_left

KEYS = sorted(
    [b"a-b", b"a/b", b"a/c/d", b"a0", b"b+ %", b"b//c", b"/lead", b"trail/", "ü".encode()]
    + [b"m/%03d" % i for i in range(20)]
)


def tree_order(key: bytes) -> tuple[bytes, ...]:
    """Folder by folder, as a server with a tree of names lists."""
    return tuple(key.split(b"/"))


class FakeS3:
    """ListObjectsV2, `page` entries at a time, of `keys` in the order that they have."""

    def __init__(self) -> None:
        self.keys = KEYS
        self.page = 7
        self.server = "FakeS3"
        self.failures: list[tuple[int, str, dict[str, str]]] = []
        self.queries: list[dict[str, list[str]]] = []
        self.endless = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                fake.queries.append(parse_qs(query))
                status, fields, body = fake.answer(path, parse_qs(query, encoding="latin-1"))
                self.send_response(status)
                for name, value in {**fields, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def version_string(self) -> str:
                return fake.server

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        if self.failures:
            status, code, fields = self.failures.pop(0)
            return status, fields, f"<Error><Code>{code}</Code></Error>".encode()
        if path == "/":
            names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in ("z", "a"))
            return 200, {}, f"<R><Buckets>{names}</Buckets></R>".encode()
        one = {name: values[0].encode("latin-1") for name, values in query.items()}
        return 200, {}, self.listing(one)

    def listing(self, query: dict[str, bytes]) -> bytes:
        """As a server does that knows its own order only."""
        prefix, start = query.get("prefix", b""), int(query.get("continuation-token", b"0"))
        found: list[tuple[bytes, bool]] = []
        order = self.keys.index
        after = query.get("start-after")
        for key in self.keys:
            if not key.startswith(prefix):
                continue
            if after is not None and (
                order(key) <= order(after) if after in self.keys else key <= after
            ):
                continue
            folder, slash, _ = key[len(prefix) :].partition(b"/")
            if query.get("delimiter") and slash:
                if (prefix + folder + b"/", True) not in found:
                    found.append((prefix + folder + b"/", True))
            else:
                found.append((key, False))
        page = found[start : start + self.page]
        text = ""
        for name, is_prefix in page:
            quoted = quote_plus(name, safe="/")
            text += (
                f"<CommonPrefixes><Prefix>{quoted}</Prefix></CommonPrefixes>"
                if is_prefix
                else f"<Contents><Key>{quoted}</Key><Size>{len(name)}</Size></Contents>"
            )
        more = start + self.page < len(found) or self.endless
        token = start + self.page if not self.endless else 0
        return (
            f"<ListBucketResult><EncodingType>url</EncodingType>{text}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            f"<NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
        ).encode()


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    fake = FakeS3()
    fake.thread.start()
    yield fake
    fake.http.shutdown()
    fake.thread.join()
    fake.http.server_close()


@pytest.fixture
def origin(fake: FakeS3) -> Iterator[Origin]:
    options = OriginOptions(
        endpoint=f"http://127.0.0.1:{fake.http.server_port}", allow_http=True, anonymous=True
    )
    with no_sockets_left():
        origin = make_origin("s3://", options, cache="cache", metrics=Metrics())
        yield origin
        origin.close()


def listed(
    origin: Origin, prefix: bytes = b"", *, delimiter: bytes | None = None,
    after: bytes | None = None,
) -> list[bytes]:  # fmt: skip
    entries = origin.list_objects(
        "bucket", prefix, delimiter=delimiter, after=after, deadline=Deadline.after(30)
    )
    return [entry.key for entry in entries]


def test_pages_follow_each_other(fake: FakeS3, origin: Origin) -> None:
    """R34: all names, exactly, in order, over as many pages as it takes."""
    assert listed(origin) == KEYS
    assert len(fake.queries) == -(-len(KEYS) // fake.page)
    assert listed(origin, b"m/") == [key for key in KEYS if key.startswith(b"m/")]


@pytest.mark.parametrize("count", [400, 1000, 4000])
def test_a_long_page(fake: FakeS3, origin: Origin, count: int) -> None:
    """Pages of 50 to 500 KiB: room is made as they come."""
    fake.keys = [b"a-model-with-a-very-long-name/shard-%060d" % n for n in range(count)]
    fake.page = count
    assert listed(origin) == fake.keys
    assert len(fake.queries) == 1


def test_a_listing_that_was_asked_for_before_is_asked_for_again(
    fake: FakeS3, origin: Origin
) -> None:
    """What is kept of a listing is how to ask, never the answer."""
    assert listed(origin, b"m/") == [key for key in KEYS if key.startswith(b"m/")]
    fake.keys = sorted([*KEYS, b"m/new"])
    assert b"m/new" in listed(origin, b"m/")


def test_what_asks_for_a_listing_is_made_once(
    fake: FakeS3, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its beginning, that is; what follows is asked for with a token, which is never kept."""
    made: list[str] = []
    real = Stores._s3

    def making(self: Stores, bucket: str, suffix: str) -> Any:
        made.append(suffix)
        return real(self, bucket, suffix)

    monkeypatch.setattr(Stores, "_s3", making)
    for _ in range(3):
        assert listed(origin) == KEYS
    pages = -(-len(KEYS) // fake.page)
    assert len([suffix for suffix in made if "continuation-token" not in suffix]) == 1
    assert len(made) == 1 + 3 * (pages - 1)


def test_a_listing_is_asked_for_as_far_as_it_is_read(fake: FakeS3, origin: Origin) -> None:
    entries = origin.list_objects(
        "bucket", b"", delimiter=None, after=None, deadline=Deadline.after(30)
    )
    assert [next(entries).key for _ in range(fake.page)] == KEYS[: fake.page]
    assert len(fake.queries) == 1
    del entries


@pytest.mark.parametrize("after", [b"a/b", b"b//", b"zzz", b"a\xff"])
def test_after(fake: FakeS3, origin: Origin, after: bytes) -> None:
    """The server is told where to start, and not believed."""
    assert listed(origin, after=after) == [key for key in KEYS if key > after]
    assert "start-after" in fake.queries[0]


def test_folders(fake: FakeS3, origin: Origin) -> None:
    fake.page = 2
    entries = list(
        origin.list_objects("bucket", b"", delimiter=b"/", after=None, deadline=Deadline.after(30))
    )
    keys = [entry.key for entry in entries]
    assert keys == [b"/", b"a-b", b"a/", b"a0", b"b+ %", b"b/", b"m/", b"trail/", "ü".encode()]
    assert {entry.key for entry in entries if isinstance(entry, ListedPrefix)} == {
        b"/", b"a/", b"b/", b"m/", b"trail/",
    }  # fmt: skip
    assert all(e.size == len(e.key) for e in entries if isinstance(e, ListedObject))


@pytest.mark.parametrize("known", [True, False])
def test_a_server_that_lists_a_tree_is_sorted(
    fake: FakeS3, origin: Origin, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """R34: known by its name, or noticed in its first page; said once."""
    fake.keys = sorted(KEYS, key=tree_order)
    assert fake.keys != KEYS
    fake.server = "SeaweedFS 4.48" if known else "Other"
    fake.page = 1000
    if known:  # Starting somewhere, it would leave out names without any disorder to be seen.
        assert listed(origin, b"a", after=b"a-b") == [b"a/b", b"a/c/d", b"a0"]
    assert listed(origin) == KEYS
    for after in (b"a-b", b"a/b", b"a0"):
        assert listed(origin, after=after) == [key for key in KEYS if key > after]
    assert len([r for r in caplog.records if "order" in r.message]) == 1


def test_disorder_that_shows_late_is_an_error_and_then_sorted(fake: FakeS3, origin: Origin) -> None:
    """R34: names that were given already cannot be taken back, and none is left out in silence."""
    fake.keys = [*KEYS[8:], *KEYS[:8]]
    with pytest.raises(RacerError, match="order"):
        listed(origin)
    assert listed(origin) == KEYS


def test_a_page_that_follows_itself_ends(fake: FakeS3, origin: Origin) -> None:
    """F66: no listing goes round for ever, whether it is sorted here or not."""
    fake.endless = True
    for problem in ("order", "same page"):
        with pytest.raises(RacerError, match=problem):
            listed(origin)


@pytest.mark.parametrize(
    ("status", "code", "fields", "expected", "text"),
    [
        (404, "NoSuchBucket", {}, "not_found", "bucket 'bucket'"),
        (403, "AccessDenied", {}, "forbidden", "AccessDenied"),
        (403, "RequestTimeTooSkewed", {}, "forbidden", "RequestTimeTooSkewed"),
        (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}, "origin_protocol",
         "eu-west-3"),
        (400, "InvalidRequest", {}, "origin_protocol", "400"),
    ],
)  # fmt: skip
def test_errors_of_a_listing(
    fake: FakeS3, origin: Origin, status: int, code: str, fields: dict[str, str],
    expected: str, text: str,
) -> None:  # fmt: skip
    """R30: what is wrong, by S3's own word, and what to do."""
    fake.failures = [(status, code, fields)]
    with pytest.raises(RacerError, match=text) as caught:
        listed(origin)
    assert caught.value.code == expected and caught.value.hint


def test_a_throttled_page_is_asked_for_again(fake: FakeS3, origin: Origin) -> None:
    fake.failures = [(503, "SlowDown", {}), (500, "InternalError", {})]
    assert listed(origin) == KEYS


def test_an_anonymous_client_signs_nothing(fake: FakeS3, origin: Origin) -> None:
    """R30: the listing's URL is built by signing; what that adds is gone again."""
    listed(origin, b"m/")
    assert not [name for query in fake.queries for name in query if name.startswith("X-Amz")]
    assert origin.list_buckets(deadline=Deadline.after(5)) is None


def test_buckets_are_listed_where_that_is_allowed(fake: FakeS3) -> None:
    options = OriginOptions(
        endpoint=f"http://127.0.0.1:{fake.http.server_port}", allow_http=True,
        access_key_id="id", secret_access_key=Secret("s"),
    )  # fmt: skip
    with no_sockets_left():
        origin = make_origin("s3://", options, cache="cache", metrics=Metrics())
        assert origin.list_buckets(deadline=Deadline.after(30)) == ["a", "z"]
        fake.failures = [(403, "AccessDenied", {})]
        assert origin.list_buckets(deadline=Deadline.after(30)) is None
        origin.close()
