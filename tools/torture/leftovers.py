"""What processes have left behind in a folder: open descriptors, locks, sockets, files.

Layer: torture; reads /proc. Whatever is told here would be somebody's to clean up by hand.
"""

from __future__ import annotations

import os
from pathlib import Path


def files_below(folder: Path) -> set[str]:
    """Names of all files, sockets and links below `folder`, relative to it."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or
        not path.is_dir()
    }  # fmt: skip


def held_below(folder: Path) -> list[str]:
    """Descriptors, mappings, locks and sockets that any process still has below `folder`."""
    return [*_open_files(folder), *_locks(folder), *_sockets(folder)]


def _open_files(folder: Path) -> list[str]:
    inside = f"{folder}{os.sep}"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for place in ("fd", "map_files"):
            try:
                links = list((process / place).iterdir())
            except OSError:
                continue  # It has ended, or is not ours to look at.
            for link in links:
                try:
                    target = os.readlink(link)
                except OSError:
                    continue  # Closed meanwhile.
                if target.startswith(inside):
                    found.append(f"process {process.name} has {target} open ({place})")
    return found


def _locks(folder: Path) -> list[str]:
    """Locks on inodes of the folder: /proc/locks names them as major:minor:inode."""
    inodes = {path.stat().st_ino: path for path in folder.rglob("*") if path.is_file()}
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        place = next((each for each in fields if each.count(":") == 2), "::0")
        inode = int(place.rpartition(":")[2])
        if inode in inodes:
            found.append(f"a lock on {inodes[inode]} is left: {line}")
    return found


def _sockets(folder: Path) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    inside = f"{folder}{os.sep}"
    return [f"a socket is left: {line}" for line in lines if inside in line]
