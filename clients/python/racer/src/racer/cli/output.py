"""What is shown: tables, JSON, a progress bar.

Layer: cli. Names come from origins: control characters in them are shown escaped, so that a key
cannot drive the terminal. JSON carries them as they are.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from racer.cli.units import format_bytes, format_rate

_REDRAW_SECONDS = 0.1
_BAR_CELLS = 30


def printable(text: str) -> str:
    """`text` with everything that a terminal could obey escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: Any) -> None:
    """One line of JSON."""
    print(json.dumps(value, separators=(",", ":")))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> None:
    """Prints columns as wide as they need. `right` has an `r` for each one set to the right."""
    lines = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def rungs_text(rungs: Mapping[str, int]) -> str:
    """`memory 1.2 GiB, disk 3.0 MiB`."""
    return ", ".join(f"{rung} {format_bytes(n)}" for rung, n in rungs.items() if n)


class ProgressBar:
    """A line that fills up, on a terminal only; any thread may `add`. A context manager."""

    def __init__(self, title: str, total_bytes: int, *, shown: bool) -> None:
        self.done_bytes = 0
        self._title = title
        self._total_bytes = total_bytes
        self._shown = shown and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._drawn = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, size: int) -> None:
        with self._lock:
            self.done_bytes += size
            now = time.monotonic()
            if self._shown and now - self._drawn >= _REDRAW_SECONDS:
                self._drawn = now
                self._draw()

    def _draw(self) -> None:
        share = min(1.0, self.done_bytes / max(1, self._total_bytes))
        full = int(_BAR_CELLS * share)
        bar = "█" * full + "░" * (_BAR_CELLS - full)
        rate = format_rate(self.done_bytes, self.seconds)
        text = f"{self._title} {bar} {100 * share:3.0f} %  {format_bytes(self.done_bytes)}  {rate}"
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
