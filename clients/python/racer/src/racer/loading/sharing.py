"""Whether, and how long, a load shares memory with the other readers of its model.

Layer: loading; any thread. `share="auto"` asks for every piece until the daemon says that it shares
nothing; where it has no room just now, that one piece is read into memory of our own. Either is
said once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from racer.errors import BadRequest, MemoryUnavailable, RacerError, ShareRefused
from racer.models.source import Source, SourceFile, SourceShare

ShareMode = Literal["auto", "off"]

_OFF_CODES = ("share_off", "unknown_operation", "method_not_allowed")

_log = logging.getLogger("racer.load")


class Sharing:
    """The shared pieces of one load. `refused` counts those that could not be had, by reason."""

    def __init__(self, source: Source, mode: ShareMode) -> None:
        """Asks the source, where the mode says so, whether it shares at all."""
        self._source = source
        self.piece_bytes = source.share_bytes if mode == "auto" else 0
        self._on = self.piece_bytes > 0
        self.began = self._on
        self.refused: dict[str, int] = {}

    def there(self, file: SourceFile, at: int) -> SourceShare | None:
        """The piece that holds byte `at`, where others share it already, without waiting."""
        return self._source.shared_already(file, at) if self._on else None

    def piece(self, file: SourceFile, at: int) -> SourceShare | None:
        """The shared memory that holds byte `at`, which the caller closes; or None."""
        if not self._on:
            return None
        try:
            return self._source.share(file, at)
        except (ShareRefused, MemoryUnavailable, BadRequest) as error:
            if isinstance(error, BadRequest) and error.code not in _OFF_CODES:
                raise
            self._note(error)
            return None

    def end_of_piece(self, at: int) -> int:
        """Where the piece with byte `at` ends; what is shared is not in pieces: nowhere."""
        if not self.began:
            return 1 << 63
        return at - at % self.piece_bytes + self.piece_bytes

    def _note(self, error: RacerError) -> None:
        first = error.code not in self.refused
        self.refused[error.code] = self.refused.get(error.code, 0) + 1
        if error.code in _OFF_CODES:
            self._on = False
        if first:
            _log.warning("reading into memory of our own instead of shared memory: %s", error)


def add_rungs(total: dict[str, int], rungs: Mapping[str, int]) -> None:
    for rung, nbytes in rungs.items():
        total[rung] = total.get(rung, 0) + nbytes


def share_of(rungs: Mapping[str, int], wanted: int) -> Mapping[str, int]:
    """`rungs` of a whole piece, as far as `wanted` bytes of it go: in proportion, whole bytes."""
    whole = sum(rungs.values())
    if whole == wanted or not whole:
        return rungs
    shares = {rung: nbytes * wanted // whole for rung, nbytes in rungs.items()}
    largest = max(shares, key=shares.__getitem__)
    shares[largest] += wanted - sum(shares.values())
    return shares
