"""Listings of Google Cloud Storage and Azure Blob, through obstore.

Layer: origin. obstore passes the names of a listing through its `Path`: a name with empty or dot
parts fails the whole listing, which is said as it is; and a trailing slash is dropped. Objects
whose name ends with a slash are nearly always empty markers of folders, so an empty object is
asked for by its name once more: one that is not there has the slash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import obstore

from racerd.errors import RequestError
from racerd.ids import ObjectId
from racerd.origin.call import Call
from racerd.origin.etags import as_etag
from racerd.origin.failures import broken_protocol
from racerd.origin.names import plain_path
from racerd.origin.obstore_requests import Requests
from racerd.origin.protocol import ListedObject, ListedPrefix
from racerd.origin.retries import Retries
from racerd.origin.stores import Store, Stores

_CHUNK = 1000


class ObstoreLister:
    """Implements `Lister`."""

    def __init__(self, cache: str, stores: Stores, requests: Requests, retries: Retries) -> None:
        self._cache = cache
        self._stores = stores
        self._requests = requests
        self._retries = retries

    def close(self) -> None:
        """Stores and requests belong to the origin."""

    def list_buckets(self, call: Call) -> list[str] | None:
        return None  # Would need rights that reading does not.

    def list_objects(
        self, bucket: str, prefix: bytes, delimited: bool, after: bytes | None, call: Call
    ) -> Iterator[ListedObject | ListedPrefix]:
        folder = prefix.rpartition(b"/")[0]
        path = plain_path(folder) if folder or prefix.startswith(b"/") else ""
        if path is None:
            raise broken_protocol(
                "names with empty, dot or control parts cannot be listed there",
                self._requests.where,
                hint="list the folder above, or read the objects by name",
            )
        store = self._stores.bucket(bucket)
        about = ObjectId(self._cache, bucket, prefix or b"/")
        if delimited:
            entries = self._level(store, path, about, call)
        else:
            entries = self._below(store, path, self._offset(prefix, after), about, call)
        last = after or b""
        for entry in entries:
            if entry.key <= last or not entry.key.startswith(prefix):
                if entry.key > prefix and not entry.key.startswith(prefix):
                    return
                continue
            last = entry.key
            yield entry

    def _offset(self, prefix: bytes, after: bytes | None) -> str | None:
        """A name that comes before all that is wanted; the store starts behind it."""
        return plain_path(max(after or b"", prefix[:-1]))

    def _level(
        self, store: Store, path: str, about: ObjectId, call: Call
    ) -> Iterator[ListedObject | ListedPrefix]:
        request = partial(obstore.list_with_delimiter_async, store, path or None)
        found = self._run(request, about, call)
        entries: list[ListedObject | ListedPrefix] = [
            ListedPrefix(prefix.encode() + b"/") for prefix in found["common_prefixes"]
        ]
        entries += [self._object(store, meta, about, call) for meta in found["objects"]]
        return iter(sorted(entries, key=lambda entry: entry.key))

    def _below(
        self, store: Store, path: str, offset: str | None, about: ObjectId, call: Call
    ) -> Iterator[ListedObject]:
        pages = _Pages(store, path, offset)
        previous = b""
        while (metas := self._run(pages.following, about, call, pages.restart)) is not None:
            for meta in metas:
                entry = self._object(store, meta, about, call)
                if entry.key <= previous:
                    raise broken_protocol("it does not list in order", self._requests.where)
                previous = entry.key
                yield entry

    def _object(self, store: Store, meta: Any, about: ObjectId, call: Call) -> ListedObject:
        key = meta["path"].encode()
        if meta["size"] == 0 and not self._exists(store, meta["path"], about, call):
            key += b"/"
        return ListedObject(key, meta["size"], as_etag(meta["e_tag"]))

    def _exists(self, store: Store, path: str, about: ObjectId, call: Call) -> bool:
        try:
            self._run(partial(obstore.head_async, store, path), about, call)
        except RequestError as error:
            if error.code != "not_found":
                raise
            return False
        return True

    def _run(
        self,
        request: Callable[[], Any],
        about: ObjectId,
        call: Call,
        restart: Callable[[], None] = lambda: None,
    ) -> Any:
        def attempt() -> Any:
            try:
                return self._requests.run(request, about, call)
            except BaseException:
                restart()
                raise

        return self._retries.run(attempt, call)


class _Pages:
    """A recursive listing, page by page; after a failure it goes on behind the last page."""

    def __init__(self, store: Store, path: str, offset: str | None) -> None:
        self._store = store
        self._path = path
        self._offset = offset
        self._stream: Any = None

    def restart(self) -> None:
        self._stream = None

    async def following(self) -> Any:
        if self._stream is None:
            self._stream = obstore.list(
                self._store, self._path or None, offset=self._offset, chunk_size=_CHUNK
            )
        try:
            metas = await anext(aiter(self._stream))
        except StopAsyncIteration:
            return None
        if metas:
            self._offset = metas[-1]["path"]
        return metas
