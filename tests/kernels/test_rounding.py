"""Rounding to the dtypes of hardware, bit for bit against NumPy, ml_dtypes and plain words."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from iosim.jit import jit
from iosim.kernels.rounding import FORMATS, quantized, rounded, to_format, unit_roundoff

FLOATS = sorted(set(FORMATS) - {"int8"})
TWINS = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
}


@jit
def each(values, digits, least, largest):
    """`to_format` of every value, in place, as block programs call it."""
    for i in range(values.size):
        values[i] = to_format(values[i], digits, least, largest)


def both(values, dtype):
    """What the two ways of rounding give, which must be the same bits."""
    form = FORMATS[dtype]
    one = np.array(values, dtype=np.float64)
    each(one, form.digits, form.least, -form.largest if form.saturates else form.largest)
    other = rounded(values, dtype)
    assert bits(one).tolist() == bits(other).tolist()
    return other


def bits(values):
    """The bits of floats, all NaNs alike."""
    values = np.array(values, dtype=np.float64)
    return np.where(np.isnan(values), np.nan, values).view(np.int64)


def twin(values, dtype):
    """The same by another hand: a cast, or bits of fp32 cut off."""
    if dtype == "tf32":
        return cut_to_tf32(values)
    kept = values
    if FORMATS[dtype].saturates:
        kept = np.clip(values, -FORMATS[dtype].largest, FORMATS[dtype].largest)
    with np.errstate(over="ignore"):
        return kept.astype(TWINS[dtype]).astype(np.float64)


def cut_to_tf32(values):
    """fp32 numbers without the last 13 of their 24 bits, to nearest, ties to even."""
    single = values.astype(np.float32)
    word = single.view(np.uint32)
    odd = (word >> np.uint32(13)) & np.uint32(1)
    cut = (word + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(single), cut.view(np.float32), single).astype(np.float64)


def neighbours(dtype):
    """Numbers at which rounding can go wrong: halves between two numbers and what is beside them.

    Around 1, at both ends of the normal numbers, among the subnormal ones, and at zero.
    """
    form = FORMATS[dtype]
    tiny = 2.0 ** (form.least + 1 - form.digits)
    starts = [tiny * k for k in (0, 1, 2, 3, 5)] + [2.0**form.least, 1.0, 1.5, form.largest]
    found = []
    for start in starts:
        step = max(tiny, 2.0 ** (np.frexp(start)[1] - form.digits))
        for halves in range(-3, 4):
            middle = start + halves * step / 2
            found += [middle, np.nextafter(middle, 9e99), np.nextafter(middle, -9e99)]
    found += [0.0, np.inf, np.nan, 2.0**-1074, 1e308, 464.0, 479.9, 65519.99, 65520.0]
    return np.array(found + [-x for x in found])


@pytest.mark.parametrize("dtype", TWINS)
def test_where_rounding_can_go_wrong(dtype):
    """In numbers that fp32 has, as ml_dtypes rounds to fp32 first; fp16 and fp32 in all."""
    values = neighbours(dtype)
    if dtype in ("bf16", "fp8"):
        values = np.float64(np.float32(np.clip(values, -3e38, 3e38)))
    assert bits(both(values, dtype)).tolist() == bits(twin(values, dtype)).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=100, deadline=None)
@given(words=arrays(np.uint32, 200))
def test_random_bits(dtype, words):
    with np.errstate(invalid="ignore"):
        values = words.view(np.float32).astype(np.float64)
    assert bits(both(values, dtype)).tolist() == bits(twin(values, dtype)).tolist()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@settings(max_examples=100, deadline=None)
@given(words=arrays(np.uint64, 200), shrink=st.integers(0, 900))
def test_random_bits_of_float64(dtype, words, shrink):
    """Exponents are drawn nearer to 0 too, where numbers do not all overflow or vanish."""
    mantissa, exponent = np.frexp(words.view(np.float64))
    values = np.ldexp(mantissa, np.sign(exponent) * np.maximum(np.abs(exponent) - shrink, 0))
    assert bits(both(values, dtype)).tolist() == bits(twin(values, dtype)).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=200, deadline=None)
@given(places=st.integers(-40, 40), digits=st.integers(1, 1 << 52), negative=st.booleans())
def test_nearest_once_from_float64(dtype, places, digits, negative):
    """Against fractions: nearest of the two neighbours, the even one of two that are as near."""
    form = FORMATS[dtype]
    x = Fraction(digits) * Fraction(2) ** (places - 26) * (-1 if negative else 1)
    value = float(x)
    _, exponent = np.frexp(value)
    step = Fraction(2) ** (max(int(exponent), form.least + 1) - form.digits)
    expected = round(Fraction(value) / step) * step  # Python rounds fractions to even, exactly
    if abs(expected) > Fraction(form.largest):
        expected = Fraction(form.largest) if form.saturates else None
        expected = expected and expected * (-1 if negative else 1)
    [found] = both(np.array([value]), dtype).tolist()
    assert found == (np.copysign(np.inf, value) if expected is None else float(expected))


def test_a_tie_is_broken_by_what_fp32_would_lose():
    """Rounding to fp32 first would find a tie and go down to the even number."""
    just_over = 1 + 2.0**-8 + 2.0**-40
    assert both(np.array([just_over]), "bf16").tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("dtype", TWINS)
def test_formats_are_those_of_the_types(dtype):
    form, kind = FORMATS[dtype], ml_dtypes.finfo(TWINS[dtype])
    assert form.digits == kind.nmant + 1
    assert form.least == kind.minexp
    assert form.largest == float(kind.max)
    assert form.saturates == (dtype == "fp8")


def test_beyond_the_largest():
    ends = np.array([np.inf, -np.inf, 1e300, np.nan])
    assert bits(both(ends, "fp8")).tolist() == bits([448, -448, 448, np.nan]).tolist()
    assert bits(both(ends, "fp16")).tolist() == bits([np.inf, -np.inf, np.inf, np.nan]).tolist()
    assert FORMATS["tf32"].largest == (2 - 2.0**-10) * 2.0**127


@settings(max_examples=100, deadline=None)
@given(values=arrays(np.float64, 50, elements=st.floats(-1e3, 1e3)))
def test_int8_is_whole_numbers(values):
    stored = rounded(values, "int8")
    expected = [max(-127, min(127, round(x))) for x in values.tolist()]
    assert stored.tolist() == expected


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_unit_roundoff_bounds_the_relative_error(dtype, data):
    form = FORMATS[dtype]
    least, most = 2.0**form.least, form.largest
    x = data.draw(st.floats(least, most))
    assert abs(rounded(x, dtype) - x) <= unit_roundoff(dtype) * x
    halfway = 1 + unit_roundoff(dtype)
    assert abs(rounded(halfway, dtype) - halfway) == unit_roundoff(dtype)


def test_int8_has_no_unit_roundoff():
    with pytest.raises(ValueError, match="int8"):
        unit_roundoff("int8")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@settings(max_examples=150, deadline=None)
@given(
    values=arrays(np.float64, (5, 12), elements=st.floats(-1, 1)),
    power=st.integers(-90, 90),
)
def test_quantized_rows_are_near(dtype, values, power):
    """int8: half a scale. fp8: its unit roundoff, or half its least number times the scale.

    The scale itself is rounded to fp32, by 2⁻²⁴ of it: the largest element of a row may then be
    127 (1 + 2⁻²⁴) or 448 (1 + 2⁻²⁴) scales, which saturates.
    """
    values = np.ldexp(np.where(np.abs(values) < 1e-6, 0.0, values), power)
    stored, scales = quantized(values, dtype)
    assert stored.shape == values.shape
    assert scales.shape == values.shape[:-1]
    assert (scales == scales.astype(np.float32)).all()
    assert (scales > 0).all()
    assert (rounded(stored, dtype) == stored).all()
    error = np.abs(stored * scales[:, None] - values)
    cut = np.abs(values) * 2.0**-23
    if dtype == "int8":
        assert (error <= scales[:, None] / 2 + cut).all()
    else:
        least = 2.0 ** (FORMATS[dtype].least - FORMATS[dtype].digits)  # half of the least number
        bound = np.maximum(unit_roundoff(dtype) * np.abs(values), least * scales[:, None])
        assert (error <= bound + cut).all()
    peaks = np.abs(values).max(axis=-1)
    assert (np.abs(stored).max(axis=-1)[peaks > 0] == FORMATS[dtype].largest).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rows_without_a_scale(dtype):
    """Zeros, and what is too small for a scale in fp32: zeros times 1."""
    stored, scales = quantized(np.array([[0.0, -0.0], [1e-60, -1e-50], [1.0, 0.0]]), dtype)
    assert scales.tolist()[:2] == [1.0, 1.0]
    assert (stored[:2] == 0).all()
    assert stored[2].tolist() == [FORMATS[dtype].largest, 0]
