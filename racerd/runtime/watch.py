"""Notices that a file changed: settings and keys, also behind the symlinks of a mounted Secret.

Layer: bottom. Polls: Kubernetes swaps a symlink above the file, which inotify on the file misses.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

PERIOD_SECONDS = 2.0

Signature = tuple[int, int, int, int] | None


def signature(path: Path) -> Signature:
    """What changes whenever the file's content was replaced; None while there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


async def watch_files(paths: Sequence[Path], changed: Callable[[Path], None]) -> None:
    """Calls `changed(path)` after each change of one of `paths`, for ever. Cancel it to end it."""
    seen = {path: signature(path) for path in paths}
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        for path in paths:
            now = signature(path)
            if now != seen[path]:
                seen[path] = now
                changed(path)
