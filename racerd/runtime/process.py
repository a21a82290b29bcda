"""Facts about this process, for metrics: descriptors and resident memory; and its limit of files.

Layer: bottom. Reads /proc; cheap enough for every scrape.
"""

from __future__ import annotations

import os
import resource

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def allow_many_descriptors() -> int:
    """Raises the soft limit of open files to the hard one, and returns it.

    Shells and units start processes with 1,024, which is there for programs that use select(2). A
    connection takes a descriptor here, and so does each piece of shared memory.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def descriptors_max() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_descriptors() -> int:
    """Descriptors open now, this call's own left out."""
    return len(os.listdir("/proc/self/fd")) - 1


def resident_bytes() -> int:
    """Resident memory, client memory that is mapped here included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
