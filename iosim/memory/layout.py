"""Where tensors lie: addresses, and the padding that a TPU gives to the last two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from iosim.chip import Chip
from iosim.units import round_up

_FIRST_ADDRESS = 1 << 32  # away from 0, so that a cut tag or an invalid way would show
_ALIGNMENT = 512  # what CUDA's and XLA's allocators give at least
_SUBLANE_BYTES = 4  # a sublane row holds 32-bit words: narrower types pack more rows


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A stack of row-major matrices in memory, padded as the chip wants it.

    `row_bytes` is the padded row (also the pitch), `rows` the padded number of rows of one matrix.
    """

    count: int
    rows: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole stack."""
        return self.count * self.rows * self.row_bytes


def matrix(chip: Chip, count: int, rows: int, columns: int, itemsize: int) -> Matrix:
    """A stack of `count` matrices as `chip` stores them.

    On a TPU the last dimension pads to the lanes, the one before to the sublanes (8 for 32-bit
    types, 16 for 16-bit ones); GPUs do not pad.
    """
    if chip.grid is None:
        return Matrix(count=count, rows=rows, row_bytes=columns * itemsize)
    packed = chip.grid.sublanes * max(1, _SUBLANE_BYTES // itemsize)
    return Matrix(
        count=count,
        rows=round_up(rows, packed),
        row_bytes=round_up(columns, chip.grid.lanes) * itemsize,
    )


def addresses(*sizes: int) -> list[int]:
    """Start addresses of tensors of these sizes, laid one after the other, aligned."""
    starts, free = [], _FIRST_ADDRESS
    for size in sizes:
        starts.append(free)
        free = round_up(free + size, _ALIGNMENT)
    return starts
