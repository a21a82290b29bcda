"""Which descriptors belong to which head: the kernel's rule as a pure state machine (R5).

Layer: wire, pure. Descriptors are opaque tokens here. Nothing is closed: tokens are handed back to
be closed, and every token that comes in goes out exactly once.

A read of a Unix stream stops after the chunk that carried descriptors, and a client sends a head's
descriptors with the first byte of the head. So the descriptors of one receive belong to the last
head that starts in its bytes. Heads are taken out of a receive one by one; when one ends and bytes
remain, another starts in the same receive, and its descriptors are carried to that one.

Descriptors that come in the middle of a head, in bytes where none starts, are nobody's: the peer
broke the rule, and guessing could hand one request's memory to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NoReturn, TypeVar

from racerd.errors import ProtocolError

D = TypeVar("D")

DESCRIPTORS_PER_HEAD_MAX = 4


class DescriptorLedger(Generic[D]):
    """The descriptors of one connection that no request has taken yet.

    For each receive: `arrived`, then `head_ended` for each head that ends in it, then `settle`.
    A method that raises keeps the tokens; `release` gives them back.
    """

    __slots__ = ("_head_starts", "_latest", "_owned")

    def __init__(self) -> None:
        self._owned: list[D] = []  # Of the head being received, which started earlier.
        self._latest: list[D] = []  # Of the latest receive: go to the last head that starts in it.
        self._head_starts = False  # Whether one does, as far as is known.

    def __len__(self) -> int:
        return len(self._owned) + len(self._latest)

    def arrived(self, tokens: Sequence[D], *, head_starts: bool, truncated: bool = False) -> None:
        """Takes the tokens of one receive, before a head is taken out of it.

        `head_starts`: no head is half received, so the first byte of the receive starts one.
        `truncated`: the kernel dropped descriptors that did not fit (MSG_CTRUNC).
        Raises ProtocolError for more than a head may have, carried ones included.
        """
        self._latest.extend(tokens)
        self._head_starts = head_starts
        if truncated or len(self) > DESCRIPTORS_PER_HEAD_MAX:
            _refuse_too_many()

    def head_ended(self, *, bytes_remain: bool) -> tuple[D, ...]:
        """Returns what belongs to the head that just ended; the caller owns it from now on.

        Raises ProtocolError if descriptors came in its middle.
        """
        if bytes_remain:
            taken = tuple(self._owned)
            self._owned = []
            self._head_starts = True
            return taken
        self.settle()
        taken = tuple(self._owned)
        self._owned = []
        return taken

    def settle(self) -> None:
        """Ends a receive: what came with it now belongs to the head that is half received.

        Raises ProtocolError if descriptors came and no head starts in the receive.
        """
        if self._latest and not self._head_starts:
            _refuse_misplaced()
        self._owned.extend(self._latest)
        self._latest = []

    def release(self) -> tuple[D, ...]:
        """Gives back every token that is left, to be closed."""
        left = (*self._owned, *self._latest)
        self._owned, self._latest = [], []
        return left


def _refuse_too_many() -> NoReturn:
    raise ProtocolError(
        "bad_request",
        f"more than {DESCRIPTORS_PER_HEAD_MAX} descriptors came with one request",
        hint="send one descriptor, with the first byte of the request that takes it",
    )


def _refuse_misplaced() -> NoReturn:
    raise ProtocolError(
        "descriptor_unexpected",
        "a descriptor came in the middle of a request's head",
        hint="send a descriptor with the first byte of the request that takes it",
    )
