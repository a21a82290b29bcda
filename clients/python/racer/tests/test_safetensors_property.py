"""The safetensors header by Hypothesis, also against the format's reference parser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from racer.safetensors import SafetensorsError, parse_header, strict_json
from racer.safetensors.strict_json import StrictJsonError, loads_untrusted
from tests.support.safetensors_bytes import BITS, byte_count, model_file, raw_file

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4)
dtypes = st.sampled_from(sorted(set(BITS) - {"F4"}))
tensors = st.dictionaries(names, st.tuples(dtypes, shapes), max_size=8)
metadata = st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), names)

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)

# Pieces that JSON is made of, and what is nearly JSON: their sequences reach far into a parser.
pieces = st.sampled_from(
    [
        *("{", "}", "[", "]", ":", ",", '"', "\\", " ", "\n", "\0", "-", "0", "00", "4", "1.0"),
        *("1e9", "true", "null", "NaN", "-0", "18446744073709551615", "18446744073709551616"),
        *('"a"', '"b"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"U8"', '"F4"'),
        *("\ufeff", "\\ud800", "\\udc00", "[4]", "[0,4]", '"__metadata__":{"a":"b"}'),
        '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',
        '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',
    ]
)
near_headers = st.lists(pieces, max_size=12).map("".join)


@given(tensors, metadata)
def test_what_was_written_is_read(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    """R37, L1, L41: any right file comes back, with each tensor's own bytes, in order."""
    content, contents = model_file(tensors, metadata=metadata)
    parsed = parse_header(content, len(content))
    assert parsed.metadata == (metadata or {})
    assert [tensor.name for tensor in parsed.tensors] == list(tensors)
    for tensor in parsed.tensors:
        assert (tensor.dtype, list(tensor.shape)) == tensors[tensor.name]
        assert content[tensor.start : tensor.stop] == contents[tensor.name]


@given(st.binary(max_size=200) | near_headers.map(str.encode), st.integers(-4, 8))
@example(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4)
def test_any_bytes_give_a_header_or_the_one_error(text: bytes, data: int) -> None:
    """R37: nothing but SafetensorsError comes out; what is accepted covers the data exactly."""
    content = raw_file(text, bytes(max(data, 0)))[: len(text) + 8 + data]
    try:
        parsed = parse_header(content, len(content))
    except SafetensorsError:
        return
    end = 8 + len(text)
    for tensor in parsed.tensors:
        assert tensor.start == end
        end = tensor.stop
        assert tensor.nbytes == byte_count(tensor.dtype, tensor.shape)
    assert end == len(content)


@given(tensors, st.data())
def test_any_cut_is_refused(tensors: dict[str, tuple[str, list[int]]], data: st.DataObject) -> None:
    """R37: a file that was cut anywhere, or grew, is not a file."""
    content, _ = model_file(tensors)
    length = data.draw(st.integers(0, len(content) - 1))
    for size in (length, len(content) + 1 + length):
        with pytest.raises(SafetensorsError):
            parse_header(content[:size].ljust(size, b" "), size)


@given(json_values)
def test_strict_json_reads_what_json_writes(value: Any) -> None:
    """R37: strict, not narrow: every value is read, escaped or not; integers of 64 bits exactly."""
    escaped = json.dumps(value).encode()
    try:
        plain = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(StrictJsonError, match="surrogate"):
            loads_untrusted(escaped)
        return
    assert loads_untrusted(plain) == loads_untrusted(escaped) == _as_read(value)


def _as_read(value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return float(value)
    if type(value) is list:
        return [_as_read(member) for member in value]
    if type(value) is dict:
        return {key: _as_read(member) for key, member in value.items()}
    return value


tricky = st.text(st.sampled_from('[]{}"\\\\\\a'), max_size=9)


@given(st.dictionaries(tricky, st.lists(tricky | st.just({})), max_size=4), st.integers(1, 12))
def test_brackets_are_those_outside_of_strings(value: Any, at_once: int) -> None:
    """R37: whatever strings hold, and wherever the text is cut to look at it in parts."""
    text = json.dumps(value).encode()
    expected, inside, escaped = bytearray(), False, False
    for byte in text:
        if not inside and byte in b"[]{}":
            expected.append(byte)
        if byte == ord('"') and not escaped:
            inside = not inside
        escaped = byte == ord("\\") and not escaped
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(strict_json, "_MARKS_AT_ONCE", at_once)
        assert b"".join(strict_json._brackets(text)) == expected


@given(near_headers, st.binary(max_size=8))
def test_never_kinder_than_the_reference(text: str, data: bytes) -> None:
    """R37: whatever is accepted here, the reference parser accepts with the same tensors."""
    reference = pytest.importorskip("safetensors", reason="the reference parser is not installed")
    content = raw_file(text, data)
    try:
        ours = parse_header(content, len(content))
    except SafetensorsError:
        return
    theirs = dict(reference.deserialize(content))
    assert set(theirs) == {tensor.name for tensor in ours.tensors}
    for tensor in ours.tensors:
        entry = theirs[tensor.name]
        assert (entry["dtype"], tuple(entry["shape"])) == (tensor.dtype, tensor.shape)
        assert bytes(entry["data"]) == content[tensor.start : tensor.stop]


numpy_names = {"BOOL": "bool", "U8": "u1", "I16": "i2", "F16": "f2", "F32": "f4", "F64": "f8"}


@given(
    st.dictionaries(names, st.tuples(st.sampled_from(sorted(numpy_names)), shapes), min_size=1),
    metadata,
)
def test_the_reference_writes_nothing_we_refuse(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    """R37: what the reference writer makes of any tensors is read, to the byte."""
    reference = pytest.importorskip(
        "safetensors.numpy", reason="the reference parser is not installed"
    )
    _, contents = model_file(tensors, metadata=metadata)
    arrays = {
        name: np.frombuffer(contents[name], numpy_names[dtype]).reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    content = reference.save(arrays, metadata)
    parsed = parse_header(content, len(content))
    assert parsed.metadata == (metadata or {})
    assert {tensor.name for tensor in parsed.tensors} == set(tensors)
    for tensor in parsed.tensors:
        assert content[tensor.start : tensor.stop] == contents[tensor.name]
