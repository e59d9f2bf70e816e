"""Bytes and times, as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensile.schedules.errors import TensileError
from tensile.schedules.units import format_bytes, format_us, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("12B", 12),
        ("1KiB", 1024),
        ("1 kib", 1024),
        (" 8GiB ", 8 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2TiB", 2 * 2**40),
        ("1K", 1000),
        ("500MB", 500 * 10**6),
        ("3g", 3 * 10**9),
        ("1TB", 10**12),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_a_size_is_read_in_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 000", "1.GiB", "8GiBs", "8 G i B", "٣GiB", "60%", "min"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TensileError) as caught:
        parse_bytes(text)
    assert str(caught.value) == f"error: not a size: {text!r}\nhelp: write it like 8GiB, 500MB or 1048576"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (-(2**20), "-1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_are_written_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0, "0.00 us"),
        (9.5, "9.50 us"),
        (999, "999 us"),
        (999.9, "1.00 ms"),
        (1300, "1.30 ms"),
        (45_600, "45.6 ms"),
        (999_999, "1.00 s"),
        (1_000_000, "1.00 s"),
        (75_000_000, "75.0 s"),
    ],
)
def test_times_are_written_with_three_digits(time_us: float, text: str) -> None:
    assert format_us(time_us) == text


@given(st.integers(0, 2**62))
def test_a_size_written_in_full_is_read_back_exactly(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes


@given(st.integers(0, 2**45))
def test_a_size_written_for_people_is_read_back_within_one_percent(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= size_bytes / 100


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_of_two_sizes_the_larger_never_reads_as_the_smaller(a: int, b: int) -> None:
    small, large = sorted((a, b))
    assert parse_bytes(format_bytes(small)) <= parse_bytes(format_bytes(large))
