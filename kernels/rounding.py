"""How numbers are rounded to the dtypes that hardware stores, for programs that compute.

Computing block programs work in float64 and round where a chip does: operands as they are stored,
probabilities as they enter the matrix unit, results as they leave. Sums stay in float64 and stand
for the fp32 accumulators of the units, whose own rounding is far below that of 8 and 16 bits.
A format with 0 digits rounds nothing.

Rounding is to nearest, ties to even, once from float64. Beyond its largest number a format goes to
infinity or, where the hardware converts so, stays at the largest, infinities too (PTX ISA, cvt with
.satfinite: FP8 E4M3 has no infinity). NaN stays NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from iosim.jit import inline

Array = NDArray[np.float64]


class Format(NamedTuple):
    """A floating-point format: significant bits, exponent of the least normal number, the largest.

    Beyond the largest, `saturates` says whether a number becomes it or infinity.
    """

    digits: int
    least: int
    largest: float
    saturates: bool


#: IEEE 754 half and single; bfloat16 and TF32 (PTX ISA, cvt); FP8 E4M3 (arXiv 2209.05433, table 1).
#: int8 is whole numbers times a scale and no floating-point format: it has no digits.
FORMATS = {
    "fp32": Format(24, -126, 3.4028234663852886e38, False),
    "tf32": Format(11, -126, 3.4011621342146535e38, False),
    "fp16": Format(11, -14, 65504.0, False),
    "bf16": Format(8, -126, 3.3895313892515355e38, False),
    "fp8": Format(4, -6, 448.0, True),
    "int8": Format(0, 0, 127.0, True),
}


def unit_roundoff(dtype: str) -> float:
    """The greatest relative error of rounding a normal number to `dtype`.

    Raises ValueError for int8, whose error is absolute: half of the scale.
    """
    digits = FORMATS[dtype].digits
    if not digits:
        raise ValueError(f"{dtype} has no unit roundoff: its error is half of a scale")
    return 2.0**-digits


@inline
def to_format(x, digits, least, largest):
    """`x` rounded to the nearest number of a format, ties to even; `largest` < 0: saturated."""
    if digits == 0 or math.isnan(x) or x == 0.0:
        return x
    bound = abs(largest)
    if math.isinf(x):
        return math.copysign(bound, x) if largest < 0 else x
    _, exponent = math.frexp(x)
    step = math.ldexp(1.0, max(exponent, least + 1) - digits)
    y = np.rint(x / step) * step
    if abs(y) > bound:
        y = math.copysign(bound if largest < 0 else np.inf, x)
    return y


def rounded(values: Array, dtype: str) -> Array:
    """An array of floats as `dtype` stores them; for int8 the nearest whole number that it has."""
    chosen = FORMATS[dtype]
    flat = np.array(values, dtype=np.float64)
    if not chosen.digits:
        return np.clip(np.rint(flat), -chosen.largest, chosen.largest)
    finite = np.isfinite(flat)
    some = np.where(finite, flat, 0.0)
    _, exponent = np.frexp(some)
    step = np.ldexp(1.0, np.maximum(exponent, chosen.least + 1) - chosen.digits)
    near = np.where(finite, np.rint(some / step) * step, flat)
    beyond = np.abs(near) > chosen.largest
    return np.where(beyond, np.copysign(chosen.largest if chosen.saturates else np.inf, near), near)


def quantized(values: Array, dtype: str) -> tuple[Array, Array]:
    """Rows of `values` in `dtype` with one fp32 scale per row: (stored, scales).

    The scale of a row is its greatest absolute value over the largest number of `dtype`: symmetric
    quantization per token, as serving systems store keys and values. It is 1 for a row of zeros,
    and for one so small that fp32 has no scale for it, which is stored as zeros.
    """
    largest = FORMATS[dtype].largest
    scales = rounded(np.abs(values).max(axis=-1) / largest, "fp32")
    scales = np.where(scales > 0, scales, 1.0)
    return rounded(values / scales[..., None], dtype), scales
