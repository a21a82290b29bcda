"""Headers of local files.

Layer: format, driver. Reads only the header, never a payload byte; blocks on the file.
"""

from __future__ import annotations

import os
import stat

from racer.safetensors.errors import SafetensorsError
from racer.safetensors.header import LENGTH_BYTES, Header, header_stop_untrusted, parse_header


def parse_file(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Header:
    """The checked header of the file at `path`.

    Raises SafetensorsError if it is not a safetensors file, OSError if it cannot be read.
    """
    name = os.fsdecode(path)
    # O_NONBLOCK: opening a FIFO must not wait for a writer; it means nothing for files.
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SafetensorsError("not a regular file", file=name)
        length = _read(descriptor, 0, min(LENGTH_BYTES, status.st_size), name)
        stop = header_stop_untrusted(length, status.st_size, file=name)
        rest = _read(descriptor, LENGTH_BYTES, stop, name)
        return parse_header(length + rest, status.st_size, file=name)
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, stop: int, name: str) -> bytes:
    parts: list[bytes] = []
    while start < stop:
        part = os.pread(descriptor, stop - start, start)
        if not part:
            raise SafetensorsError(f"shrank while it was read: ends at byte {start:,}", file=name)
        parts.append(part)
        start += len(part)
    return b"".join(parts)
