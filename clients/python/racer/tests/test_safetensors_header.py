"""The safetensors header by hand: each looseness of a parser that files could get through."""

from __future__ import annotations

import array
import inspect
import json
import os
import pickle
import sys
import tracemalloc
from pathlib import Path

import pytest

from racer.safetensors import (
    HEADER_BYTES_MAX,
    SafetensorsError,
    TensorInfo,
    header_stop_untrusted,
    parse_file,
    parse_header,
)
from racer.safetensors.dtypes import BITS
from tests.support.safetensors_bytes import model_file, raw_file

FOUR = b"\0\1\2\3"
FIELDS = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'
ENTRY = "{" + FIELDS + "}"


def refusal(content: bytes) -> SafetensorsError:
    with pytest.raises(SafetensorsError) as caught:
        parse_header(content, len(content), file="m.safetensors")
    assert caught.value.file == "m.safetensors"
    return caught.value


def one(dtype: str, shape: str, offsets: str) -> str:
    return f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    """R37: order is that of the data, whatever the order of the keys; ranges are absolute."""
    header = json.dumps(
        {
            "late": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
            "__metadata__": {"format": "pt", "": ""},
            "early": {"data_offsets": [0, 8], "shape": [1, 2], "dtype": "F32"},
        }
    )
    content = raw_file(header, bytes(11))
    parsed = parse_header(content, len(content))
    start = 8 + len(header)
    assert parsed.tensors == (
        TensorInfo("early", "F32", (1, 2), start, start + 8),
        TensorInfo("late", "U8", (3,), start + 8, start + 11),
    )
    assert parsed.tensors[1].nbytes == 3
    assert parsed.metadata == {"format": "pt", "": ""}


def test_only_the_header_is_needed() -> None:
    """R37: the payload is not looked at; what lies behind the header in the prefix is ignored."""
    content, _ = model_file({"a": ("F32", (1000,))})
    stop = header_stop_untrusted(content[:8], len(content))
    assert parse_header(content[:stop], len(content)) == parse_header(content, len(content))
    with pytest.raises(SafetensorsError, match="were given"):
        parse_header(content[: stop - 1], len(content))


def test_any_buffer_of_bytes_and_nothing_else() -> None:
    """R37: bytes are bytes, however they are held; what has none is a TypeError at once."""
    content = raw_file('{"a":' + ENTRY + "}   ", FOUR)
    parsed = parse_header(content, len(content))
    words = array.array("I", content)  # 17 of them.
    for given in (bytearray(content), memoryview(content), words, memoryview(words)):
        assert parse_header(given, len(content)) == parsed  # type: ignore[arg-type]
    given.release()
    words.append(0)  # Nothing holds on to it.
    for wrong in (content.decode("latin-1"), list(content), None, memoryview(content)[::-1]):
        with pytest.raises(TypeError):
            parse_header(wrong, len(content))  # type: ignore[arg-type]
    for size in (float(len(content)), str(len(content)), None):
        with pytest.raises(TypeError):
            parse_header(content, size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        " \t\r\n{} \n",
        '{"__metadata__":{}}',
        '{"\\u005f_metadata__":{"a":"\\u00e9"}}',
        one("F64", "[0,18446744073709551615]", "[0,0]"),
        one("U8", "[18446744073709551615,0]", "[0,0]"),
        one("F4", "[0,3]", "[0,0]"),
        one("U8", "[" + "7," * 20 + "0]", "[0,0]"),
    ],
)
def test_legal_without_data(header: str) -> None:
    """L1: nothing, or only empty tensors, is a legal file."""
    content = raw_file(header)
    assert all(tensor.nbytes == 0 for tensor in parse_header(content, len(content)).tensors)


