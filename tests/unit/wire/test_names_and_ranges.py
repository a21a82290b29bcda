"""Percent encoding, paths, ranges."""

from __future__ import annotations

import pytest

from racerd.errors import ProtocolError
from racerd.wire.names import percent_decode, percent_encode, split_bucket, split_target
from racerd.wire.ranges import (
    ByteRange,
    RangeNotSatisfiable,
    content_range,
    content_range_unsatisfied,
    parse_range,
)


@pytest.mark.parametrize(
    ("encoded", "name"),
    [
        ("a/b", b"a/b"),
        ("%2F%2f", b"//"),
        ("a+b", b"a+b"),
        ("%25%32%35", b"%25"),
        ("%00%FF", b"\x00\xff"),
        ("..//./", b"..//./"),
        ("", b""),
    ],
)
def test_a_name_is_decoded_once_and_not_normalised(encoded: str, name: bytes) -> None:
    assert percent_decode(encoded) == name


@pytest.mark.parametrize("text", ["%", "%4", "a%zz", "%%41", "%u0041"])
def test_a_bad_escape_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="not a percent escape"):
        percent_decode(text)


def test_encoding_leaves_only_safe_characters() -> None:
    assert percent_encode(b"a-Z_0.9~/ +%?#\xc3\xbc") == "a-Z_0.9~/%20%2B%25%3F%23%C3%BC"


def test_a_target_is_taken_apart() -> None:
    path = split_target("/v1/list/b/p%3Fq?limit=5&after=a%26b")
    assert path is not None
    assert (path.operation, path.rest) == ("list", "b/p%3Fq")
    assert path.query == {"limit": "5", "after": "a%26b"}
    assert split_target("/v2/info") is None
    bare = split_target("/v1/info")
    assert bare is not None and (bare.rest, bare.query) == (None, {})


def test_a_query_says_a_thing_once() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        split_target("/v1/list/b/?limit=1&limit=2")


@pytest.mark.parametrize(
    ("rest", "bucket", "key"),
    [
        ("b/k", "b", b"k"),
        ("b//k/", "b", b"/k/"),
        ("b/", "b", b""),
        ("%C3%BC/%C3%BC", "ü", b"\xc3\xbc"),
        ("a%2Fb/k", "a/b", b"k"),
    ],
)
def test_bucket_and_key(rest: str, bucket: str, key: bytes) -> None:
    assert split_bucket(rest) == (bucket, key)


@pytest.mark.parametrize("rest", [None, "", "b", "%FF/k"])
def test_a_path_without_a_bucket_is_refused(rest: str | None) -> None:
    with pytest.raises(ProtocolError):
        split_bucket(rest)


@pytest.mark.parametrize(
    ("text", "size", "span"),
    [
        ("bytes=0-0", 10, (0, 1)),
        ("bytes=0-", 10, (0, 10)),
        ("bytes=9-", 10, (9, 10)),
        ("bytes=3-99", 10, (3, 10)),
        ("bytes=-3", 10, (7, 10)),
        ("bytes=-99", 10, (0, 10)),
        ("bytes=0-9223372036854775807", 10, (0, 10)),
    ],
)
def test_a_range_is_cut_to_the_object(text: str, size: int, span: tuple[int, int]) -> None:
    assert parse_range(text).resolve(size) == span
    assert parse_range(text).text == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("bytes=10-", 10), ("bytes=99-100", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-5", 0)],
)
def test_a_range_past_the_end_is_not_satisfiable(text: str, size: int) -> None:
    """F49, F50: the size is told, so that the client can tell what is wrong."""
    with pytest.raises(RangeNotSatisfiable) as caught:
        parse_range(text).resolve(size)
    assert caught.value.size == size
    assert text in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=1-2,4-5", "bytes= 1-2", "Bytes=1-2",
        "items=1-2", "bytes=5-4", "bytes=+1-2", "bytes=1--2", "bytes=0x1-2", "bytes=1-2 ",
        "bytes=\u0660-1", "bytes=" + "9" * 20 + "-",
    ],
)  # fmt: skip
def test_what_is_not_one_range_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_range(text)
    assert caught.value.code == "bad_request"


def test_content_range() -> None:
    assert content_range(2, 5, 9) == "bytes 2-4/9"
    assert content_range_unsatisfied(9) == "bytes */9"
    assert ByteRange(None, None, 3).text == "bytes=-3"
