"""The element types of the format and how many bits each takes.

Layer: bottom, pure. What numpy and torch call them is `racer.frameworks`' business.
"""

from __future__ import annotations

from typing import Final

BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,  # E2M1; two to a byte
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Legal in a file, but neither torch nor numpy has a type that could hold their packed bits.
UNREADABLE: Final[frozenset[str]] = frozenset({"F6_E2M3", "F6_E3M2"})
