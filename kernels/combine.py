"""The second launch of split decoding: partial outputs of all splits become one.

    for each few rows (parallel):
        load their log-sum-exps and partial outputs of every split
        O = Σ exp(lse of the split - lse of all) · O of the split
        store O

Flash-Decoding, step 3 (Dao, Haziza, Massa, Sizov, 2023). Not a kernel of its own: the decoding
kernels launch it after their splits. Loads are asynchronous copies past L1, as in FlashAttention-3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, load, numeric, store, vector
from iosim.kernels.attention import STATISTIC_BYTES, threads_of
from iosim.kernels.rounding import FORMATS, to_format
from iosim.kernels.streams import run_bytes
from iosim.launch import Footprint, Launch, Operand
from iosim.memory.layout import Matrix
from iosim.ops import L1_BYPASS
from iosim.problem import Attention, Schedule, tiles
from iosim.traffic import Work
from iosim.units import SECTOR_BYTES, dtype_bytes

ROWS = 8  # of a block
WARPS = 4
REGISTERS = 40
COMBINE_OPS = 2  # vector operations per partial element: weight, sum
PART, LSE, O = range(3)
SOURCE = "Flash-Decoding, step 3"

PARAMS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "rows", "splits", "columns", "itemsize", "part", "lse", "o",
            "digits", "least_exponent",
        )
    ]
    + [("largest", np.float64)]
)  # fmt: skip


@block_program
def combine(block, first, last, p, out, tensors):
    """One step: a few rows of one matrix."""
    groups = (p.rows + ROWS - 1) // ROWS
    matrix = block // groups
    row0 = block % groups * ROWS
    rows = min(ROWS, p.rows - row0)
    row_bytes = p.columns * STATISTIC_BYTES
    top = matrix * p.splits * p.rows + row0
    size = rows * STATISTIC_BYTES
    at = p.lse + top * STATISTIC_BYTES
    n = load(out, 0, LSE, L1_BYPASS, 0, at, p.splits, size, p.rows * STATISTIC_BYTES)
    at = p.part + top * row_bytes
    n = load(out, n, PART, L1_BYPASS, 0, at, p.splits, rows * row_bytes, p.rows * row_bytes)
    n = exps(out, n, 0, rows, p.splits)
    n = vector(out, n, 0, rows * p.splits, p.columns, COMBINE_OPS)
    stored = p.columns * p.itemsize
    at = p.o + (matrix * p.rows + row0) * stored
    n = store(out, n, O, 0, 0, at, rows, stored, stored)
    if tensors is not None:
        merge(tensors, matrix, row0, rows, p)
    return n, True


@numeric
def merge(tensors, matrix, row0, rows, p):
    """The rows' outputs from those of all splits; rows that saw no key are 0."""
    for r in range(row0, row0 + rows):
        peak = -np.inf
        for s in range(p.splits):
            peak = max(peak, tensors[1][matrix * p.splits + s, r])
        total = 0.0
        sums = np.zeros(p.columns)
        for s in range(p.splits):
            weight = 0.0
            if peak > -np.inf:
                weight = np.exp(tensors[1][matrix * p.splits + s, r] - peak)
            total += weight
            for c in range(p.columns):
                sums[c] += weight * tensors[0][matrix * p.splits + s, r, c]
        for c in range(p.columns):
            value = sums[c] / total if total > 0 else 0.0
            tensors[2][matrix, r, c] = to_format(value, p.digits, p.least_exponent, p.largest)


def combine_launch(
    problem: Attention,
    chip: Chip,
    splits: int,
    o: Matrix,
    columns: int,
    operands: tuple[Operand, Operand, Operand],
) -> Launch:
    """The launch that merges `splits` partial outputs of `columns` elements into `o`.

    `operands`: the partial outputs, their log-sum-exps, O. GPUs only.
    """
    part, lse, result = operands
    form = FORMATS[problem.dtype]
    rows = problem.group * problem.seqlen
    values: dict[str, Any] = {
        "rows": rows,
        "splits": splits,
        "columns": columns,
        "itemsize": dtype_bytes(problem.dtype),
        "part": part.address,
        "lse": lse.address,
        "o": result.address,
        "digits": form.digits,
        "least_exponent": form.least,
        "largest": -form.largest if form.saturates else form.largest,
    }
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    for name, value in values.items():
        record[name] = value
    cells = o.count * rows * splits
    return Launch(
        name="combine",
        program=combine,
        params=record[0],
        blocks=o.count * tiles(rows, ROWS),
        steps=1,
        ops_per_step=5,
        ops_at_ends=0,
        operands=operands,
        footprint=Footprint(registers=REGISTERS, threads=threads_of(Schedule(warps=WARPS), chip)),
        work=Work(issued_exps=cells, issued_vector_ops=cells * columns * COMBINE_OPS),
        dtype=problem.dtype,
    )


def combine_bytes(problem: Attention, splits: int, columns: int, row_bytes: int) -> tuple[int, int]:
    """Bytes that the launch loads and stores, in the sectors that its blocks touch."""
    rows = problem.group * problem.seqlen
    row0 = np.arange(0, rows, ROWS, dtype=np.int64)
    count = np.minimum(ROWS, rows - row0)
    matrices = problem.batch * problem.kv_heads
    moved = 0
    for size in (STATISTIC_BYTES, columns * STATISTIC_BYTES):
        for first in range(matrices):
            moved += _sectors(first * splits, rows, splits, row0, count, size)
    top = np.arange(matrices, dtype=np.int64)[:, None] * rows + row0
    return moved * SECTOR_BYTES, run_bytes(top * row_bytes, count * row_bytes)


def _sectors(
    first: int, rows: int, splits: int, row0: np.ndarray, count: np.ndarray, size: int
) -> int:
    """Sectors that the blocks of one matrix load, each block every sector once."""
    top = (first + np.arange(splits, dtype=np.int64)[None, :]) * rows + row0[:, None]
    low = top * size // SECTOR_BYTES
    high = ((top + count[:, None]) * size - 1) // SECTOR_BYTES
    again = (low[:, 1:] == high[:, :-1]).sum()  # a sector that two splits of a block share
    return int((high - low + 1).sum() - again)
