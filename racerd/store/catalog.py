"""The catalog of one slab: the versions of objects that have pages there, with their names.

Layer: store, pure; not thread-safe: the index owns it. A version costs about 90 bytes plus the
length of its names, which lie in one block of bytes. It is found by its digest (128 bits), then its
full identity is compared, so that a collision cannot be taken for a hit.
"""

from __future__ import annotations

import numpy as np

from racerd.ids import ObjectId, ObjectVersion
from racerd.store.columns import Array, HashTable, Table, mixed

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
