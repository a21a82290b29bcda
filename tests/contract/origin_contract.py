"""What every origin promises, as one suite: run by each kind against a server of its kind.

A module of tests inherits `OriginContract` and gives a `subject` fixture: an origin of its own for
each test, over a server that holds what `fill` put there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import pytest

from racerd.errors import RacerError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.protocol import CancelToken, ListedObject, ListedPrefix, Origin
from racerd.runtime.deadline import Deadline

BUCKET = "bucket"
BLOB = random.Random(1).randbytes(300_000)

# Names that every origin but a plain directory tells apart; servers differ in what they keep.
ODD_KEYS = [
    b"n/a b",
    b"n/50%",
    b"n/a%20b",
    b"n/a+b",
    b"n/a#b",
    b"n/q?x=1",
    "n/ü→".encode(),
    b"n/...",
]
SLASH_KEYS = [b"s/a//b", b"/s/lead", b"//s/two", b"s/trail/", b"s///three"]
NEIGHBOURS = {b"s/a//b": b"s/a/b", b"/s/lead": b"s/lead", b"//s/two": b"s/two",
              b"s/trail/": b"s/trail", b"s///three": b"s/three"}  # fmt: skip


Slashes = Literal["kept", "folded", "none"]


class Store(Protocol):
    """The other side: how a test changes what an origin reads. Keys are exact."""

    def put(self, bucket: str, key: bytes, data: bytes) -> None: ...

    def delete(self, bucket: str, key: bytes) -> None: ...


@dataclass(frozen=True)
class Subject:
    """An origin under test. `lists`: it can list. `slashes`: what its server makes of names with
    empty parts: keeps them, folds them into the neighbour's name, or knows none."""

    origin: Origin
    store: Store
    lists: bool = True
    slashes: Slashes = "kept"
    names_buckets: bool = False

    def id(self, key: bytes, bucket: str = BUCKET) -> ObjectId:
        return ObjectId("cache", bucket, key)

    def head(self, key: bytes, bucket: str = BUCKET) -> ObjectVersion:
        return self.origin.head(self.id(key, bucket), deadline=Deadline.after(60))

    def fetch(self, version: ObjectVersion, start: int, stop: int) -> bytes:
        view = self.origin.fetch(
            version, start, stop, deadline=Deadline.after(60), cancel=CancelToken()
        )
        assert view.contiguous and view.nbytes == stop - start
        return bytes(view)

    def read(self, key: bytes) -> bytes:
        version = self.head(key)
        return self.fetch(version, 0, version.size) if version.size else b""

    def list(
        self, prefix: bytes = b"", *, delimiter: bytes | None = None, after: bytes | None = None
    ) -> list[ListedObject | ListedPrefix]:
        return list(
            self.origin.list_objects(
                BUCKET, prefix, delimiter=delimiter, after=after, deadline=Deadline.after(60)
            )
        )

    def keys(
        self, prefix: bytes = b"", *, delimiter: bytes | None = None, after: bytes | None = None
    ) -> list[bytes]:
        return [entry.key for entry in self.list(prefix, delimiter=delimiter, after=after)]


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(RacerError) as caught:
        call()
    return caught.value.code


TREE = (b"t/a", b"t/a-b", b"t/a.b", b"t/b/c", b"t/b/d/e", b"t/b-", b"t/b0", b"tz")


def fill(store: Store) -> None:
    """Puts what the tests read, and warms the store's own connection up."""
    store.put(BUCKET, b"blob", BLOB)
    store.put(BUCKET, b"empty", b"")
    store.put(BUCKET, b"one", b"1")
    for key in TREE:
        store.put(BUCKET, key, b"x" + key)


