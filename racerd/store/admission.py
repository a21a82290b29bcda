"""Admission: which pages are worth a write.

Layer: store. The seam is one method. A node's own pages are kept when they are first seen; pages
that belong to other nodes only when they are asked for again, since the next node has them anyway.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Protocol

from racerd.ids import PageId
from racerd.store.catalog import halves
from racerd.store.columns import U64, mixed

_SIGHTINGS = 1 << 16


class Admission(Protocol):
    """Says whether a page should be written. Called on disk threads; must not block."""

    def admit(self, page: PageId) -> bool: ...


class EverythingAtFirstSight:
    """For a node without peers: all pages are its own."""

    def admit(self, page: PageId) -> bool:
        return True


class OthersAtSecondSight:
    """Own pages at first sight, others at second. Remembers about the last 65,536 sightings.

    `owns` tells whether this node is a page's first provider. Memory is fixed: a sighting that
    falls into a taken place replaces what was there, which costs that page one more sighting.
    """

    def __init__(self, owns: Callable[[PageId], bool]) -> None:
        self._owns = owns
        self._seen = array("Q", bytes(8 * _SIGHTINGS))
        self._lock = threading.Lock()

    def admit(self, page: PageId) -> bool:
        if self._owns(page):
            return True
        mark = mixed(halves(page.version.digest)[0] + page.index & U64) | 1
        place = mark >> 48
        with self._lock:
            seen = self._seen[place] == mark
            self._seen[place] = 0 if seen else mark
        return seen
