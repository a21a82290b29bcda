"""Byte sizes: constants, parsing and printing.

Layer: bottom, pure. Sizes are whole bytes everywhere inside; only people see units.
"""

from __future__ import annotations

import re
from fractions import Fraction

BytesLike = bytes | bytearray | memoryview

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_TEXT_MAX = 64
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Returns the size that `text` names: `4096`, `256MiB`, `1.5 GiB`, `10GB`.

    Raises ValueError with a sentence for a person; never guesses a unit.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _TEXT_MAX else None
    if match is None:
        shown = text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "…"
        raise ValueError(f"{shown!r} is not a byte size: write a number, or 256MiB, or 1.5GiB")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}: use B, KiB, MiB, GiB, TiB")
    size = Fraction(number) * factor  # Exact: a float would lose bytes of large sizes.
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return size.numerator


def format_bytes(size: int) -> str:
    """Returns `size` in the largest binary unit that keeps it readable: `1.5 GiB`, `17 B`."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            value = size / factor
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{size} B"


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
