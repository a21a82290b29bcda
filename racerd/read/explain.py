"""What `racer explain` tells: which rung serves a page, why no earlier one, who did last.

Layer: read, values and one bounded record; loop thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from racerd.ids import PageId


@dataclass(frozen=True, slots=True)
class PageExplanation:
    """`rung` would serve page `index` now; `why` has a sentence for each rung before it.

    `last`: the rung of the last read that is remembered and its age in seconds.
    """

    index: int
    rung: str
    why: dict[str, str]
    last: tuple[str, float] | None


class ServeRecord:
    """The rung and time of the last read of each of the last `pages_max` pages."""

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._last: OrderedDict[tuple[bytes, int], tuple[str, float]] = OrderedDict()

    def note(self, page: PageId, rung: str) -> None:
        self._last[page.key] = (rung, time.monotonic())
        self._last.move_to_end(page.key)
        if len(self._last) > self._pages_max:
            self._last.popitem(last=False)

    def last(self, page: PageId) -> tuple[str, float] | None:
        found = self._last.get(page.key)
        return None if found is None else (found[0], max(0.0, time.monotonic() - found[1]))
