"""How far a load is, in bytes: told to a callback or shown as a bar.

Layer: loading. Called from the consumer's thread; an exception of a callback ends the load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

ProgressCallback = Callable[[int, int], None]

_BAR_FORMAT = "{desc}: {percentage:3.0f}% | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"

_log = logging.getLogger("racer.load")


class Progress(Protocol):
    def update(self, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` were delivered."""

    def close(self) -> None:
        """Nothing follows."""


class Silent:
    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Tells nobody."""

    def close(self) -> None:
        """Tells nobody."""


class Callback:
    """`callback(done_bytes, total_bytes)` after each step."""

    def __init__(self, callback: ProgressCallback) -> None:
        self._callback = callback

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self._callback(done_bytes, total_bytes)

    def close(self) -> None:
        """A callback has no end."""


class Bar:
    """A tqdm bar on standard error."""

    def __init__(self, tqdm: Any, description: str) -> None:
        self._tqdm = tqdm
        self._description = description
        self._bar: Any = None

    def update(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = self._tqdm(
                total=total_bytes,
                desc=self._description,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                bar_format=_BAR_FORMAT,
            )
        self._bar.update(done_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def open_progress(progress: bool | ProgressCallback | None, description: str) -> Progress:
    """True shows a bar, where tqdm is installed; a function is called; else nobody is told."""
    if callable(progress):
        return Callback(progress)
    if not progress:
        return Silent()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        _log.warning("no progress bar: tqdm is not installed")
        return Silent()
    return Bar(tqdm, description)
