"""What has to be gone by itself: the garbage collector of a daemon with little to do comes late."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Nothing that refers to itself goes inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
