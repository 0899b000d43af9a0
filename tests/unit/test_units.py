"""Units: what people write becomes exact integers, everything else one clear error."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from pipeplan.errors import InputError
from pipeplan.units import (
    MAX_INT,
    ceil_div,
    exact_bytes,
    format_bytes,
    format_ns,
    parse_bandwidth,
    parse_bytes,
    parse_factor,
    parse_fraction,
    parse_time_ns,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        (" 16gib ", 16 * 2**30),
        ("1.5kB", 1500),
        ("1.9999KiB", 2047),
        ("2e3MB", 2 * 10**9),
        ("0.1GB", 10**8),
        ("3TiB", 3 * 2**40),
        (str(MAX_INT), MAX_INT),
    ],
)
def test_bytes(text: str, value: int) -> None:
    """Sizes are exact, binary and decimal prefixes differ, fractions are rounded down."""
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12GB/s", 12 * 10**9),
        ("12 GB/s", 12 * 10**9),
        ("12 GiB / s", 12 * 2**30),
        ("1B/s", 1),
        ("inf", None),
        (" INF ", None),
    ],
)
def test_bandwidth(text: str, value: int | None) -> None:
    """Bandwidths are bytes per second; inf is None."""
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10us", 10_000),
        ("10 µs", 10_000),
        ("1.5ms", 1_500_000),
        ("0.1ns", 1),
        ("0ns", 0),
        ("60s", 60 * 10**9),
        ("2min", 120 * 10**9),
        ("0.001001us", 2),
    ],
)
def test_time(text: str, value: int) -> None:
    """Times are exact nanoseconds, rounded up."""
    assert parse_time_ns(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1%", 0.01), ("0.01", 0.01), (" 2.5 % ", 0.025), ("0", 0.0), ("1e-3", 1e-3), ("500%", 5)],
)
def test_fraction(text: str, value: float) -> None:
    """Shares are read with and without a percent sign."""
    assert parse_fraction(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("20", 20), ("1/3", Fraction(1, 3)), (" 2.5 ", Fraction(5, 2)), ("1e9", 10**9)],
)
def test_factor(text: str, value: Fraction) -> None:
    """Factors are exact, whole numbers or ratios."""
    assert parse_factor(text) == value


BAD_NUMBERS = ["", " ", "-1", "+1", "nan", "1e400", "9" * 5000, "1..5", "0x10", "٣", "1_0", "1,5"]
PARSERS: dict[str, tuple[Callable[[str], object], str]] = {
    "bytes": (parse_bytes, "GiB"),
    "bandwidth": (parse_bandwidth, "GB/s"),
    "time": (parse_time_ns, "us"),
    "fraction": (parse_fraction, "%"),
    "factor": (parse_factor, ""),
}


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize("kind", PARSERS)
def test_no_number(kind: str, number: str) -> None:
    """What is no number is refused in one line that repeats it."""
    parse, unit = PARSERS[kind]
    with pytest.raises(InputError) as caught:
        parse(number + unit)
    message = str(caught.value)
    assert "got" in message
    assert "need" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("parse", "text", "part"),
    [
        (parse_bytes, "16XB", "16GiB"),
        (parse_bytes, "16GB/s", "16GiB"),
        (parse_bytes, "5e18GB", f"at most {MAX_INT}"),
        (parse_bandwidth, "12GB", "12GB/s"),
        (parse_bandwidth, "12GB/ms", "12GB/s"),
        (parse_bandwidth, "0GB/s", "at least 1B/s"),
        (parse_bandwidth, "/s", "12GB/s"),
        (parse_bandwidth, "-inf", "inf"),
        (parse_bandwidth, "100Gb/s", "12.50GB/s"),
        (parse_bandwidth, "0Gb/s", "1B/s"),
        (parse_bandwidth, "100 Gib /s", "13.42GB/s"),
        (parse_time_ns, "10", "10us"),
        (parse_time_ns, "10GB", "10us"),
        (parse_fraction, "1/3", "1%"),
        (parse_fraction, "5", "need 5% or a number below 1"),
        (parse_bytes, "-1GiB", "which is below 0"),
        (parse_time_ns, " -5us", "which is below 0"),
        (parse_fraction, "1%%", "1%"),
        (parse_fraction, "1e999999999", "1%"),
        (parse_factor, "1e1000000000", "at most 1e9"),
        (parse_factor, "1/0", "above 0"),
        (parse_factor, "1/3%", "above 0"),
    ],
)
def test_wrong_unit(parse: Callable[[str], object], text: str, part: str) -> None:
    """A wrong or missing unit, or too much, is refused with an example of what is right."""
    with pytest.raises(InputError) as caught:
        parse(text)
    assert text in str(caught.value)
    assert part in str(caught.value)


def test_errors_name_the_flag() -> None:
    """The caller's name for the value leads the message."""
    with pytest.raises(InputError, match=r"^--memory: got 'x'"):
        parse_bytes("x", "--memory")


def test_bytes_for_people() -> None:
    """Sizes print with two decimals from 1 KiB on, exactly below."""
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(-3 * 2**30) == "-3.00 GiB"


def test_times_for_people() -> None:
    """Times print with four digits, exactly below 1 us."""
    assert format_ns(999) == "999 ns"
    assert format_ns(12_345_678) == "12.35 ms"
    assert format_ns(Fraction(3, 2)) == "1.5 ns"


def test_ceil_div() -> None:
    """Division rounds up exactly, also where floats would not."""
    assert ceil_div(7, 2) == 4
    assert ceil_div(8, 2) == 4
    assert ceil_div(MAX_INT + 1, 1) == MAX_INT + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (24 * 2**20, "24MiB"),
        (17 * 2**29, "8704MiB"),
        (16 * 10**9, "16GB"),
        (25165825, "25165825B"),
        (9, "9B"),
        (0, "0B"),
    ],
)
def test_exact_sizes_are_short_and_read_back(value: int, text: str) -> None:
    """The unit is the one of fewest characters; nothing is rounded, so no two sizes are alike."""
    assert exact_bytes(value) == text
    assert parse_bytes(text) == value
