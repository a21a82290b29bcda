"""The index against a dictionary, and what it costs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.store.columns import NOTHING, HashTable, Table, mixed
from racerd.store.index import PageIndex

VERSIONS = [
    ObjectVersion(ObjectId(cache, "b", key), etag, 1 << 40, token)
    for cache in ("one", "two")
    for key in (b"a", b"a/b", b"c")
    for etag, token in (('"1"', None), ('"2"', "77"))
]
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "move", "find"]),
        st.sampled_from(VERSIONS),
        st.integers(0, 12),
        st.integers(0, 3),
    ),
    max_size=200,
)


@given(operations=operations)
def test_the_index_is_a_dictionary_with_chains(
    operations: list[tuple[str, ObjectVersion, int, int]],
) -> None:
    index = PageIndex(4)
    model: dict[PageId, tuple[int, int]] = {}
    for block, (what, version, number, segment) in enumerate(operations):
        page = PageId(version, number)
        row = index.find(page)
        assert (row != NOTHING) == (page in model)
        if what == "add" and page not in model:
            index.add(page, segment=segment, block=block, length=9, flags=0, pinned=False)
            model[page] = (segment, block)
        elif what == "remove" and page in model:
            index.remove(row)
            del model[page]
        elif what == "move" and page in model:
            index.move(row, segment=segment, block=block)
            model[page] = (segment, block)
        assert len(index) == len(model)
    views = index.table.views
    for page, place in model.items():
        row = index.find(page)
        assert (views["segment"][row], views["block"][row]) == place
        found = index.page(row)
        assert found == page
        assert found.version.origin_token == page.version.origin_token
    for segment in range(4):
        chained = {index.page(row) for row in index.rows_of_segment(segment)}
        assert chained == {page for page, place in model.items() if place[0] == segment}
    for version in VERSIONS:
        rows = index.catalog.rows_of_object(version.object_id)
        assert {index.catalog.version(row) for row in rows} == {
            page.version for page in model if page.version.object_id == version.object_id
        }
    prefix = index.rows_of_versions(index.catalog.rows_of_prefix("one", "b", b"a"))
    assert {index.page(row) for row in prefix} == {
        page
        for page in model
        if page.version.object_id.cache == "one" and page.version.object_id.key.startswith(b"a")
    }


@given(operations=operations)
def test_a_loaded_index_is_the_saved_one(
    operations: list[tuple[str, ObjectVersion, int, int]],
) -> None:
    index = PageIndex(4)
    for block, (what, version, number, segment) in enumerate(operations):
        page = PageId(version, number)
        row = index.find(page)
        if row == NOTHING and what != "remove":
            index.add(page, segment=segment, block=block, length=9, flags=0, pinned=False)
        elif row != NOTHING and what == "remove":
            index.remove(row)
    rows, versions = index.live_rows(), index.catalog.live_rows()
    loaded = PageIndex(4)
    columns = {name: values[versions] for name, values in index.catalog.table.arrays.items()}
    loaded.catalog.load(columns, bytes(index.catalog.names), index.catalog.caches)
    pages = {
        name: index.table.arrays[name][rows]
        for name in ("version", "page", "segment", "block", "length", "flags", "hits")
    }
    pages["version"] = np.searchsorted(versions, pages["version"])
    loaded.load(pages)
    assert len(loaded) == len(index)
    for row in rows.tolist():
        found = loaded.find(index.page(row))
        assert found != NOTHING
        for name in ("segment", "block", "page"):
            assert loaded.table.views[name][found] == index.table.views[name][row]
    for segment in range(4):
        assert {loaded.page(row) for row in loaded.rows_of_segment(segment)} == {
            index.page(row) for row in index.rows_of_segment(segment)
        }
    for row in rows.tolist():
        loaded.remove(loaded.find(index.page(row)))
    assert len(loaded) == 0 and len(loaded.catalog.live_rows()) == 0


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=3000))
def test_a_hash_table_rebuilt_in_bulk_finds_everything(hashes: list[int]) -> None:
    table = Table({"hash": "u8"})
    first = table.take_many(len(hashes))
    table.arrays["hash"][first : first + len(hashes)] = np.array(hashes, dtype=np.uint64)
    rows = np.arange(len(hashes))
    index = HashTable(lambda: (rows, table.arrays["hash"][rows]))
    index.rebuild()
    for row, each in enumerate(hashes):
        assert index.find(each, lambda candidate, row=row: candidate == row) == row
    assert index.find(mixed(1), lambda _: False) == NOTHING


class Twin(ObjectVersion):
    """A version whose digest is the same as that of every other twin: a hash collision."""

    @property
    def digest(self) -> bytes:
        return b"0123456789abcdef"


def test_a_hash_collision_is_not_a_hit() -> None:
    """F30: the full identity is compared; both versions live side by side."""
    first = Twin(ObjectId("c", "b", b"one"), '"1"', 1 << 30)
    second = Twin(ObjectId("c", "b", b"two"), '"1"', 1 << 30)
    index = PageIndex(1)
    index.add(PageId(first, 3), segment=0, block=1, length=1, flags=0, pinned=False)
    assert index.find(PageId(second, 3)) == NOTHING
    index.add(PageId(second, 3), segment=0, block=2, length=1, flags=0, pinned=False)
    rows = [index.find(PageId(each, 3)) for each in (first, second)]
    assert [index.table.views["block"][row] for row in rows] == [1, 2]
    index.remove(rows[0])
    assert index.find(PageId(first, 3)) == NOTHING
    assert index.find(PageId(second, 3)) == rows[1]


def test_a_page_costs_less_than_100_bytes() -> None:
    """250,000 pages of models of 100 pages each, names of 60 bytes."""
    index = PageIndex(1000)
    for number in range(2500):
        key = b"models/meta-llama/Llama-3.1-405B/model-%05d.safetensors" % number
        version = ObjectVersion(ObjectId("models", "hub", key), f'"{number:032x}"', 1 << 40)
        for page in range(100):
            index.add(
                PageId(version, page), segment=number % 1000, block=page, length=1 << 24,
                flags=0, pinned=False,
            )  # fmt: skip
    assert index.nbytes / len(index) < 100
