"""Byte sizes as people write and read them.

Layer: cli, pure.
"""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?", re.ASCII)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """Returns the size that `4096`, `4KiB`, `1.5GiB` or `10GB` names."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 4096, 4KiB, 1.5GiB or 10GB")
    number, unit = match.group(1), match.group(2) or "B"
    factor = 1 if unit == "B" else (1024 if "i" in unit else 1000) ** _POWERS[unit[0]]
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_bytes(size: int) -> str:
    """Returns `size` with three digits or so: `17 B`, `1.5 GiB`."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Returns `1 file`, `2 files`: a noun with the plural that most have."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_rate(size: int, seconds: float) -> str:
    """Bytes a second, in GB/s (powers of ten, as disks and networks are sold)."""
    return f"{size / max(seconds, 1e-9) / 1e9:.2f} GB/s"
