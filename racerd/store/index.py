"""The index of one slab: which page lies where. All of it is in memory.

Layer: store, pure; not thread-safe: the engine owns it, under its driver's lock. A page costs
about 40 bytes, a version about 90 plus the length of its names. A version is found by its digest
(128 bits), then its full identity is compared, here and again in the header of the record, so that
a collision cannot be taken for a hit.

Rows of a segment are chained, because a segment is evicted as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from racerd.ids import ObjectId, ObjectVersion, PageId
from racerd.store.columns import NOTHING, U64, Array, HashTable, Table, mixed

HITS_MAX = 3
LIVE = 1  # Bits of the column `flags`.
FORMAT_V1 = 2
SUSPECT = 4  # A read of it failed once.
UNPROVEN = 8  # From a checkpoint: its record may have been dropped since. Never saved.

_PAGE_COLUMNS = {
    "version": "u4",  # Row of the catalog.
    "page": "u4",
    "segment": "u4",
    "block": "u4",  # Start of the record in its segment, in blocks of 4 KiB.
    "length": "u4",  # Plaintext bytes.
    "next": "u4",
    "previous": "u4",
    "flags": "u1",
    "hits": "u1",
}
_VERSION_COLUMNS = {
    "digest0": "u8",
    "digest1": "u8",
    "object0": "u8",
    "object1": "u8",
    "pages": "u4",
    "start": "u8",  # Of its packed identity in `names`.
    "identity": "u2",  # Bytes of the identity, as `ObjectVersion.packed`.
    "token": "u2",  # Bytes of the origin token right behind it; NO_TOKEN if there is none.
    "cache": "u2",
    "pinned": "u1",
}
NO_TOKEN = 0xFFFF
NO_CACHE = 0xFFFF
EVERYTHING = slice(None)


def halves(digest: bytes) -> tuple[int, int]:
    """A 16-byte digest as two 64-bit integers."""
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def hash_of(page: PageId) -> int:
    """The 64-bit hash of a page, spread over its upper bits."""
    first, _ = halves(page.version.digest)
    return mixed(first + page.index & U64)


def unpack_identity(packed: bytes) -> tuple[ObjectId, str, int]:
    """Reads what `ObjectVersion.packed` wrote: object, ETag, size. Raises ValueError."""
    parts, at = [], 0
    while at < len(packed):
        length = int.from_bytes(packed[at : at + 4], "big")
        parts.append(packed[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(packed) or len(parts) != 5:
        raise ValueError("the identity does not consist of five parts")
    cache, bucket, key, etag, size = parts
    return (
        ObjectId(cache.decode(), bucket.decode(), key),
        etag.decode(),
        int.from_bytes(size, "big"),
    )


class Catalog:
    """The versions that have pages here, with their names, in one block of bytes."""

    def __init__(self) -> None:
        self.table = Table(_VERSION_COLUMNS)
        self.names = bytearray()
        self._dead_bytes = 0
        self._hashes = HashTable(self._rehash)
        self.caches: list[str] = []
        self._cache_numbers: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self._hashes.nbytes + len(self.names)

    def cache_number(self, cache: str) -> int:
        number = self._cache_numbers.get(cache)
        if number is None:
            number = self._cache_numbers[cache] = len(self.caches)
            self.caches.append(cache)
        return number

    def known_cache_number(self, cache: str) -> int:
        """The number of `cache`, or NO_CACHE if no version of it was ever here."""
        return self._cache_numbers.get(cache, NO_CACHE)

    def find(self, version: ObjectVersion) -> int:
        """Returns the row of `version`, or NOTHING."""
        first, _ = halves(version.digest)
        return self._hashes.find(mixed(first), lambda row: self.is_of(row, version))

    def is_of(self, row: int, version: ObjectVersion) -> bool:
        """Whether `row` is that of `version`: by digest first, then by the full identity."""
        views = self.table.views
        if (views["digest0"][row], views["digest1"][row]) != halves(version.digest):
            return False
        start = views["start"][row]
        return self.names[start : start + views["identity"][row]] == version.packed

    def add(self, version: ObjectVersion, *, pinned: bool) -> int:
        """Returns a row for `version`, which must not be here yet."""
        row = self.table.take()
        views = self.table.views
        views["digest0"][row], views["digest1"][row] = halves(version.digest)
        views["object0"][row], views["object1"][row] = halves(version.object_id.digest)
        token = version.origin_token
        packed = version.packed
        views["start"][row] = len(self.names)
        views["identity"][row] = len(packed)
        views["token"][row] = NO_TOKEN if token is None else len(token.encode())
        views["cache"][row] = self.cache_number(version.object_id.cache)
        views["pinned"][row] = pinned
        views["pages"][row] = 0
        self.names += packed + (token or "").encode()
        self._hashes.insert(mixed(views["digest0"][row]), row)
        return row

    def remove(self, row: int) -> None:
        views = self.table.views
        self._hashes.remove(mixed(views["digest0"][row]), row)
        self._dead_bytes += self._name_bytes(row)
        views["pages"][row] = 0
        views["identity"][row] = 0
        self.table.give_back(row)
        if self._dead_bytes * 2 > len(self.names):
            self._compact()

    def version(self, row: int) -> ObjectVersion:
        views = self.table.views
        start, stop = views["start"][row], views["start"][row] + views["identity"][row]
        object_id, etag, size = unpack_identity(bytes(self.names[start:stop]))
        token = None
        if views["token"][row] != NO_TOKEN:
            token = self.names[stop : stop + views["token"][row]].decode()
        return ObjectVersion(object_id, etag, size, token)

    def live_rows(self) -> Array:
        used = self.table.used
        return np.flatnonzero(self.table.arrays["identity"][:used])

    def rows_of_object(self, object_id: ObjectId, among: slice = EVERYTHING) -> list[int]:
        """Every version of an object, of the rows `among`."""
        first, second = halves(object_id.digest)
        rows = among.indices(self.table.used)
        part = slice(*rows)
        arrays = self.table.arrays
        same = (arrays["object0"][part] == first) & (arrays["object1"][part] == second)
        same &= arrays["identity"][part] > 0
        return self._named(np.flatnonzero(same) + rows[0], object_id.packed)

    def rows_of_prefix(
        self, cache: str, bucket: str, prefix: bytes, among: slice = EVERYTHING
    ) -> list[int]:
        """Every version of every object whose key starts with `prefix`, of the rows `among`."""
        rows = among.indices(self.table.used)
        part = slice(*rows)
        arrays = self.table.arrays
        same = arrays["cache"][part] == self.known_cache_number(cache)
        same &= arrays["identity"][part] > 0
        names = b"".join(
            len(name).to_bytes(4, "big") + name for name in (cache.encode(), bucket.encode())
        )
        return self._named(np.flatnonzero(same) + rows[0], names, prefix)

    def _named(self, rows: Array, head: bytes, prefix: bytes = b"") -> list[int]:
        """Those `rows` whose packed names start with `head`, and whose key then with `prefix`."""
        start, names = self.table.views["start"], self.names
        key = len(head) + 4 if prefix else 0  # Behind the key's length.
        return [
            row
            for row in rows.tolist()
            if names.startswith(head, start[row]) and names.startswith(prefix, start[row] + key)
        ]

    def load(self, arrays: dict[str, Array], names: bytes, caches: list[str]) -> None:
        """Takes over a saved catalog. The catalog must be empty."""
        first = self.table.take_many(len(arrays["digest0"]))
        for name, values in arrays.items():
            self.table.arrays[name][first : first + len(values)] = values
        self.names = bytearray(names)
        self.caches = list(caches)
        self._cache_numbers = {cache: number for number, cache in enumerate(caches)}
        self._hashes.rebuild()

    def _name_bytes(self, row: int) -> int:
        token = self.table.views["token"][row]
        return int(self.table.views["identity"][row]) + (0 if token == NO_TOKEN else int(token))

    def _compact(self) -> None:
        """Closes the gaps that removed versions left in `names`."""
        packed = bytearray()
        start = self.table.views["start"]
        for row in self.live_rows().tolist():
            length = self._name_bytes(row)
            packed_start = len(packed)
            packed += self.names[start[row] : start[row] + length]
            start[row] = packed_start
        self.names = packed
        self._dead_bytes = 0

    def _rehash(self) -> tuple[Array, Array]:
        rows = self.live_rows()
        return rows, self.table.arrays["digest0"][rows] * np.uint64(mixed(1))


class PageIndex:
    """Pages by (version, page), with a chain per segment."""

    def __init__(self, segment_count: int) -> None:
        self.catalog = Catalog()
        self.table = Table(_PAGE_COLUMNS)
        self._heads = np.full(segment_count, NOTHING, dtype=np.uint32)
        self._hashes = HashTable(self._rehash)

    def __len__(self) -> int:
        return self.table.rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index takes."""
        own = self.table.nbytes + self._hashes.nbytes + int(self._heads.nbytes)
        return own + self.catalog.nbytes

    def find(self, page: PageId) -> int:
        """Returns the row of `page`, or NOTHING."""
        number, version = page.index, page.version
        versions, pages = self.table.views["version"], self.table.views["page"]
        is_of = self.catalog.is_of
        return self._hashes.find(
            hash_of(page),
            lambda row: pages[row] == number and is_of(versions[row], version),
        )

    def add(
        self, page: PageId, *, segment: int, block: int, length: int, flags: int, pinned: bool
    ) -> int:
        """Adds `page`, which must not be here yet; `pinned` counts if its version is new."""
        catalog = self.catalog
        version = catalog.find(page.version)
        if version == NOTHING:
            version = catalog.add(page.version, pinned=pinned)
        catalog.table.views["pages"][version] += 1
        row = self.table.take()
        views = self.table.views
        views["version"][row] = version
        views["page"][row] = page.index
        views["segment"][row] = segment
        views["block"][row] = block
        views["length"][row] = length
        views["flags"][row] = flags | LIVE
        views["hits"][row] = 0
        self._link(row, segment)
        self._hashes.insert(self._hash(row), row)
        return row

    def remove(self, row: int) -> None:
        views = self.table.views
        self._hashes.remove(self._hash(row), row)
        self._unlink(row)
        views["flags"][row] = 0
        self.table.give_back(row)
        version = views["version"][row]
        pages = self.catalog.table.views["pages"]
        pages[version] -= 1
        if pages[version] == 0:
            self.catalog.remove(version)

    def move(self, row: int, *, segment: int, block: int) -> None:
        """The record of `row` was copied to another place."""
        views = self.table.views
        self._unlink(row)
        views["segment"][row] = segment
        views["block"][row] = block
        self._link(row, segment)

    def rows_of_segment(self, segment: int) -> Iterator[int]:
        """Rows in `segment`, latest first. The one just given may be removed meanwhile."""
        row = int(self._heads[segment])
        while row != NOTHING:
            following = self.table.views["next"][row]
            yield row
            row = following

    def rows_of_versions(self, versions: list[int]) -> list[int]:
        arrays, used = self.table.arrays, self.table.used
        alive = (arrays["flags"][:used] & LIVE).astype(bool)
        chosen = np.isin(arrays["version"][:used], np.array(versions, dtype=np.uint32))
        return [int(row) for row in np.flatnonzero(alive & chosen)]

    def page(self, row: int) -> PageId:
        return PageId(
            self.catalog.version(self.table.views["version"][row]), self.table.views["page"][row]
        )

    def live_rows(self) -> Array:
        return np.flatnonzero(self.table.arrays["flags"][: self.table.used] & LIVE)

    def load(self, arrays: dict[str, Array]) -> None:
        """Takes over saved rows. The index must be empty, its catalog loaded already."""
        count = len(arrays["page"])
        first = self.table.take_many(count)
        ours = self.table.arrays
        for name, values in arrays.items():
            ours[name][first : first + count] = values
        self._chain_all(first, count)
        pages = np.bincount(arrays["version"], minlength=self.catalog.table.used)
        self.catalog.table.arrays["pages"][: len(pages)] = pages
        self._hashes.rebuild()

    def _chain_all(self, first: int, count: int) -> None:
        ours = self.table.arrays
        segment = ours["segment"][first : first + count]
        order = np.argsort(segment, kind="stable")
        rows = (order + first).astype(np.uint32)
        same = segment[order][1:] == segment[order][:-1]
        following = np.full(count, NOTHING, dtype=np.uint32)
        previous = np.full(count, NOTHING, dtype=np.uint32)
        following[:-1][same] = rows[1:][same]
        previous[1:][same] = rows[:-1][same]
        ours["next"][rows] = following
        ours["previous"][rows] = previous
        heads = previous == NOTHING
        self._heads[segment[order][heads]] = rows[heads]

    def _link(self, row: int, segment: int) -> None:
        head = int(self._heads[segment])
        self.table.views["next"][row] = head
        self.table.views["previous"][row] = NOTHING
        if head != NOTHING:
            self.table.views["previous"][head] = row
        self._heads[segment] = row

    def _unlink(self, row: int) -> None:
        views = self.table.views
        following, previous = views["next"][row], views["previous"][row]
        if following != NOTHING:
            views["previous"][following] = previous
        if previous != NOTHING:
            views["next"][previous] = following
        else:
            self._heads[views["segment"][row]] = following

    def _hash(self, row: int) -> int:
        digest = self.catalog.table.views["digest0"][self.table.views["version"][row]]
        return mixed(digest + self.table.views["page"][row] & U64)

    def hashes_of(self, rows: Array) -> Array:
        """`hash_of` the pages of `rows`."""
        ours = self.table.arrays
        digests = self.catalog.table.arrays["digest0"][ours["version"][rows]]
        hashes: Array = (digests + ours["page"][rows]) * np.uint64(mixed(1))
        return hashes

    def _rehash(self) -> tuple[Array, Array]:
        rows = self.live_rows()
        return rows, self.hashes_of(rows)
