"""Jumps of the wall clock, for one process: a shim that is compiled here and preloaded there."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

YEAR_SECONDS = 365 * 86_400


class WallClock:
    """`environ` gives it to a process; `jump` then moves that process's wall clock."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise RuntimeError("there is no C compiler, which README.md asks for")
        self._library = folder / "wall_clock.so"
        source = Path(__file__).with_suffix(".c")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
        subprocess.run([*command, "-o", self._library, source], check=True)
        self._offset = folder / "wall_clock.offset"
        self._offset.write_bytes(bytes(mmap.PAGESIZE))

    @property
    def environ(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Sets how far the wall clock is ahead of the true one (behind, if negative)."""
        fd = os.open(self._offset, os.O_RDWR)
        try:
            with mmap.mmap(fd, mmap.PAGESIZE) as page:
                struct.pack_into("=q", page, 0, seconds)
        finally:
            os.close(fd)
