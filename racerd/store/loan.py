"""Records on loan: read by somebody else than the store, who has a descriptor of the slab.

Layer: store; safe from any thread. The borrower reads the ciphertext where it lies, with cuFile,
and verifies it with the seal; the store has read and checked the header only. While the loan lasts
the record's segment is not given to other records.

A slab that was opened again has another number: what was borrowed from the one before stays
readable through the descriptors that were made then, and no new loan names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from racerd.pages import Seal


@dataclass(frozen=True, slots=True)
class NotLent:
    """Why a record is not lent; `reason` is a metric's label."""

    reason: str


class RecordLoan:
    """One record, whose ciphertext starts at `data_offset` of slab `slab`, frames back to back.

    The offset is a multiple of 4 KiB, and what follows the last frame up to the next one belongs
    to the record. Ends with `release`; releasing twice is harmless.
    """

    __slots__ = ("_release", "_reopen", "data_offset", "seal", "slab")

    def __init__(
        self,
        slab: int,
        data_offset: int,
        seal: Seal,
        *,
        reopen: Callable[[], int],
        release: Callable[[], None],
    ) -> None:
        self.slab = slab
        self.data_offset = data_offset
        self.seal = seal
        self._reopen = reopen
        self._release: Callable[[], None] | None = release

    def open_slab(self) -> int:
        """A new descriptor of the slab, for direct reads, which the caller closes.

        Raises DiskError where the slab has been closed meanwhile.
        """
        return self._reopen()

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