@pytest.mark.parametrize(
    "header",
    [
        '{"a":' + ENTRY + "}",
        one("U8", "[]", "[0,4]").replace('"U8"', '"F32"'),
        one("F4", "[8]", "[0,4]"),
        one("F4", "[2,4]", "[0,4]"),
        one("U8", "[" + "1," * 1000 + "4]", "[0,4]"),
        '{"\\ud83d\\ude00\\\\ud800":' + ENTRY + "}",
        '{"\u2028\x7f\uffff":' + ENTRY + "}",
        '{"a":{"\\u0064type":"U8","shape":[4],"data_offsets":[0,4]}}',
        '{"a":{' + FIELDS + ',"more":[1.5,-0,-1,1e300,18446744073709551616,null,{"a":[]}]}}',
        '{"a":{' + FIELDS + ',"more":' + "[" * 125 + "]" * 125 + "}}",
        '{"a":{' + FIELDS + ',"more":[' + "[]," * 4_000 + "0]}}",
        '{"a":{' + FIELDS + ',"more":"' + "[{" * 100_000 + '\\""}}',
    ],
)
def test_legal_with_four_bytes(header: str) -> None:
    """R37: odd, and right."""
    content = raw_file(header, FOUR)
    (tensor,) = parse_header(content, len(content)).tensors
    assert content[tensor.start : tensor.stop] == FOUR


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", "not JSON"),
        ("   ", "not JSON"),
        ("[]", "an array where an object is due"),
        ("null", "null where an object is due"),
        ('"a"', "a string where an object is due"),
        ('{"a":' + ENTRY, "not JSON"),
        ('{"a":' + ENTRY + ",}", "not JSON"),
        ("{'a':" + ENTRY + "}", "not JSON"),
        ('{/**/"a":' + ENTRY + "}", "not JSON"),
        ('{"a":' + ENTRY + "}{}", "not JSON"),
        ('{"a":' + ENTRY + "}\0", "not JSON"),
        ('{"a":' + ENTRY + "}\f", "not JSON"),
        ('\0{"a":' + ENTRY + "}", "not JSON"),
        ('\u00a0{"a":' + ENTRY + "}", "not JSON"),
        ('\ufeff{"a":' + ENTRY + "}", "not JSON"),
        ('{"a\x01":' + ENTRY + "}", "not JSON"),
        ('{"a\n":' + ENTRY + "}", "not JSON"),
        ('{"a\\x":' + ENTRY + "}", "not JSON"),
        ('{"\\u12":' + ENTRY + "}", "not JSON"),
        ('{"\\u+123":' + ENTRY + "}", "not JSON"),
        ('{"\\ud800":' + ENTRY + "}", "surrogate"),
        ('{"\\udc00\\ud800":' + ENTRY + "}", "surrogate"),
        ('{"\\\\\\ud800":' + ENTRY + "}", "surrogate"),
        ('{"\\ud800\\\\udc00":' + ENTRY + "}", "surrogate"),
        ('{"__metadata__":{"a":"\\uDFFF"},"a":' + ENTRY + "}", "surrogate"),
        ('{"a":{' + FIELDS + ',"more":"\\ud800"}}', "surrogate"),
        ('{"a":null}', "null where an object"),
        ('{"a":{}}', "dtype and shape and data_offsets missing"),
        ('{"a":{"dtype":"U8","data_offsets":[0,4]}}', "shape missing"),
        ('{"__metadata__":null,"a":' + ENTRY + "}", "__metadata__ is null"),
        ('{"__metadata__":"x","a":' + ENTRY + "}", "__metadata__ is a string"),
        ('{"__metadata__":{"a":1},"a":' + ENTRY + "}", "'a' is an integer"),
        ('{"__metadata__":{"a":null},"a":' + ENTRY + "}", "'a' is null"),
        ('{"__metadata__":{"a":true},"a":' + ENTRY + "}", "'a' is a boolean"),
        ('{"__metadata__":' + ENTRY + "}", "'shape' is an array"),
        (one("U9", "[4]", "[0,4]"), "'U9'"),
        (one("u8", "[4]", "[0,4]"), "'u8'"),
        (one("F8_E4M3FN", "[4]", "[0,4]"), "'F8_E4M3FN'"),
        (one("", "[4]", "[0,4]"), "dtype is ''"),
        ('{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}', "dtype is an integer"),
        ('{"a":{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}}', "dtype is an object"),
        ('{"a":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}}', "dtype is an array"),
        (one("U8", "4", "[0,4]"), "shape is an integer"),
        (one("U8", "null", "[0,4]"), "shape is null"),
        (one("U8", "{}", "[0,4]"), "shape is an object"),
        (one("U8", "[[4]]", "[0,4]"), "shape holds an array"),
        (one("U8", '["4"]', "[0,4]"), "shape holds a string"),
        (one("U8", "[true,4]", "[0,4]"), "shape holds a boolean"),
        (one("U8", "[null,4]", "[0,4]"), "shape holds null"),
        (one("U8", "[4e0]", "[0,4]"), "shape holds a fraction"),
        (one("U8", "[4.0]", "[0,4]"), "shape holds a fraction"),
        (one("U8", "[04]", "[0,4]"), "not JSON"),
        (one("U8", "[+4]", "[0,4]"), "not JSON"),
        (one("U8", "[0x4]", "[0,4]"), "not JSON"),
        (one("U8", "[4_0]", "[0,4]"), "not JSON"),
        (one("U8", "[\u0664]", "[0,4]"), "not JSON"),
        (one("U8", "[NaN]", "[0,4]"), "not JSON"),
        (one("U8", "[-Infinity]", "[0,4]"), "not JSON"),
        (one("U8", "[-4]", "[0,4]"), "-4, which is negative"),
        (one("U8", "[-9223372036854775809]", "[0,4]"), "over 64 bits"),
        (one("U8", "[18446744073709551616,0]", "[0,0]"), "over 64 bits"),
        (one("U8", "[" + "9" * 10_000 + "]", "[0,4]"), "out of range"),
        (one("U8", "[" + "0" * 10_000 + "4]", "[0,4]"), "not JSON"),
        (one("U8", "[1e999]", "[0,4]"), "out of range"),
        ('{"a":{' + FIELDS + ',"more":1e999}}', "out of range"),
        (one("U8", "[4]", "[-0,4]"), "data_offsets holds a fraction"),
        (one("U8", "[4]", "[0,4.0]"), "data_offsets holds a fraction"),
        (one("U8", "[4]", "[0]"), "an array of 1"),
        (one("U8", "[4]", "[]"), "an array of 0"),
        (one("U8", "[4]", '{"0":0,"1":4}'), "data_offsets is an object"),
        (one("U8", "[4]", "[4,0]"), "backwards"),
        (one("U8", "[4]", "[1,5]"), "a hole of 1 bytes"),
        (one("U8", "[4]", "[18446744073709551612,18446744073709551616]"), "over 64 bits"),
        (one("U8", "[4]", "[18446744073709551611,18446744073709551615]"), "a hole"),
        (one("U8", "[3]", "[0,3]"), "1 bytes behind tensor 'a' belong to no tensor"),
        (one("U8", "[5]", "[0,5]"), "behind the end of the file"),
        (one("F32", "[4]", "[0,4]"), "takes 16 bytes, data_offsets span 4"),
        (one("U8", "[]", "[0,4]"), "takes 1 bytes"),
        (one("U8", "[0]", "[0,4]"), "takes 0 bytes"),
        (one("F4", "[]", "[0,4]"), "no whole number of bytes"),
        (one("F4", "[7]", "[0,4]"), "no whole number of bytes"),
        (one("F6_E2M3", "[1]", "[0,4]"), "no whole number of bytes"),
        (one("U8", "[9223372036854775808,4,0]", "[0,0]"), "more elements than 64 bits"),
        (one("F64", "[2305843009213693952]", "[0,0]"), "more bits than 64 bits"),
        ("{}", "4 bytes behind the start of the data belong to no tensor"),
        ('{"__metadata__":{}}', "4 bytes behind the start"),
        ('{"a":{' + FIELDS + ',"more":' + "[" * 126 + "]" * 126 + "}}", "nested more than 127"),
        ('{"a":' + '{"a":' * 2_000, "nested more than 127"),
        ('{"a":' + '{"a":' * 200_000, "nested more than 127 deep"),
        ("[" * 200_000 + "]" * 200_000, "arrays and objects in"),
        ('"' + "[" * 200_000, "not JSON: Unterminated string"),
        ('{"a":{' + FIELDS + ',"more":[' + "[]," * 6_000 + "0]}}", "arrays and objects in"),
    ],
)
def test_refused(header: str, reason: str) -> None:
    """R37, L47: each is one SafetensorsError that says why."""
    assert reason in str(refusal(raw_file(header, FOUR)))


