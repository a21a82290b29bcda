"""The pure parts of reading from origins: validators, ranges, names, pages of listings."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.errors import RacerError, SourceError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.call import Call
from racerd.origin.etags import as_etag, derived_etag, file_etag, is_derived
from racerd.origin.failures import Transient, unavailable
from racerd.origin.http_client import Address, Request, split_url
from racerd.origin.http_redirects import _redirected
from racerd.origin.http_status import retry_after_seconds
from racerd.origin.names import encoded, plain_path, text_head
from racerd.origin.parts import PartHead, check_part, parse_content_range
from racerd.origin.protocol import CancelToken
from racerd.origin.retries import Retries
from racerd.origin.s3_listing import parse_page
from racerd.runtime.deadline import Deadline
from racerd.telemetry import Metrics

OBJECT = ObjectId("cache", "bucket", b"key")


# --- validators ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "etag"),
    [
        ('"abc"', '"abc"'),
        ("0x8DABC", '"0x8DABC"'),
        ('W/"abc"', 'W/"abc"'),
        ('w/"abc"', 'W/"abc"'),
        (' "abc" ', '"abc"'),
        ("d41d8cd9-5", '"d41d8cd9-5"'),
        ("W/abc", 'W/"abc"'),
        (None, None),
        ("", None),
        ('""', None),
        ('W/""', None),
        ('"', None),
        ('"a b"', None),
        ('"a"b"', None),
        ('"é"', None),
        ('"a\n"', None),
    ],
)
def test_etags_are_normalised_or_refused(text: str | None, etag: str | None) -> None:
    """F53: quotes are added where listings leave them out; what tells nothing apart is none."""
    assert as_etag(text) == etag


@given(st.text(max_size=40))
def test_an_etag_is_always_fit_for_a_header(text: str) -> None:
    etag = as_etag(text)
    if etag is not None:
        assert as_etag(etag) == etag
        assert etag.isascii() and etag.isprintable() and " " not in etag


def test_derived_etags_are_weak_and_tell_size_and_second_apart() -> None:
    """F53: Last-Modified and size, where nothing better is."""
    first = derived_etag("Wed, 21 Oct 2015 07:28:00 GMT", 10)
    assert first is not None and first.startswith("W/") and is_derived(first)
    assert first == derived_etag("Wed, 21 Oct 2015 07:28:00 GMT", 10)
    assert first != derived_etag("Wed, 21 Oct 2015 07:28:01 GMT", 10)
    assert first != derived_etag("Wed, 21 Oct 2015 07:28:00 GMT", 11)
    assert derived_etag(None, 10) is None
    assert derived_etag("garbage", 10) is None


@given(st.tuples(*[st.integers(0, 2**63)] * 3), st.tuples(*[st.integers(0, 2**63)] * 3))
def test_file_etags_differ_where_anything_does(
    one: tuple[int, int, int], two: tuple[int, int, int]
) -> None:
    assert (file_etag(*one) == file_etag(*two)) == (one == two)


# --- parts --------------------------------------------------------------------------------------


def _code(version: ObjectVersion, start: int, stop: int, head: PartHead) -> str:
    try:
        check_part(version, start, stop, head, "the origin")
    except RacerError as error:
        return error.code
    return "ok"


@given(st.integers(1, 100), st.data(), st.sampled_from(['"a"', '"b"', None]), st.booleans())
def test_a_part_is_used_only_if_it_is_what_was_asked_for(
    size: int, data: st.DataObject, etag: str | None, partial: bool
) -> None:
    """F45, F46, F47, F54, F55: whatever a server says, a used body is bytes of the version."""
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    told_size = data.draw(st.sampled_from([size, size + 1]))
    told_start = data.draw(st.integers(0, told_size - 1)) if partial else 0
    told_stop = data.draw(st.integers(told_start + 1, told_size)) if partial else told_size
    version = ObjectVersion(OBJECT, '"a"', size)
    head = PartHead(partial, told_start, told_stop, told_size, etag)
    right_version = etag == '"a"' and told_size == size
    right_range = (
        told_start == start and told_stop <= stop if partial else (start, stop) == (0, size)
    )
    code = _code(version, start, stop, head)
    assert (code == "ok") == (right_version and right_range)
    if etag == '"b"' or (etag == '"a"' and told_size != size):
        assert code == "version_changed"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("bytes 0-9/100", (0, 10, 100)),
        ("bytes 99-99/100", (99, 100, 100)),
        ("bytes 0-100/100", None),
        ("bytes 5-4/100", None),
        ("bytes 0-9/*", None),
        ("bytes */100", None),
        ("bytes 0-9", None),
        ("bytes -1-9/100", None),
        ("bytes 0-9/99999999999999999999", None),
        ("", None),
        (None, None),
    ],
)
def test_content_range(text: str | None, parsed: tuple[int, int, int] | None) -> None:
    assert parse_content_range(text) == parsed


# --- names --------------------------------------------------------------------------------------


@given(st.binary(max_size=30))
def test_encoding_is_exact(key: bytes) -> None:
    """R30: decoding once gives the key, and nothing but unreserved characters goes plain."""
    from urllib.parse import unquote_to_bytes

    text = encoded(key)
    assert unquote_to_bytes(text) == key
    assert text.isascii() and not set(text) & set(' ?#+&=;:@"<>\\^`{}|[]')
    assert text.count("/") == key.count(b"/")


@given(st.binary(max_size=12))
def test_the_text_head_never_comes_after_the_name(name: bytes) -> None:
    head = text_head(name).encode()
    assert name.startswith(head) and head <= name
    path = plain_path(name)
    assert path is None or path.encode() == name


# --- HTTP ---------------------------------------------------------------------------------------


def test_urls_are_split() -> None:
    assert split_url("http://h/a%20b?x=1") == (Address("http", "h", 80), "/a%20b?x=1")
    assert split_url("https://h:8443") == (Address("https", "h", 8443), "/")
    assert split_url("https://[::1]/x")[0].text == "https://[::1]"
    for wrong in ("ftp://h/", "http:///x", "nothing"):
        with pytest.raises(ValueError, match="URL"):
            split_url(wrong)


def test_a_redirect_never_leads_from_https_to_http() -> None:
    """R30: what was asked for in private is not asked for in the clear."""
    request = Request("GET", Address("https", "hub", 443), "/a/b", {"Authorization": "Bearer t"})
    same = _redirected(request, "../c", "hub")
    assert (same.address, same.target, dict(same.fields)) == (
        request.address, "/c", {"Authorization": "Bearer t"},
    )  # fmt: skip
    other = _redirected(request, "https://cdn/x?sig=1", "hub")
    assert (other.address.host, other.target, dict(other.fields)) == ("cdn", "/x?sig=1", {})
    for wrong in ("http://cdn/x", "ftp://cdn/x"):
        with pytest.raises(SourceError, match="redirect"):
            _redirected(request, wrong, "hub")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("-1", None),
     ("1e9", None), ("99999999", None), ("", None), (None, None)],
)  # fmt: skip
def test_retry_after(text: str | None, seconds: float | None) -> None:
    """F63: seconds only; a date would need a clock that is not ours."""
    assert retry_after_seconds(text) == seconds


# --- attempts -----------------------------------------------------------------------------------


class _Instant(CancelToken):
    def wait(self, seconds: float) -> bool:
        return False


def _call(seconds: float = 60.0) -> Call:
    return Call(Deadline.after(seconds), _Instant(), "testing")


def _failing(times: int, after: float | None = None) -> list[int]:
    """Runs attempts that fail `times` times; returns how many were made, and were allowed."""
    made = [0]

    def attempt() -> int:
        made[0] += 1
        if made[0] <= times:
            raise Transient("reset", unavailable("it broke", "there"), retry_after_seconds=after)
        return made[0]

    try:
        Retries("cache", Metrics(), 3).run(attempt, _call())
    except SourceError:
        return [made[0], 0]
    return [made[0], 1]


def test_attempts_are_few() -> None:
    assert _failing(0) == [1, 1]
    assert _failing(3) == [4, 1]
    assert _failing(4) == [4, 0]


def test_a_long_wish_is_passed_on_at_once() -> None:
    """R30: a thread is not kept waiting for minutes; whoever asked learns when to come again."""
    assert _failing(1, after=2.0) == [2, 1]
    assert _failing(1, after=600.0) == [1, 0]


def test_progress_starts_the_count_anew_within_a_bound() -> None:
    """F57: a transfer that breaks often still ends; one that never ends is given up."""
    made = [0]

    def attempt() -> None:
        made[0] += 1
        raise Transient("reset", unavailable("it broke", "there"))

    with pytest.raises(SourceError):
        Retries("cache", Metrics(), 1).run(attempt, _call(), lambda: made[0])
    assert 10 < made[0] <= 64


def test_a_pause_ends_when_cancelled() -> None:
    """R7: nobody waits for an origin that nobody wants any more."""
    token = CancelToken()

    def attempt() -> None:
        threading.Thread(target=token.cancel).start()
        raise Transient("throttled", unavailable("later", "there"), retry_after_seconds=10.0)

    with pytest.raises(SourceError, match="cancelled"):
        Retries("cache", Metrics(), 3).run(attempt, Call(Deadline.after(60), token, "testing"))


def test_cancelling_calls_each_waker_once() -> None:
    token, calls = CancelToken(), list[str]()
    with token.on_cancel(lambda: calls.append("in time")):
        token.cancel()
        token.cancel()
    with token.on_cancel(lambda: calls.append("late")):
        pass
    assert calls == ["in time", "late"]
    other = CancelToken()
    with other.on_cancel(lambda: calls.append("never")):
        pass
    other.cancel()
    assert calls == ["in time", "late"]


# --- listings -----------------------------------------------------------------------------------


def _xml(body: str, more: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"{more}{body}</ListBucketResult>"
    ).encode()


def test_a_page_is_parsed_exactly() -> None:
    """R30: keys are decoded once; quotes of ETags are made whole."""
    page = parse_page(
        _xml(
            "<Contents><Key>a%2Bb+c%2520/%FF</Key><Size>3</Size><ETag>&quot;e&quot;</ETag></Contents>"
            "<Contents><Key>z//y/</Key><Size>0</Size><ETag>bare</ETag></Contents>"
            "<CommonPrefixes><Prefix>d%20/</Prefix></CommonPrefixes>",
            "<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
            "<NextContinuationToken>t</NextContinuationToken>",
        ),
        "s3",
    )
    assert [entry.key for entry in page.entries] == [b"a+b c%20/\xff", b"d /", b"z//y/"]
    assert [getattr(entry, "etag", "-") for entry in page.entries] == ['"e"', "-", '"bare"']
    assert page.ordered and page.token == "t"


def test_a_page_without_encoding_is_taken_as_it_is() -> None:
    page = parse_page(_xml("<Contents><Key>a+b%20</Key><Size>1</Size></Contents>"), "s3")
    assert [entry.key for entry in page.entries] == [b"a+b%20"]
    assert page.token is None


def test_a_page_that_is_out_of_order_says_so() -> None:
    page = parse_page(
        _xml("".join(f"<Contents><Key>{k}</Key><Size>1</Size></Contents>" for k in ("a/b", "a-b"))),
        "s3",
    )
    assert not page.ordered


@pytest.mark.parametrize(
    "body",
    [
        b"", b"no xml", b"<a>", _xml("<Contents><Key>a</Key></Contents>"),
        _xml("<Contents><Size>1</Size></Contents>"),
        _xml("<Contents><Key>a</Key><Size>big</Size></Contents>"),
        _xml("<Contents><Key>a</Key><Size>-1</Size></Contents>"),
    ],
)  # fmt: skip
def test_a_page_that_makes_no_sense_is_refused(body: bytes) -> None:
    with pytest.raises(SourceError, match="listing"):
        parse_page(body, "s3")


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(body: bytes) -> None:
    with contextlib.suppress(SourceError):
        parse_page(body, "s3")
