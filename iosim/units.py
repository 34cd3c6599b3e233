"""Sizes and counts as people write them (`4096`, `4k`, `64KiB`, `64x128`) and as they read them."""

from __future__ import annotations

import re
from fractions import Fraction

from iosim.errors import RequestError

SECTOR_BYTES = 32  # what Nsight Compute calls a sector, on every GPU it reads

_FACTORS = {
    "": 1,
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "b": 1,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_TILE = re.compile(r"\s*[0-9]+\s*(?:x\s*[0-9]+\s*){0,2}", re.IGNORECASE | re.ASCII)
_LONGEST = 400  # characters; a longer text is no number that somebody meant
_SHOWN = 30  # characters of a wrong text that a message repeats

#: bytes of one element of each dtype that the kernels know
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

#: those in which K and V may be stored with scales
SCALED_DTYPES = ("fp8", "int8")


def parse_size(text: str, what: str = "size") -> int:
    """The whole number that `text` means: `4096`, `4k` = 4096, `64KiB`, `1MB` = 10**6.

    Bare k, m, g are powers of 1024, as people write sequence lengths. Raises RequestError.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise RequestError(f"{what} {shortened(text)} is not a size; write 4096, 4k, 64KiB or 1MB")
    value = Fraction(match[1]) * factor
    if value.denominator != 1:
        raise RequestError(f"{what} {shortened(text)} is not a whole number")
    return int(value)


def parse_tile(text: str, what: str = "tile") -> tuple[int, ...]:
    """The numbers of a tile written `M`, `MxN` or `MxNxK`. Raises RequestError."""
    if len(text) > _LONGEST or not _TILE.fullmatch(text):
        raise RequestError(
            f"{what} {shortened(text)} is not of the form MxN or MxNxK, such as --tile 128x64"
        )
    return tuple(int(part) for part in text.lower().split("x"))


def shortened(text: str) -> str:
    """`text` in quotes as a message repeats it: one line, its end cut off where it is long."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises RequestError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise RequestError(f"unknown dtype {dtype!r} (possible: {', '.join(DTYPE_BYTES)})")
    return DTYPE_BYTES[dtype]


def format_bytes(value: float) -> str:
    """Decimal bytes as counters print them: `4.03 GB`, `512 B`."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_capacity(value: float) -> str:
    """Binary bytes as memories are sold: `50 MiB`, `227 KiB`."""
    for factor, unit in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.0f} B"


def format_count(value: float, unit: str = "") -> str:
    """A count with a decimal prefix: `274.9 G`, `512`."""
    return _scaled(value, tuple(p + unit for p in ("", "k", "M", "G", "T", "P"))).strip()


def _scaled(value: float, units: tuple[str, ...]) -> str:
    scaled = float(value)
    for unit in units:
        if abs(scaled) < 999.5 or unit == units[-1]:
            break
        scaled /= 1000
    digits = f"{scaled:.0f}" if unit == units[0] else f"{scaled:#.4g}"
    return f"{digits} {unit}"


def ceil_div(a: int, b: int) -> int:
    """The least whole number ≥ a / b."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The least multiple of `multiple` that is ≥ a."""
    return ceil_div(a, multiple) * multiple
