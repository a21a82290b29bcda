"""What an acquisition yields: a source of one page's bytes, held until it is released.

Layer: read; loop thread, but for the bytes themselves. A source is either a lease on sealed frames
(`PageLease`: from memory or a disk), or a share of a page of plaintext that an origin has just
sent. Plaintext is charged to its budget until the last share ends, and then dropped.

It lies in a room of its own, or in the **place** that the flight's leader has for it: memory of
this process that is handed to readers later, so that nothing needs to be copied there. Never a
client's memory: the client could write to it while it is sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from racerd.ids import PageId
from racerd.read.memory import PageLease


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where bytes may land. `settled` shows what `writable` holds, and nobody can write through it:
    it stays good when writing has ended. Who has `writable` lets go of it as soon as it is filled.
    """

    writable: memoryview
    settled: memoryview

    def part(self, start: int, length: int) -> Place:
        stop = start + length
        return Place(self.writable[start:stop], self.settled[start:stop])


class PlainPage:
    """A page of plaintext shared by the readers of one flight and by sealing."""

    __slots__ = ("_release", "_shares", "id", "view")

    def __init__(self, page: PageId, view: memoryview, release: Callable[[], None]) -> None:
        """`view` is not written to; `release` is called when the last share ends."""
        self.id = page
        self.view = view
        self._release = release
        self._shares = 0

    def _end_share(self) -> None:
        self._shares -= 1
        if self._shares == 0:
            self.view = memoryview(b"")
            self._release()


class PlainShare:
    """Keeps a `PlainPage` until `release`. Releasing twice is harmless."""

    __slots__ = ("_page", "rung")

    def __init__(self, page: PlainPage, rung: str) -> None:
        self._page: PlainPage | None = page
        self.rung = rung
        page._shares += 1

    @property
    def view(self) -> memoryview:
        assert self._page is not None, "a share that ended is not read"
        return self._page.view

    def lies_in(self, place: Place | None) -> bool:
        """Whether the page landed in just this place."""
        return place is not None and self.view is place.settled

    def share(self) -> PlainShare:
        assert self._page is not None, "a share that ended is not shared"
        return PlainShare(self._page, self.rung)

    def release(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page._end_share()


Source = PageLease | PlainShare
