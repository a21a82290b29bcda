"""`racer://` URLs and the percent codec."""

from __future__ import annotations

import pickle
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

import racer
from racer.urls import RacerUrl, percent_decode, percent_encode

KEYS = st.binary(min_size=1, max_size=1024).filter(lambda key: b"\0" not in key)
BUCKETS = st.text(min_size=1, max_size=20).filter(
    lambda name: "/" not in name and "\0" not in name and name.isprintable()
)


@given(KEYS, BUCKETS)
def test_every_key_survives_the_round_trip(key: bytes, bucket: str) -> None:
    """Spaces, `%`, `+`, `#`, `?`, unicode, leading and doubled slashes are part of the name."""
    url = RacerUrl("local", bucket, key)
    assert RacerUrl.parse(str(url)) == url
    assert str(RacerUrl.parse(str(url))) == str(url)
    assert unquote_to_bytes(url.path) == bucket.encode() + b"/" + key


@given(st.binary())
def test_the_codec_agrees_with_the_standard_library(name: bytes) -> None:
    assert percent_encode(name) == quote_from_bytes(name, safe="-._~/")
    assert percent_decode(percent_encode(name)) == name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("racer://local/b/a b", b"a b"),
        ("racer://local/b/a+b", b"a+b"),
        ("racer://local/b/a%2Bb%2f", b"a+b/"),
        ("racer://local/b//a//../.", b"/a//../."),
        ("racer://local/b/ü", "ü".encode()),
        ("racer://local/b/%ff", b"\xff"),
        ("racer://local/b/%3F%23%25", b"?#%"),
        ("racer://local/b", b""),
        ("racer://local/b/", b""),
        ("racer://local/b/x/", b"x/"),
    ],
)
def test_urls_as_people_write_them(text: str, key: bytes) -> None:
    url = RacerUrl.parse(text)
    assert (url.cache, url.bucket, url.key) == ("local", "b", key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://local/b/k",
        "racer:/local/b/k",
        "racer://",
        "racer:///b/k",
        "racer://../b/k",
        "racer://Local/b/k",
        "racer://a..b/b/k",
        "racer://-a/b/k",
        f"racer://{'a' * 64}/b/k",
        f"racer://{'a' * 60}.{'a' * 30}/b/k",
        "racer://local//k",
        "racer://local/b/k?x",
        "racer://local/b/k#x",
        "racer://local/b/%",
        "racer://local/b/%4",
        "racer://local/b/%zz",
        "racer://local/b/%+1",
        "racer://local/b%2Fc/k",
        "racer://local/b%00/k",
        "racer://local/%ff/k",
        "racer://local/b/%00",
        f"racer://local/b/{'k' * 1025}",
    ],
)
def test_what_is_no_url_says_so(text: str) -> None:
    with pytest.raises(racer.BadUrl):
        RacerUrl.parse(text)
    with pytest.raises(ValueError):
        RacerUrl.parse(text)


@pytest.mark.parametrize("text", ["racer://local/", "racer://local/b", "racer://local/b/"])
def test_an_object_needs_a_key(text: str) -> None:
    with pytest.raises(racer.BadUrl, match="names no object"):
        RacerUrl.parse_object(text)


def test_a_url_is_a_value() -> None:
    url = RacerUrl.parse("racer://local/b/k")
    assert pickle.loads(pickle.dumps(url)) == url
    assert len({url, RacerUrl("local", "b", b"k"), RacerUrl("local", "b", b"l")}) == 2
    assert url != "racer://local/b/k"
    assert repr(url) == "RacerUrl('local', 'b', b'k')"
    with pytest.raises(AttributeError, match="does not change"):
        url.cache = "other"
    with pytest.raises(TypeError):
        RacerUrl.parse(b"racer://local/b/k")  # type: ignore[arg-type]
