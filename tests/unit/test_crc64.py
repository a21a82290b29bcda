"""CRC-64/NVME against an independent implementation and the catalogue's check value."""

from __future__ import annotations

import os

import crcmod
from hypothesis import given
from hypothesis import strategies as st

from racerd.crc64 import crc64, crc64_combine

_ONES = 0xFFFFFFFFFFFFFFFF
# Init 0 is crcmod's way to say: all ones, after the final XOR.
oracle = crcmod.mkCrcFun(0x1AD93D23594C93659, initCrc=0, rev=True, xorOut=_ONES)


def test_the_check_value_of_the_catalogue() -> None:
    assert crc64(b"123456789") == 0xAE8B14860A799888


@given(st.binary(max_size=5000))
def test_it_agrees_with_an_independent_implementation(data: bytes) -> None:
    """R22: rot is found by this CRC, so that it must be the right one, on every kind of buffer."""
    assert crc64(data) == oracle(data)
    assert crc64(bytearray(data)) == crc64(memoryview(data)) == oracle(data)


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_parts_continue_and_combine(first: bytes, second: bytes) -> None:
    whole = crc64(first + second)
    assert crc64(second, crc64(first)) == whole
    assert crc64_combine(crc64(first), crc64(second), len(second)) == whole


def test_a_megabyte_at_any_alignment() -> None:
    """The fast path works in wide blocks: odd starts and ends must not matter."""
    data = os.urandom(1 << 20)
    for start, stop in ((0, 1 << 20), (1, 1 << 20), (63, (1 << 20) - 1), (4095, 1 << 19)):
        assert crc64(memoryview(data)[start:stop]) == oracle(data[start:stop])


@given(st.binary(min_size=1, max_size=600), st.data())
def test_a_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    position = draw.draw(st.integers(0, len(data) * 8 - 1))
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    assert crc64(changed) != crc64(data)
