"""Which files of a model directory count: rules on names and the index alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racer.models.names import (
    find_index,
    natural_key,
    read_index_untrusted,
    with_index,
    without_index,
)
from racer.safetensors import SafetensorsError


def index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def test_natural_order() -> None:
    """R35: numbers count as numbers, and equal ones still have one order."""
    names = ["m-10.x", "m-9.x", "m-09.x", "m.x", "m-1-2.x", "m-1-10.x", "10", "9", "a"]
    expected = ["9", "10", "a", "m-1-2.x", "m-1-10.x", "m-09.x", "m-9.x", "m-10.x", "m.x"]
    assert sorted(names, key=natural_key) == expected


@given(st.lists(st.text(max_size=8)))
def test_natural_order_is_total(names: list[str]) -> None:
    """R35: any names can be compared, and only equal ones are equal."""
    ordered, backwards = sorted(names, key=natural_key), names[::-1]
    assert sorted(backwards, key=natural_key) == ordered
    assert len({natural_key(name) for name in names}) == len(set(names))


class TestWithoutIndex:
    """No index: all shards."""

    def test_all_shards_in_natural_order(self) -> None:
        """R35: other files do not matter."""
        names = ["b-2.safetensors", "a.bin", "config.json", "b-10.safetensors", "b-1.safetensors"]
        found = without_index(names)
        assert found.names == ("b-1.safetensors", "b-2.safetensors", "b-10.safetensors")
        assert found.left_out == ()

    def test_consolidated_beside_shards_is_left_out(self) -> None:
        """L14: the same weights are not read twice; alone, a consolidated file is the model."""
        found = without_index(["consolidated.safetensors", "model.safetensors"])
        assert found.names == ("model.safetensors",)
        assert found.left_out == ("consolidated.safetensors",)
        assert without_index(["consolidated.safetensors"]).names == ("consolidated.safetensors",)

    def test_nothing_to_read(self) -> None:
        """R34: the error says what was looked for."""
        with pytest.raises(SafetensorsError, match="no safetensors file"):
            without_index(["pytorch_model.bin", "safetensors"])

    @pytest.mark.parametrize(
        "names",
        [
            ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors"],
            ["a-1-of-2.fp16.safetensors", "a-2-of-2.safetensors"],
            ["a-1-of-2.safetensors", "a-3-of-2.safetensors"],
            ["a-0-of-2.safetensors", "a-2-of-2.safetensors"],
            ["a-5-of-2.safetensors", "a-6-of-2.safetensors"],
        ],
    )
    def test_missing_sibling(self, names: list[str]) -> None:
        """L14: a family with a gap is refused, with the number that is missing."""
        with pytest.raises(SafetensorsError, match=r"number \d+ is missing"):
            without_index(names)

    @pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 1, 2)])
    def test_one_too_many(self, numbers: tuple[int, ...]) -> None:
        """L14: a file of another version is not loaded with the others."""
        with pytest.raises(SafetensorsError, match="one of 3 shards where its name counts 2"):
            without_index([f"a-{number}-of-2.safetensors" for number in numbers])

    def test_complete_families(self) -> None:
        """R35: counted from one or from zero."""
        names = ["a-0-of-2.safetensors", "a-1-of-2.safetensors", "b-1-of-1.safetensors"]
        assert without_index(names).names == tuple(names)


class TestWithIndex:
    """The index decides."""

    def test_only_mapped_files(self) -> None:
        """L14: with an index, a consolidated copy of the weights is left out."""
        names = ["b.safetensors", "a.safetensors", "consolidated.safetensors", "x.json"]
        found = with_index(names, {"t": "b.safetensors", "u": "a.safetensors"}, "refuse")
        assert found.names == ("a.safetensors", "b.safetensors")
        assert found.left_out == ("consolidated.safetensors",)

    def test_extra_shard(self) -> None:
        """L14: a file that the index does not know is refused, or left out on demand."""
        names = ["a.safetensors", "b.safetensors", "c.safetensors"]
        with pytest.raises(SafetensorsError, match="nor in 1 more") as caught:
            with_index(names, {"t": "a.safetensors"}, "refuse")
        assert caught.value.file == "b.safetensors"
        found = with_index(names, {"t": "a.safetensors"}, "ignore")
        assert (found.names, found.left_out) == (
            ("a.safetensors",),
            ("b.safetensors", "c.safetensors"),
        )

    def test_missing_files_are_named_all_the_same(self) -> None:
        """L14: what is not there is not dropped silently."""
        assert with_index([], {"t": "a.safetensors"}, "refuse").names == ("a.safetensors",)

    @pytest.mark.parametrize(
        ("names", "found"),
        [
            (["model.safetensors"], None),
            (["model.safetensors.index.json", "a.safetensors.index.json"], "model"),
            (["unet.safetensors.index.json"], "unet"),
            (["consolidated.safetensors.index.json", "a.safetensors.index.json"], "a"),
            (["consolidated.safetensors.index.json"], "consolidated"),
        ],
    )
    def test_which_index(self, names: list[str], found: str | None) -> None:
        """L14: one index decides."""
        assert find_index(names) == (found and f"{found}.safetensors.index.json")

    def test_two_indexes(self) -> None:
        """L14: no guess is made between two."""
        with pytest.raises(SafetensorsError, match="2 indexes"):
            find_index(["a.safetensors.index.json", "b.safetensors.index.json"])


@pytest.mark.parametrize(
    "name",
    [
        *("../a.safetensors", "/a.safetensors", "x/../a.safetensors", "x/../../a.safetensors"),
        *("..\\a.safetensors", "C:\\a.safetensors", "a\0.safetensors", ".."),
        *("//a.safetensors", "x//a.safetensors", "./a.safetensors", "a.bin", "", ".safetensors"),
        *("a.safetensors/", "x/.safetensors/.."),
    ],
)
def test_names_stay_inside(name: str) -> None:
    """R34, R37: an index cannot lead out of its directory, or to what is no shard."""
    with pytest.raises(SafetensorsError) as caught:
        read_index_untrusted(index({"t": name}))
    assert caught.value.tensor == "t"


def test_names_below_are_allowed() -> None:
    """R34: a folder below the model's is inside."""
    weight_map = {"t": "x/y..z/a.safetensors", "u": "...safetensors"}
    assert read_index_untrusted(index(weight_map)) == weight_map


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "weight_map is missing"),
        (b"{}", "weight_map is missing"),
        (index([]), "weight_map is missing, or no object"),
        (index({}), "names no tensor"),
        (index({"t": 1}), "no file name"),
        (index({"t": None}), "no file name"),
        (b'{"weight_map":{"t":"a.safetensors","t":"b.safetensors"}}', "duplicate key 't'"),
        (b'{"weight_map":{},"weight_map":{}}', "duplicate key 'weight_map'"),
        (b'{"weight_map":' + b'{"a":' * 1_000, "nested"),
    ],
)
def test_untrusted_index(text: bytes, reason: str) -> None:
    """R37, L46: the index is as untrusted as the headers."""
    with pytest.raises(SafetensorsError, match=reason):
        read_index_untrusted(text)


@given(st.binary(max_size=100))
def test_any_bytes_as_index(text: bytes) -> None:
    """R37: one exception type, whatever the bytes are."""
    with pytest.raises(SafetensorsError):
        read_index_untrusted(text)