@pytest.mark.parametrize(
    ("header", "key", "tensor"),
    [
        ('{"a":' + ENTRY + ',"a":' + ENTRY + "}", "'a'", None),
        ('{"a":' + ENTRY + ',"\\u0061":' + ENTRY + "}", "'a'", None),
        ('{"__metadata__":{},"__metadata\\u005f_":{},"a":' + ENTRY + "}", "'__metadata__'", None),
        ('{"__metadata__":{"k":"1","k":"1"},"a":' + ENTRY + "}", "'k'", None),
        ('{"b":' + ENTRY + ',"a":{"dtype":"U8",' + FIELDS + "}}", "'dtype'", "a"),
        ('{"a":{' + FIELDS + ',"data_offsets":[0,4]}}', "'data_offsets'", "a"),
        ('{"a":{' + FIELDS + ',"more":1,"more":2}}', "'more'", "a"),
        ('{"a":{' + FIELDS + ',"more":[{"x":1,"x":1}]}}', "'x'", None),
    ],
)
def test_repeated_keys_are_called_that(header: str, key: str, tensor: str | None) -> None:
    """L46: the error says "duplicate key", never something about offsets."""
    error = refusal(raw_file(header, FOUR))
    assert f"duplicate key {key}" in str(error)
    assert error.tensor == tensor


