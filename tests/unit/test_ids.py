"""Names: what is accepted, and that no two things share an encoding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from racerd.errors import RequestError
from racerd.ids import ObjectId, ObjectVersion, PageId, check_cache_name

KEYS = st.binary(min_size=1, max_size=1024).filter(lambda key: b"\0" not in key)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1)
BUCKETS = TEXT.filter(lambda text: len(text.encode()) <= 255)
OBJECTS = st.builds(ObjectId, st.sampled_from(["a", "ab", "b"]), BUCKETS, KEYS)
ETAGS = st.text(st.characters(codec="latin-1"), max_size=20)
VERSIONS = st.builds(ObjectVersion, OBJECTS, ETAGS, st.integers(0, 2**64 - 1))


@pytest.mark.parametrize(
    "name", ["a", "0", "local", "a-b", "a.b-c.d0", "x" * 63, f"{'x' * 63}.{'y' * 18}"]
)
def test_cache_names_are_dns_subdomains(name: str) -> None:
    """R31"""
    assert check_cache_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "A", "a_b", "-a", "a-", "a.", ".a", "a..b", "a/b", "ä", "a b", "a\n", "..", "x" * 64,
     "x" * 63 + "." + "y" * 19, "a" * 5000, "٣"],
)  # fmt: skip
def test_other_cache_names_are_refused(name: str) -> None:
    """R31, F75: the name becomes a folder, and a part of the socket's path."""
    with pytest.raises(ValueError, match="cache name") as caught:
        check_cache_name(name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("bucket", "key"),
    [("", b"k"), ("a/b", b"k"), ("a\0", b"k"), ("b" * 256, b"k"), ("ä" * 128, b"k"),
     ("\udcff", b"k"), ("b", b""), ("b", b"a\0b"), ("b", b"k" * 1025)],
)  # fmt: skip
def test_names_that_no_origin_has_are_the_requests_fault(bucket: str, key: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        ObjectId("c", bucket, key)
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize("key", [b".", b"..", b"/a", b"a//b", b"a/", b"\xff\xfe", b"%2e", b" "])
def test_keys_are_bytes_and_not_normalised(key: bytes) -> None:
    assert ObjectId("c", "b", key).key == key
    assert ObjectId("c", "b", key).text.startswith("b/")


@given(OBJECTS, OBJECTS)
def test_objects_are_equal_exactly_when_their_encodings_are(one: ObjectId, other: ObjectId) -> None:
    """R22, F14: the encoding goes into the AAD and the index."""
    assert (one == other) == (one.packed == other.packed)
    assert (one == other) == (one.digest == other.digest)


@given(st.text("abc", min_size=3, max_size=20), st.data())
def test_the_same_text_split_elsewhere_is_another_object(text: str, data: st.DataObject) -> None:
    """Cache, bucket and key that read alike when put together do not encode alike."""
    cuts = st.tuples(st.integers(1, len(text) - 2), st.integers(1, len(text) - 2))
    (first, second), (third, fourth) = (sorted(data.draw(cuts)) for _ in range(2))

    def cut(low: int, high: int) -> ObjectId:
        return ObjectId(text[:low], text[low : high + 1], text[high + 1 :].encode())

    same = (first, second) == (third, fourth)
    assert (cut(first, second).packed == cut(third, fourth).packed) == same


@given(VERSIONS, VERSIONS)
def test_versions_are_equal_exactly_when_their_encodings_are(
    one: ObjectVersion, other: ObjectVersion
) -> None:
    assert (one == other) == (one.packed == other.packed)
    assert one != one.object_id


@pytest.mark.parametrize(
    "change",
    [{"etag": '"2"'}, {"etag": 'W/"1"'}, {"size": 11}, {"object_id": ObjectId("c", "b", b"j")}],
)
def test_each_part_makes_another_version(change: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"object_id": ObjectId("c", "b", b"k"), "etag": '"1"', "size": 10}
    one, other = ObjectVersion(**parts), ObjectVersion(**(parts | change))
    assert one != other
    assert one.packed != other.packed
    assert one.digest != other.digest


def test_the_origins_own_token_is_not_part_of_the_identity() -> None:
    object_id = ObjectId("c", "b", b"k")
    one = ObjectVersion(object_id, '"1"', 10, origin_token="17")
    other = ObjectVersion(object_id, '"1"', 10)
    assert one == other
    assert hash(one) == hash(other)
    assert one.packed == other.packed


@given(VERSIONS, st.integers(0, 2**32), st.integers(0, 2**32))
def test_pages_of_a_version(version: ObjectVersion, one: int, other: int) -> None:
    assume(one != other)
    assert PageId(version, one) != PageId(version, other)
    assert PageId(version, one).key != PageId(version, other).key
    again = ObjectVersion(version.object_id, version.etag, version.size)
    assert PageId(version, one) == PageId(again, one)
    assert hash(PageId(version, one)) == hash(PageId(again, one))


def test_weak_etags_are_known_by_their_prefix() -> None:
    """F54"""
    object_id = ObjectId("c", "b", b"k")
    assert ObjectVersion(object_id, 'W/"1"', 1).weak
    assert not ObjectVersion(object_id, '"W/1"', 1).weak


def test_texts_for_people_show_bytes_that_are_no_text() -> None:
    page = PageId(ObjectVersion(ObjectId("c", "b", b"a\xff/k"), '"1"', 1), 3)
    assert page.text == "b/a\\xff/k page 3"
