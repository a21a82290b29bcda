"""Whether, and how long, a load shares memory with the other readers of its model.

Layer: loading; any thread. `share="auto"` asks for every piece until the daemon says that it shares
nothing; where it has no room just now, that one piece is read into memory of our own. Either is
said once. A piece is asked for once, however many chunks of the plan have a part of it: it is kept
from the first of them to the last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Literal

from racer.errors import BadRequest, MemoryUnavailable, RacerError, ShareRefused
from racer.loading.plan import Chunk, LoadPlan
from racer.models.source import Source, SourceFile, SourceShare

ShareMode = Literal["auto", "off"]

_OFF_CODES = ("share_off", "unknown_operation", "method_not_allowed")

_log = logging.getLogger("racer.load")


class _Piece:
    """A piece of a file. What is kept of it is closed when no chunk will come for it any more, and
    nobody has it in use: a descriptor that is closed under a reader may be another file's by then.
    """

    __slots__ = ("expected", "in_use", "lock", "share")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # Held while the piece is asked for.
        self.share: SourceShare | None = None
        self.expected = 0  # Chunks that are not through with it yet.
        self.in_use = 0  # Takers of `share` that have not put it back yet.

    def close_if_unused(self) -> None:
        if self.share is not None and self.expected <= 0 and not self.in_use:
            self.share.close()
            self.share = None


class Sharing:
    """The shared pieces of one load. `refused` counts those that could not be had, by reason.

    `expect` the plan before the first piece is asked for. What `there` and `piece` give is put back
    (`put_back`) by whoever asked, and a chunk says when it is `through` with a part of its file.
    `close` gives up what is still kept.
    """

    def __init__(self, source: Source, mode: ShareMode) -> None:
        """Asks the source, where the mode says so, whether it shares at all."""
        self._source = source
        self.piece_bytes = source.share_bytes if mode == "auto" else 0
        self._on = self.piece_bytes > 0
        self.began = self._on
        self.refused: dict[str, int] = {}
        self._pieces: dict[tuple[str, int], _Piece] = {}

    def expect(self, plan: LoadPlan) -> None:
        if not self._on:
            return
        for chunk in plan.chunks:
            for at in range(self._start_of(chunk.start), chunk.stop, self.piece_bytes):
                piece = self._pieces.setdefault((chunk.file.url, at), _Piece())
                piece.expected += 1

    def is_at_hand(self, chunk: Chunk) -> bool:
        """Whether all that the chunk will ask for is here, so that nobody has to be waited for."""
        return self._on and self._is_there(chunk, self._source.shared_at_hand)

    def survey(self, chunk: Chunk) -> None:
        """Finds out what of the chunk others share, and of what follows: that is at hand then.

        Asks only where no answer has told yet, which is short, and opens nothing.
        """
        if self._on:
            self._is_there(chunk, self._source.shared_already)

    def _is_there(self, chunk: Chunk, ask: Callable[[SourceFile, int], SourceShare | None]) -> bool:
        """Whether `ask` gives all pieces of the chunk, which are kept."""
        at = chunk.start
        while at < chunk.stop:
            share = self._get(chunk.file, at, ask)
            if share is None:
                return False
            stop, kept = share.stop, share is self._piece_of(chunk.file, at).share
            self.put_back(chunk.file, at, share)
            if not kept:
                return False
            at = stop
        return True

    def there(self, file: SourceFile, at: int) -> SourceShare | None:
        """The piece that holds byte `at`, where others share it already, without waiting."""
        return self._get(file, at, self._source.shared_already) if self._on else None

    def piece(self, file: SourceFile, at: int) -> SourceShare | None:
        """The shared memory that holds byte `at`; or None."""
        if not self._on:
            return None
        try:
            return self._get(file, at, self._source.share)
        except (ShareRefused, MemoryUnavailable, BadRequest) as error:
            if isinstance(error, BadRequest) and error.code not in _OFF_CODES:
                raise
            self._note(error)
            return None

    def _get(
        self, file: SourceFile, at: int, ask: Callable[[SourceFile, int], SourceShare | None]
    ) -> SourceShare | None:
        """What is kept, or else what `ask` gives. The caller puts it back."""
        piece = self._piece_of(file, at)
        with piece.lock:
            share = piece.share
            if share is None or not share.start <= at < share.stop:
                share = ask(file, at)
                # Pieces are cut as the daemon said, unless it is another one by now: what is cut
                # otherwise is the caller's alone.
                if share is not None and piece.share is None and share.start == self._start_of(at):
                    piece.share = share
            if share is not None and share is piece.share:
                piece.in_use += 1
            return share

    def put_back(self, file: SourceFile, at: int, share: SourceShare) -> None:
        """Who was given `share` for byte `at` touches its descriptor no more."""
        piece = self._piece_of(file, at)
        with piece.lock:
            if share is not piece.share:
                share.close()
                return
            piece.in_use -= 1
            piece.close_if_unused()

    def through(self, chunk: Chunk, start: int, stop: int) -> None:
        """The chunk has its bytes [start, stop), from wherever: it asks for none of them again."""
        if not self.began:
            return
        # All pieces that end in there, and the chunk's last one; each is told once, however the
        # bytes were cut.
        first = self._start_of(start)
        end = stop if stop >= chunk.stop else self._start_of(stop)
        for at in range(first, end, self.piece_bytes):
            piece = self._pieces[chunk.file.url, at]
            with piece.lock:
                piece.expected -= 1
                piece.close_if_unused()

    def close(self) -> None:
        """Closes what is kept; when no chunk is being read any more."""
        for piece in self._pieces.values():
            if piece.share is not None:
                piece.share.close()
                piece.share = None

    def end_of_piece(self, at: int) -> int:
        """Where the piece with byte `at` ends; what is shared is not in pieces: nowhere."""
        if not self.began:
            return 1 << 63
        return self._start_of(at) + self.piece_bytes

    def _piece_of(self, file: SourceFile, at: int) -> _Piece:
        return self._pieces[file.url, self._start_of(at)]

    def _start_of(self, at: int) -> int:
        return at - at % self.piece_bytes

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