@pytest.mark.parametrize(
    "text",
    [
        b'{"\xff":1}',
        b'{"\xc0\x80":1}',
        b'{"\xed\xa0\x80":1}',
        b'{"\xf4\x90\x80\x80":1}',
        '{"a":{}}'.encode("utf-16"),
        "{}".encode("utf-16-le"),
        "{}".encode("utf-32-be"),
        b"\xef\xbb\xbf{}",
    ],
)
def test_other_encodings_are_refused(text: bytes) -> None:
    """R37: UTF-8 and nothing else, without a byte order mark, overlong forms or surrogates."""
    refusal(raw_file(text))


@pytest.mark.parametrize(
    ("offsets", "accepted"),
    [
        ([[0, 4], [4, 4]], True),
        ([[0, 4], [0, 0]], True),
        ([[0, 4], [2, 2]], False),
        ([[0, 4], [5, 5]], False),
        ([[4, 4], [0, 4]], None),  # The first entry then claims no bytes for its four.
    ],
)
def test_empty_tensors_lie_between_others(offsets: list[list[int]], accepted: bool | None) -> None:
    """L1: an empty tensor may lie at any border, also the same one many times, never inside."""
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": offsets[0]},
        "z": {"dtype": "F32", "shape": [3, 0], "data_offsets": offsets[1]},
        "y": {"dtype": "F64", "shape": [0], "data_offsets": offsets[1]},
    }
    content = raw_file(json.dumps(header), FOUR)
    if accepted:
        parsed = parse_header(content, len(content))
        assert {tensor.name: tensor.nbytes for tensor in parsed.tensors} == {"a": 4, "z": 0, "y": 0}
        assert [t.name for t in parsed.tensors if not t.nbytes] == ["z", "y"]
    else:
        refusal(content)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_of_the_format(dtype: str) -> None:
    """L41, R37: eight elements of each; F6 is refused by its name, as unsupported."""
    size = BITS[dtype]
    content = raw_file(one(dtype, "[2,4]", f"[0,{size}]"), bytes(size))
    if dtype.startswith("F6_"):
        error = refusal(content)
        assert error.unsupported and dtype in error.reason and error.tensor == "a"
    else:
        (tensor,) = parse_header(content, len(content)).tensors
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, (2, 4), size)


@pytest.mark.parametrize(
    ("length", "size", "reason"),
    [
        (b"", 0, "too short"),
        (b"\2\0\0\0\0\0\0", 7, "too short"),
        (b"\2" + bytes(7), 7, "too short"),
        (b"\2" + bytes(7), 9, "behind the end of the file"),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little"), 1 << 40, "the limit is 100,000,000"),
        (b"\xff" * 8, 1 << 63, "the limit is 100,000,000"),
        ((2**63).to_bytes(8, "little"), 2**64, "the limit is 100,000,000"),
    ],
)
def test_length_is_checked_before_it_is_used(length: bytes, size: int, reason: str) -> None:
    """R37, L47: no allocation follows an unchecked length."""
    with pytest.raises(SafetensorsError, match=reason):
        header_stop_untrusted(length, size)
    with pytest.raises(SafetensorsError, match=reason):
        parse_header(length, size)


def test_largest_header_is_allowed() -> None:
    """R37: the limit itself is legal."""
    assert header_stop_untrusted(HEADER_BYTES_MAX.to_bytes(8, "little"), 1 << 40) == 100_000_008


def test_hostile_names_do_not_flood_or_forge_messages() -> None:
    """R37: names are quoted, escaped and cut."""
    name = "\\n\\u001b[2J" + "x" * 1_000_000
    error = refusal(raw_file(f'{{"{name}":null}}'))
    assert len(str(error)) < 400
    assert "\n" not in str(error) and "\x1b" not in str(error)


def test_errors_travel_between_processes() -> None:
    """L34: pickling keeps reason, file, tensor and hint."""
    error = refusal(raw_file(one("U8", "[5]", "[0,5]"), FOUR))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and "cut short" in str(copy)
    assert (copy.file, copy.tensor, copy.code) == ("m.safetensors", "a", "safetensors")


