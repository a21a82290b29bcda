"""Byte sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racerd.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes, round_up

FACTORS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "kB": 10**3, "GB": 10**9, "B": 1}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("256MiB", 256 * MIB),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("10GB", 10**10),
        ("10gb", 10**10),
        ("1tib", TIB),
        ("0.1GB", 10**8),
        ("1.1TB", 11 * 10**11),
        ("8388607.999999046325684TiB", None),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993.0", 2**53 + 1),
    ],
)
def test_sizes_are_exact(text: str, size: int | None) -> None:
    """No float rounds a byte away, and what is no whole number of bytes is refused."""
    if size is None:
        with pytest.raises(ValueError, match="whole number of bytes"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "MiB", "-1", "+1", "1e9", "1_000", "1,5GiB", "0x10", "1 2", "1.", ".5GiB", "nan",
     "inf", "1GiB/s", "\u0661", "1.5", "0.1KiB", "1Gi", "1M", "9" * 5000, "9" * 400 + ".5"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_a_short_sentence(text: str) -> None:
    """F13: never a guess; `1M` could be two things."""
    with pytest.raises(ValueError, match=r"byte size|unit|whole number") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 250


@given(st.integers(0, 2**70), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " "]))
def test_a_number_and_a_unit_multiply(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * FACTORS[unit]


@given(st.integers(0, 2**60))
def test_what_is_printed_is_near_what_it_was(size: int) -> None:
    text = format_bytes(size)
    number, unit = text.split()
    assert float(number) * FACTORS[unit] == pytest.approx(size, rel=0.06, abs=0)
    assert len(text) < 14


@given(st.sampled_from([KIB, MIB, GIB, TIB]), st.integers(1, 1023))
def test_whole_units_survive_printing(factor: int, number: int) -> None:
    assert parse_bytes(format_bytes(factor * number)) == factor * number


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_rounding_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
