"""GPU UUIDs: 32 hex digits inside, and as `nvidia-smi -L` prints them outside.

Layer: gpu, pure; imports no CUDA.
"""

from __future__ import annotations

_GROUPS = (8, 4, 4, 4, 12)


def uuid_text(uuid: str) -> str:
    """`GPU-8-4-4-4-12` of 32 hex digits."""
    groups, at = [], 0
    for length in _GROUPS:
        groups.append(uuid[at : at + length])
        at += length
    return "GPU-" + "-".join(groups)


def uuid_digits(text: str) -> str:
    """32 hex digits of what `uuid_text` made."""
    return text.removeprefix("GPU-").replace("-", "")
