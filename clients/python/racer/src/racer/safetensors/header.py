"""The header of a safetensors file: parsed without trust, checked whole, before a payload byte.

Layer: format, pure. A file is 8 bytes of length N (little endian), N bytes of JSON, and the data:

    {"__metadata__": {"k": "v"}, "name": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}

Invariants of what `parse_header` returns: the tensors' ranges lie one behind the other, without
hole or overlap, from the end of the header to the end of the file; each range has exactly the bytes
that its dtype and shape ask for; no name occurs twice.

Where the format's text and its reference parser differ, the stricter reading holds, but for two
liberties of the reference parser that real files use: white space around the JSON, and unknown
fields of a tensor, which are ignored (they must be JSON, and repeat no key).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from racer.safetensors.dtypes import BITS, UNREADABLE
from racer.safetensors.errors import SafetensorsError, quoted
from racer.safetensors.strict_json import U64_MAX, StrictJsonError, loads_untrusted

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000

_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")


class TensorInfo(NamedTuple):
    """One tensor. `start` and `stop` are offsets in the file, half open; equal for no elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Header(NamedTuple):
    """What a file says it holds: tensors in the order of their bytes, and free-form strings."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]


def header_stop_untrusted(length: bytes, file_size: int, *, file: str | None = None) -> int:
    """Where the header ends, from the file's first 8 bytes. Nothing is allocated for it before.

    Raises SafetensorsError if the header is too large, or does not fit in the file.
    """
    if file_size < LENGTH_BYTES or len(length) < LENGTH_BYTES:
        have = min(file_size, len(length))
        raise SafetensorsError(
            f"too short for a header: {have} bytes, its length alone takes 8", file=file
        )
    header_bytes = int.from_bytes(length[:LENGTH_BYTES], "little")
    if header_bytes > HEADER_BYTES_MAX:
        raise SafetensorsError(
            f"the header claims {header_bytes:,} bytes, the limit is {HEADER_BYTES_MAX:,}",
            file=file,
            hint="is this a safetensors file?",
        )
    stop = LENGTH_BYTES + header_bytes
    if stop > file_size:
        raise SafetensorsError(
            f"the header ends at byte {stop:,}, behind the end of the file at {file_size:,}",
            file=file,
            hint="the file was cut short",
        )
    return stop


def parse_header(prefix: bytes, file_size: int, *, file: str | None = None) -> Header:
    """The header in `prefix`, the first bytes of a file of `file_size` bytes.

    `prefix` must reach to `header_stop_untrusted`; what lies behind is not looked at. `file` is
    what errors call the file. Raises SafetensorsError, whatever the bytes are, and TypeError for
    what has no bytes; any contiguous buffer does.
    """
    file_size = operator.index(file_size)
    with memoryview(prefix) as given, given.cast("B") as view:
        data_start = header_stop_untrusted(bytes(view[:LENGTH_BYTES]), file_size, file=file)
        if len(view) < data_start:
            raise SafetensorsError(
                f"the header ends at byte {data_start:,}, only {len(view):,} bytes were given",
                file=file,
            )
        text = bytes(view[LENGTH_BYTES:data_start])
    try:
        return _parse_untrusted(text, data_start, file_size)
    except SafetensorsError as error:
        error.file = file
        raise


def _parse_untrusted(text: bytes, data_start: int, file_size: int) -> Header:
    try:
        entries = loads_untrusted(text)
    except StrictJsonError as error:
        tensor = error.member if error.member != _METADATA else None
        raise SafetensorsError(f"header: {error.reason}", tensor=tensor) from error
    if type(entries) is not dict:
        raise SafetensorsError(f"header: {_kind(entries)} where an object is due")
    metadata = _metadata(entries.pop(_METADATA)) if _METADATA in entries else {}
    tensors = [_tensor(name, entry, data_start) for name, entry in entries.items()]
    # Stable: empty tensors at one offset keep the order of the header.
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_cover(tensors, data_start, file_size)
    return Header(tuple(tensors), metadata)


def _metadata(entry: Any) -> dict[str, str]:
    if type(entry) is not dict:
        raise SafetensorsError(f"{_METADATA} is {_kind(entry)}, not an object")
    for key, value in entry.items():
        if type(value) is not str:
            raise SafetensorsError(f"{_METADATA}: {quoted(key)} is {_kind(value)}, not a string")
    return entry


def _tensor(name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        if type(entry) is not dict:
            raise SafetensorsError(f"{_kind(entry)} where an object is due")
        missing = [field for field in _FIELDS if field not in entry]
        if missing:
            raise SafetensorsError(f"{' and '.join(missing)} missing")
        dtype, shape = entry["dtype"], entry["shape"]
        if type(dtype) is not str or dtype not in BITS:
            shown = quoted(dtype) if type(dtype) is str else _kind(dtype)
            raise SafetensorsError(f"dtype is {shown}, which the format does not know")
        start, stop = _offsets(entry["data_offsets"])
        _check_dimensions(shape)
        due = _bytes_due(dtype, shape)
        if stop - start != due:
            raise SafetensorsError(
                f"{dtype} of shape {_shown(shape)} takes {due:,} bytes, "
                f"data_offsets span {stop - start:,}"
            )
        if dtype in UNREADABLE:
            raise SafetensorsError(
                f"dtype {dtype} is legal, but no framework has a type for it", unsupported=True
            )
    except SafetensorsError as error:
        error.tensor = name
        raise
    return TensorInfo(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _offsets(offsets: Any) -> tuple[int, int]:
    if type(offsets) is not list or len(offsets) != 2:
        count = f" of {len(offsets)}" if type(offsets) is list else ""
        raise SafetensorsError(f"data_offsets is {_kind(offsets)}{count}, not a pair of integers")
    for offset in offsets:
        _check_u64("data_offsets", offset)
    start, stop = offsets
    if start > stop:
        raise SafetensorsError(f"data_offsets run backwards: {start:,} to {stop:,}")
    return start, stop


def _check_dimensions(shape: Any) -> None:
    if type(shape) is not list:
        raise SafetensorsError(f"shape is {_kind(shape)}, not an array of integers")
    for dimension in shape:
        _check_u64("shape", dimension)


def _check_u64(field: str, number: Any) -> None:
    # `type(…) is int` keeps bool out; -0 and what is over 64 bits came as floats.
    if type(number) is not int:
        raise SafetensorsError(
            f"{field} holds {_kind(number)}; every number in it is an unsigned 64-bit integer"
        )
    if number < 0:
        raise SafetensorsError(f"{field} holds {number}, which is negative")


def _bytes_due(dtype: str, shape: list[int]) -> int:
    """Bytes of the elements. No step may leave 64 bits: a reader in C must come to the same."""
    count = 1
    for dimension in shape:
        count *= dimension
        if count > U64_MAX:
            raise SafetensorsError(f"shape {_shown(shape)} has more elements than 64 bits count")
    bits = count * BITS[dtype]
    if bits > U64_MAX:
        raise SafetensorsError(f"{dtype} of shape {_shown(shape)} has more bits than 64 bits count")
    if bits % 8:
        raise SafetensorsError(
            f"{dtype} of shape {_shown(shape)} has {bits:,} bits, no whole number of bytes"
        )
    return bits // 8


def _check_cover(tensors: Iterable[TensorInfo], data_start: int, file_size: int) -> None:
    """The ranges, in order, must cover [data_start, file_size) once."""
    end, before = data_start, "the start of the data"
    for tensor in tensors:
        if tensor.start < end:
            reason = f"overlaps {before}: starts at byte {tensor.start:,}, that ends at {end:,}"
            raise SafetensorsError(reason, tensor=tensor.name)
        if tensor.start > end:
            reason = f"a hole of {tensor.start - end:,} bytes between {before} and this tensor"
            raise SafetensorsError(reason, tensor=tensor.name)
        if tensor.stop > file_size:
            reason = f"ends at byte {tensor.stop:,}, behind the end of the file at {file_size:,}"
            raise SafetensorsError(reason, tensor=tensor.name, hint="the file was cut short")
        end, before = tensor.stop, f"tensor {quoted(tensor.name)}"
    if end != file_size:
        raise SafetensorsError(f"{file_size - end:,} bytes behind {before} belong to no tensor")


def _kind(value: Any) -> str:
    """What JSON calls a value, with its article."""
    if value is None:
        return "null"
    if type(value) is float:
        return "a fraction, an exponent, -0 or a number over 64 bits"
    kinds = {bool: "a boolean", int: "an integer", str: "a string", list: "an array"}
    return kinds.get(type(value), "an object")


def _shown(shape: list[int]) -> str:
    if len(shape) <= 8:
        return str(shape)
    return f"[{', '.join(map(str, shape[:8]))}, …] ({len(shape)} dimensions)"