class OriginContract:
    @pytest.mark.parametrize(
        ("start", "stop"),
        [(0, len(BLOB)), (0, 1), (len(BLOB) - 1, len(BLOB)), (65_535, 65_537), (1, 200_001)],
    )
    def test_a_range_is_exactly_that_range(self, subject: Subject, start: int, stop: int) -> None:
        """R30, F46: first, last and short ranges, and the whole object."""
        version = subject.head(b"blob")
        assert version.size == len(BLOB)
        assert subject.fetch(version, start, stop) == BLOB[start:stop]

    def test_small_objects(self, subject: Subject) -> None:
        """F45, F50: one byte is a range that is the whole object; none needs no request."""
        assert subject.read(b"one") == b"1"
        assert subject.head(b"empty").size == 0

    def test_a_version_stays_the_same_until_the_object_changes(self, subject: Subject) -> None:
        """F51, F53: the ETag is usable, quoted, and stable."""
        first, second = subject.head(b"blob"), subject.head(b"blob")
        assert first == second
        assert first.etag.startswith(('"', 'W/"')) and first.etag.endswith('"')
        assert len(first.etag.strip('W/"')) > 0

    def test_what_is_not_there_is_not_found(self, subject: Subject) -> None:
        """R30: a missing key and a missing bucket."""
        assert code_of(lambda: subject.head(b"nothing/here")) == "not_found"
        assert code_of(lambda: subject.head(b"blob", "no-such-bucket")) in (
            "not_found",
            "forbidden",
        )

    def test_an_old_version_is_never_read_as_a_new_one(self, subject: Subject) -> None:
        """R3, F51, F55, F65: a pinned read of an overwritten object fails; a fresh one works."""
        subject.store.put(BUCKET, b"changing", b"first version")
        old = subject.head(b"changing")
        subject.store.put(BUCKET, b"changing", b"second, and longer")
        for start, stop in ((0, 5), (0, old.size), (old.size - 1, old.size)):
            assert code_of(lambda a=start, b=stop: subject.fetch(old, a, b)) == "version_changed"
        assert subject.head(b"changing").etag != old.etag
        assert subject.read(b"changing") == b"second, and longer"

    def test_a_deleted_object_is_gone(self, subject: Subject) -> None:
        subject.store.put(BUCKET, b"doomed", b"here")
        old = subject.head(b"doomed")
        subject.store.delete(BUCKET, b"doomed")
        assert code_of(lambda: subject.head(b"doomed")) == "not_found"
        assert code_of(lambda: subject.fetch(old, 0, 4)) in ("not_found", "version_changed")

    def test_a_version_of_another_size_is_another_version(self, subject: Subject) -> None:
        """F54: the size that a response tells is compared as well as the ETag."""
        version = subject.head(b"blob")
        wrong = replace(version, size=version.size + 1)
        assert code_of(lambda: subject.fetch(wrong, 0, 10)) == "version_changed"

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_names_survive(self, subject: Subject, key: bytes) -> None:
        """R30: spaces, '%', '+', '#', '?' and unicode are part of a key."""
        subject.store.put(BUCKET, key, b"=" + key)
        assert subject.read(key) == b"=" + key
        if subject.lists:
            assert key in subject.keys(b"n/")

    @pytest.mark.parametrize("key", SLASH_KEYS)
    def test_slashes_are_part_of_the_name(self, subject: Subject, key: bytes) -> None:
        """R30: doubled, leading and trailing slashes; never the neighbour's bytes."""
        if subject.slashes == "folded":
            pytest.skip("this server folds slashes itself; test_origin_names shows the wire")
        subject.store.put(BUCKET, NEIGHBOURS[key], b"the neighbour")
        assert code_of(lambda: subject.head(key)) == "not_found"
        if subject.slashes == "none":
            return
        subject.store.put(BUCKET, key, b"=" + key)
        try:
            assert subject.read(key) == b"=" + key
            assert subject.read(NEIGHBOURS[key]) == b"the neighbour"
        finally:
            subject.store.delete(BUCKET, key)

    @pytest.mark.parametrize("key", [b"../bucket/blob", b"./blob", b"x/../blob", b"x/.", b".."])
    def test_dot_parts_name_nothing(self, subject: Subject, key: bytes) -> None:
        """R30: no way out of a bucket, and no second name for an object."""
        assert code_of(lambda: subject.head(key)) == "not_found"

    def test_a_cancelled_fetch_stops(self, subject: Subject) -> None:
        """R7: cancelled before it starts, it does not start."""
        version, cancel = subject.head(b"blob"), CancelToken()
        cancel.cancel()
        assert (
            code_of(
                lambda: subject.origin.fetch(
                    version, 0, 10, deadline=Deadline.after(60), cancel=cancel
                )
            )
            == "origin_cancelled"
        )

    def test_a_late_call_stops(self, subject: Subject) -> None:
        version, late = subject.head(b"blob"), Deadline.after(0)
        assert (
            code_of(
                lambda: subject.origin.fetch(version, 0, 10, deadline=late, cancel=CancelToken())
            )
            == "deadline_exceeded"
        )

    def test_many_threads_at_once(self, subject: Subject) -> None:
        """R32: an origin is used from sixteen threads."""
        version = subject.head(b"blob")
        spans = [(i * 9_000, min(i * 9_000 + 20_000, len(BLOB))) for i in range(32)]
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda span: subject.fetch(version, *span), spans))
        assert got == [BLOB[start:stop] for start, stop in spans]

    # --- listings ---------------------------------------------------------------------------

    @pytest.fixture
    def tree(self, subject: Subject) -> Subject:
        if not subject.lists:
            pytest.skip("this kind of origin cannot list, which docs/origins.md says")
        return subject

    def test_a_listing_is_in_byte_order_with_sizes_and_etags(self, tree: Subject) -> None:
        """R34: whole keys in byte order ('-' and '.' before '/'); ETags as `head` has them."""
        entries = tree.list(b"t/")
        keys = [entry.key for entry in entries]
        assert keys == sorted(key for key in TREE if key.startswith(b"t/"))
        for entry in entries:
            assert isinstance(entry, ListedObject)
            assert entry.size == len(entry.key) + 1
            assert entry.etag in (None, tree.head(entry.key).etag)

    def test_a_prefix_is_bytes_and_not_a_folder(self, tree: Subject) -> None:
        assert tree.keys(b"t/b") == [b"t/b-", b"t/b/c", b"t/b/d/e", b"t/b0"]
        assert tree.keys(b"t/b/") == [b"t/b/c", b"t/b/d/e"]
        assert tree.keys(b"t/a-b") == [b"t/a-b"]
        assert tree.keys(b"t/nothing") == []

    def test_a_delimiter_folds_folders(self, tree: Subject) -> None:
        folded = tree.list(b"t/", delimiter=b"/")
        assert [entry.key for entry in folded] == [
            b"t/a", b"t/a-b", b"t/a.b", b"t/b-", b"t/b/", b"t/b0",
        ]  # fmt: skip
        assert [entry.key for entry in folded if isinstance(entry, ListedPrefix)] == [b"t/b/"]
        assert tree.keys(b"t/b", delimiter=b"/") == [b"t/b-", b"t/b/", b"t/b0"]
        assert b"t/" in tree.keys(delimiter=b"/")

    @pytest.mark.parametrize("after", [b"t/a", b"t/a-", b"t/b-", b"t/b/c", b"t/b0", b"t/a\xff"])
    def test_after_goes_on_where_a_page_ended(self, tree: Subject, after: bytes) -> None:
        wanted = sorted(key for key in TREE if key.startswith(b"t/") and key > after)
        assert tree.keys(b"t/", after=after) == wanted

    def test_an_empty_folder_marker_keeps_its_slash(self, tree: Subject) -> None:
        """R34: consoles make objects "folder/"; listed as "folder" they would not be found."""
        tree.store.put(BUCKET, b"m/folder/", b"")
        try:
            listed = tree.keys(b"m/")
        finally:
            tree.store.delete(BUCKET, b"m/folder/")
        assert listed in ([b"m/folder/"], [])  # A directory has no such object.

    def test_buckets_are_told_or_not(self, subject: Subject) -> None:
        buckets = subject.origin.list_buckets(deadline=Deadline.after(60))
        assert (buckets is not None and BUCKET in buckets) if subject.names_buckets else not buckets

    def test_the_description_names_the_origin(self, subject: Subject) -> None:
        assert "://" in subject.origin.description
        assert "secret" not in subject.origin.description