def test_a_deep_caller_gets_the_one_error() -> None:
    """R37: where little stack is left, nested text gives SafetensorsError or is read."""
    content = raw_file('{"a":{' + FIELDS + ',"more":' + "[" * 120 + "]" * 120 + "}}", FOUR)

    def dive(frames: int) -> bool:
        if frames:
            return dive(frames - 1)
        try:
            return len(parse_header(content, len(content)).tensors) == 1
        except SafetensorsError as error:
            return "stack" in str(error)

    assert dive(sys.getrecursionlimit() - len(inspect.stack(0)) - 80)


class TestFiles:
    """`parse_file`: what a path may turn out to be."""

    def test_header_of_a_file(self, tmp_path: Path) -> None:
        """R37, L55: the same parser for paths and bytes."""
        content, _ = model_file({"a": ("BF16", (3, 5)), "b": ("BOOL", ())}, metadata={"x": "y"})
        path = tmp_path / "m.safetensors"
        path.write_bytes(content)
        assert parse_file(path) == parse_file(str(path)) == parse_header(content, len(content))

    def test_names_of_files_are_not_trusted_either(self, tmp_path: Path) -> None:
        """R37: any name of a file can be told of, as text or bytes, and forges no line of a log."""
        for name in (b"plain\xc3\xa9", b"line\nfeed\x1b[2J", b"no utf-8 \xff"):
            path = os.path.join(os.fsencode(tmp_path), name + b".safetensors")
            with open(path, "wb"):
                pass
            for given in (path, os.fsdecode(path)):
                with pytest.raises(SafetensorsError, match="too short") as caught:
                    parse_file(given)
                assert str(caught.value).isprintable()
                assert os.fsencode(caught.value.file or "") == path

    def test_trailing_bytes(self, tmp_path: Path) -> None:
        """L55: trailing bytes are refused on each path."""
        content, _ = model_file({"a": ("U8", (4,))})
        path = tmp_path / "m.safetensors"
        path.write_bytes(content + b"\0")
        with pytest.raises(SafetensorsError, match="belong to no tensor"):
            parse_file(path)
        refusal(content + b"\0")

    def test_not_a_file(self, tmp_path: Path) -> None:
        """R37: a FIFO does not block, a folder is refused; what is missing is an OSError."""
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", tmp_path):
            with pytest.raises(SafetensorsError, match="not a regular file"):
                parse_file(path)
        with pytest.raises(FileNotFoundError):
            parse_file(tmp_path / "missing")

    def test_huge_sparse_file_costs_nothing(self, tmp_path: Path) -> None:
        """R37, L47: a terabyte that claims a large header is refused without reading it."""
        path = tmp_path / "m.safetensors"
        path.write_bytes((HEADER_BYTES_MAX + 1).to_bytes(8, "little"))
        os.truncate(path, 1 << 40)
        with pytest.raises(SafetensorsError, match="the limit"):
            parse_file(path)


def test_the_densest_header_is_read() -> None:
    """R37: as many tensors as fit in the bytes, with the shortest entries there can be."""
    alphabet = [chr(code) for code in range(0x4E00, 0x4E00 + 20_000)]
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"{name}":{entry}' for name in alphabet) + "}"
    content = raw_file(text)
    assert len(parse_header(content, len(content)).tensors) == 20_000


@pytest.mark.parametrize(
    "more",
    ["[" + '"",' * 300_000 + "0]", '"' + "\\\\ab" * 250_000 + "\\ud83d\\ude00" + '"'],
    ids=["strings", "escapes"],
)
def test_looking_costs_no_more_memory_than_reading(more: str) -> None:
    """R37: what strings and escapes are looked through with is small beside the header."""
    content = raw_file('{"a":{' + FIELDS + ',"more":' + more + "}}", FOUR)
    tracemalloc.start()
    try:
        assert len(parse_header(content, len(content)).tensors) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 15 * len(content)


def test_cost_grows_with_the_header_only() -> None:
    """R37: 20,000 tensors are parsed, in order, each with its own range (time: `make bench`)."""
    entries = {
        f"model.layers.{index}.weight": {
            "dtype": "BF16",
            "shape": [4, 16],
            "data_offsets": [index * 128, index * 128 + 128],
        }
        for index in reversed(range(20_000))
    }
    text = json.dumps(entries)
    parsed = parse_header(raw_file(text), 8 + len(text) + 20_000 * 128)
    assert [tensor.name for tensor in parsed.tensors] == list(reversed(entries))
