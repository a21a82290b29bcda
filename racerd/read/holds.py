"""Plaintext that streams would like to keep for their next chunk, given up as soon as it is missed.

Layer: read; loop thread only. A page that could not be kept would be fetched from its origin again
for every chunk of a stream, so a stream holds on to its plaintext. But whoever holds plaintext and
waits for more can wait for ever, for another who does the same. So a hold is only a wish: when
somebody finds the plaintext budget spent, holds are taken back, oldest first, before anybody waits,
and none is granted while somebody does.
"""

from __future__ import annotations

from collections import OrderedDict

from racerd.read.sources import PlainShare
from racerd.runtime.budget import FairBudget


class PlainHold:
    """A share until `release` or until it is taken back, whichever comes first."""

    __slots__ = ("_holds", "_share")

    def __init__(self, holds: Holds, share: PlainShare) -> None:
        self._holds = holds
        self._share: PlainShare | None = share

    def share(self) -> PlainShare | None:
        """A share of its own for the caller, or None where the hold was taken back."""
        return None if self._share is None else self._share.share()

    def release(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            self._holds._forget(self)
            share.release()


class Holds:
    """The holds on one budget. Tells the budget how to get its bytes back."""

    def __init__(self, plaintext: FairBudget) -> None:
        self._plaintext = plaintext
        self._held: OrderedDict[PlainHold, None] = OrderedDict()
        plaintext.reclaim = self._take_back_one

    def hold(self, share: PlainShare) -> PlainHold | None:
        """Holds the page of `share`, which stays the caller's; None while anybody waits."""
        if self._plaintext.waiting:
            return None
        hold = PlainHold(self, share.share())
        self._held[hold] = None
        return hold

    def _take_back_one(self) -> bool:
        if not self._held:
            return False
        next(iter(self._held)).release()
        return True

    def _forget(self, hold: PlainHold) -> None:
        del self._held[hold]
