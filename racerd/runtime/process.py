"""Facts about this process, for metrics: descriptors and resident memory.

Layer: bottom. Reads /proc; cheap enough for every scrape.
"""

from __future__ import annotations

import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def open_descriptors() -> int:
    """Descriptors open now, this call's own left out."""
    return len(os.listdir("/proc/self/fd")) - 1


def resident_bytes() -> int:
    """Resident memory, client memory that is mapped here included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
