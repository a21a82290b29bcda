"""The pins of one cache: what eviction from the disks spares.

Layer: read; loop thread, the store's part on `disk` threads. A pin names an object or a prefix. It
fetches nothing, keeps across restarts, and says nothing about memory, which is for what is hot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from racerd.runtime.threads import WorkerThreads
from racerd.store import Selector, Store


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin, the pages on disk that it names, and the disk bytes that they take (their records,
    which are a little larger than what is in them)."""

    bucket: str
    key: bytes
    prefix: bool
    pages: int
    bytes: int


class CachePins:
    """Pins of the cache called `cache`; those of others are neither shown nor touched."""

    def __init__(self, cache: str, store: Store, threads: WorkerThreads) -> None:
        self._cache = cache
        self._store = store
        self._threads = threads

    @property
    def room_bytes(self) -> int:
        """Disk bytes that may still be pinned, by all caches together."""
        return self._store.pin_room_bytes

    async def pin(self, bucket: str, key: bytes, *, prefix: bool) -> Pin:
        """Pins; once more is harmless. Raises ResourceError `pin_refused`, `overloaded`.

        One that is cancelled may have been carried out.
        """
        selector = Selector(self._cache, bucket, key, exact=not prefix)

        def pin() -> Pin:
            self._store.pin(selector)
            return self._described(selector)

        return await self._threads.run(pin)

    async def unpin(self, bucket: str, key: bytes, *, prefix: bool) -> bool:
        """Takes back just this pin; returns whether it was there. Raises `overloaded`."""
        selector = Selector(self._cache, bucket, key, exact=not prefix)
        return await self._threads.run(partial(self._store.unpin, selector))

    async def all(self) -> list[Pin]:
        """In the order in which they were made."""
        own = [pin for pin in self._store.pins if pin.cache == self._cache]
        return await self._threads.run(lambda: [self._described(pin) for pin in own])

    def _described(self, pin: Selector) -> Pin:
        pages, size = self._store.held(pin)
        return Pin(pin.bucket, pin.key, not pin.exact, pages, size)
