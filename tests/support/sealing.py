"""Sealing a memfd against writing, as racerd does with what it shares."""

from __future__ import annotations

import errno
import fcntl

_TRIES = 20


def seal_writing(fd: int, seals: int = 0) -> None:
    """Adds F_SEAL_WRITE and `seals`. EBUSY: the kernel itself holds one of the pages, for now."""
    for _ in range(_TRIES):
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | seals)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    raise AssertionError("a page of a new memfd is held all the time")
