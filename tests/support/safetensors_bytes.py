"""Writes safetensors files for tests: right ones, and ones whose header is any text."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

BITS = {"BOOL": 8, "F4": 4, "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I32": 32, "U32": 32}
BITS |= {"F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "U8": 8, "I8": 8}
BITS |= {f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}


def raw_file(header: str | bytes, data: bytes = b"") -> bytes:
    """A file with this header text, whatever it is, and this data."""
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def byte_count(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    assert count * BITS[dtype] % 8 == 0
    return count * BITS[dtype] // 8


def pattern(count: int, seed: int) -> bytes:
    """`count` bytes that tell where they belong: seeds and places differ."""
    block = bytes((seed * 37 + index) % 251 for index in range(251))
    return (block * (count // 251 + 1))[:count]


def model_file(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    *,
    metadata: Mapping[str, str] | None = None,
    seed: int = 0,
    header_pad: int = 0,
) -> tuple[bytes, dict[str, bytes]]:
    """A right file, and the bytes of each tensor. BOOL tensors hold only 0 and 1."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data, contents = b"", {}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        content = pattern(byte_count(dtype, shape), seed + number)
        if dtype == "BOOL":
            content = bytes(byte & 1 for byte in content)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        contents[name] = content
        data += content
    return raw_file(json.dumps(header) + " " * header_pad, data), contents
