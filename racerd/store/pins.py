"""The pins of a store: what eviction spares, on every disk alike.

Layer: store; thread-safe. Changing a pin does I/O and belongs on a disk thread; looking does none.
Each disk's slab notes all pins with the version of the change; the latest version counts, whichever
disks were there at the time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from racerd.errors import ResourceError, Retry
from racerd.store.disk import Disk
from racerd.store.notes import Notes, Selector


class Pins:
    """Of the store on `disks`."""

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._disks = disks
        self._selectors: tuple[Selector, ...] = ()
        self._version = 0
        self._changing = threading.Lock()  # Held during I/O: never by who only looks.

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """What is pinned, in the order in which it was."""
        latest = self._latest_notes()
        return latest.pins if latest.pins_version > self._version else self._selectors

    @property
    def room_bytes(self) -> int:
        """Slab bytes that may still be pinned, over all caches."""
        return max(0, sum(disk.pinned_bytes_max - disk.pinned_bytes for disk in self._disks))

    def held(self, selectors: Sequence[Selector]) -> tuple[int, int]:
        """Pages that any of `selectors` names, and the slab bytes that they take."""
        counts = [disk.held(selectors) for disk in self._disks]
        return sum(pages for pages, _ in counts), sum(size for _, size in counts)

    def add(self, selector: Selector) -> None:
        """See `Store.pin`."""
        with self._changing:
            self._learn()
            before = self._selectors
            if selector in before:
                return
            pins = (*before, selector)
            self._check(pins)
            if not self._set(pins):
                self._set(before)
                raise _not_noted("pin")

    def remove(self, selector: Selector) -> bool:
        """See `Store.unpin`."""
        with self._changing:
            self._learn()
            before = self._selectors
            if selector not in before:
                return False
            if not self._set(tuple(pin for pin in before if pin != selector)):
                self._set(before)
                raise _not_noted("unpin")
            return True

    def agree(self) -> None:
        """Disks that were away when pins changed learn the latest ones, or will when they open."""
        with self._changing:
            self._learn()
            for disk in self._disks:
                if not disk.opened or disk.notes.pins_version != self._version:
                    disk.set_pins(self._selectors, self._version)

    def _learn(self) -> None:
        """A disk that was opened late may know later pins than those that were there before."""
        latest = self._latest_notes()
        if latest.pins_version > self._version:
            self._selectors, self._version = latest.pins, latest.pins_version

    def _latest_notes(self) -> Notes:
        """The notes with the latest pins, of the disks that are open."""
        return max((disk.notes for disk in self._disks), key=_version_of, default=Notes())

    def _check(self, pins: tuple[Selector, ...]) -> None:
        limit = sum(disk.pinned_bytes_max for disk in self._disks)
        if not limit:
            raise _refused(
                "no disk is in use, and pins are about disks",
                "configure a disk, or look at /readyz for why none works",
            )
        if not Notes(pins=pins).fits:
            raise _refused(
                f"{len(pins)} pins do not fit on a slab",
                "pin a prefix instead of many objects, or take pins back",
            )
        _, wanted = self.held(pins)
        if wanted > limit:
            raise _refused(
                f"{wanted} bytes of the disks would be pinned, and at most {limit} may be",
                "take pins back, pin less, or give racerd more disk",
            )

    def _set(self, pins: tuple[Selector, ...]) -> bool:
        """Returns whether a disk has noted them."""
        self._selectors = pins
        self._version += 1
        # Every disk is told, whether or not an earlier one has noted them.
        noted = [disk.set_pins(pins, self._version) for disk in self._disks]
        return any(noted)


def _refused(message: str, hint: str) -> ResourceError:
    return ResourceError("pin_refused", message, hint=hint)


def _not_noted(what: str) -> ResourceError:
    return ResourceError(
        "overloaded",
        f"no disk could note the {what}: it would be forgotten at the next start",
        hint="try again; the log and /readyz say what is wrong with the disks",
        retry=Retry.SAME,
        retry_after_seconds=5.0,
    )


def _version_of(notes: Notes) -> int:
    return notes.pins_version
