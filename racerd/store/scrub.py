"""The scrubber: reads what nobody asks for, to find rot before somebody does.

Layer: store; blocking, on a thread that the app starts. It needs no keys: every frame's ciphertext
has a CRC in the record's header. What is damaged is dropped and counted; the next read fetches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

_IDLE_SECONDS = 5.0


class Scrubbed(Protocol):
    """A disk as the scrubber sees it."""

    def scrub_next(self) -> int | None:
        """Checks the next record. Returns the bytes read, or None at the end of a round."""


class Scrubber:
    """Goes round `disks` at `bytes_per_second` in all."""

    def __init__(self, disks: Sequence[Scrubbed], bytes_per_second: int) -> None:
        self._disks = disks
        self._bytes_per_second = bytes_per_second

    def run(self, stop: threading.Event, pause: Callable[[float], object] | None = None) -> None:
        """Scrubs until `stop` is set. `pause` waits some seconds; the event's own by default.

        After each record it rests for as long as the rate wants; after a round without any record
        five seconds. Returns at once if the rate is 0.
        """
        wait = pause if pause is not None else stop.wait
        while self._bytes_per_second and not stop.is_set():
            checked = 0
            for disk in self._disks:
                while not stop.is_set() and (size := disk.scrub_next()) is not None:
                    checked += 1
                    wait(size / self._bytes_per_second)
            if not checked:
                wait(_IDLE_SECONDS)
