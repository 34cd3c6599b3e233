"""Sizes and tiles as people write them: the right number, or a RequestError and nothing else."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iosim.errors import RequestError
from iosim.units import (
    ceil_div,
    dtype_bytes,
    format_bytes,
    format_capacity,
    format_count,
    parse_size,
    parse_tile,
    round_up,
)

NASTY = ("nan", "inf", "-inf", "1e9", "²", "²x2", "٣", "٣k", "1k", "1_000", "0x10", "9" * 5000, "x")
texts = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789.xXkKmMgGiIbB -+_²٣KN", max_size=20),
    st.sampled_from(NASTY),
    st.integers(0, 10**600).map(str),
)


def outcome(parse, text):
    """What `parse` gives, or None after a RequestError of one short line."""
    try:
        return parse(text)
    except RequestError as error:
        line = str(error)
    assert len(line.splitlines()) == 1
    assert len(line) < 400
    return None


@given(text=texts)
def test_parse_size_raises_nothing_else(text):
    value = outcome(parse_size, text)
    if value is not None:
        assert type(value) is int
        assert value >= 0
        assert text.strip().isascii()


@given(text=texts)
def test_parse_tile_raises_nothing_else(text):
    value = outcome(parse_tile, text)
    if value is not None:
        assert 1 <= len(value) <= 3
        assert all(type(side) is int and side >= 0 for side in value)
        assert text.isascii()


@pytest.mark.parametrize(
    "text", [*NASTY[:8], *NASTY[9:], "", "-1", "1.5", "2.0001k", "4 k b", "1\0"]
)
def test_no_size(text):
    with pytest.raises(RequestError, match="--seqlen"):
        parse_size(text, "--seqlen")


@pytest.mark.parametrize(
    "text", ["", "x", "1x", "x1", "1x2x3x4", "²x2", "1.5x2", "-1x2", "+1x2", "nanxinf", "1_0x2"]
)
def test_no_tile(text):
    with pytest.raises(RequestError, match="tile"):
        parse_tile(text)


@given(value=st.integers(0, 10**300))
@example(2**53 + 1)
def test_whole_numbers_stay_exact(value):
    assert parse_size(str(value)) == value
    assert parse_size(f" {value} KiB ") == value * 1024


@given(
    sides=st.lists(st.integers(0, 10**9), min_size=1, max_size=3), by=st.sampled_from(["x", "X"])
)
def test_tiles_come_back(sides, by):
    assert parse_tile(by.join(map(str, sides))) == tuple(sides)
    assert parse_tile(f" {by} ".join(map(str, sides))) == tuple(sides)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4096),
        ("4K", 4096),
        ("64KiB", 65536),
        ("1MB", 10**6),
        ("1.5k", 1536),
        ("0.1kb", 100),
        ("2g", 2 << 30),
        ("7b", 7),
    ],
)
def test_sizes_with_units(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (4.03e9, "4.030 GB"), (999.6, "0.9996 kB"), (4e16, "40.00 PB")],
)
def test_bytes_as_counters_print_them(value, text):
    assert format_bytes(value) == text


def test_other_formats():
    assert format_capacity(50 << 20) == "50 MiB"
    assert format_capacity(227 << 10) == "227 KiB"
    assert format_capacity(12) == "12 B"
    assert format_count(274.88e9) == "274.9 G"
    assert format_count(512) == "512"


@given(a=st.integers(0, 1 << 70), b=st.integers(1, 1 << 70))
def test_rounding_is_exact(a, b):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b or a == 0
    assert round_up(a, b) % b == 0
    assert 0 <= round_up(a, b) - a < b


def test_an_unknown_dtype_is_refused():
    assert dtype_bytes("fp16") == 2
    with pytest.raises(RequestError, match="unknown dtype 'fp12'"):
        dtype_bytes("fp12")
