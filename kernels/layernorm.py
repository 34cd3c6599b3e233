"""Layer normalization of rows: y = (x - mean) / √(variance + ε) · γ + β, and mean and rstd.

    one-pass:  for each few rows (parallel):
                   load them;  mean and variance;  load γ and β;  store y
                   store mean and rstd = 1 / √(variance + ε)
    two-reads: for each few rows (parallel):
                   for each chunk of columns: load it;  update mean and variance
                   for each chunk of columns: load it again, γ and β;  store y
                   store mean and rstd

Ba, Kiros & Hinton, "Layer Normalization", arXiv 1607.06450. Mean and variance come out of one read
by Welford's recurrence (Technometrics 4 (3), 1962): with the n-th element x,

    d = x - mean;  mean += d / n;  M += d · (x - mean);  variance = M / n

which does not cancel as the mean of squares less the square of the mean does. The variance is the
biased one. Statistics are fp32 and stored, as training needs them again; x, γ, β and y are stored
in the dtype of the problem.

two-reads is PyTorch's vectorized_layer_norm_kernel: a block of 128 threads for each row, four
elements of a thread at once; what L1 still holds of the row, and of γ and β, which all blocks of a
core read, does not come again. In one-pass a GPU's blocks are those of the softmax (row_blocks.py).
On a TPU a window holds whole rows, or a chunk of them that the grid visits twice; γ and β are
windows too, and a statistic of a row takes a row of lanes.
"""

from __future__ import annotations

import math

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, load, store, vector
from iosim.jit import numeric
from iosim.kernels.arithmetic import stored
from iosim.kernels.attention import STATISTIC_BYTES, operand
from iosim.kernels.reference import LAYERNORM_EPS
from iosim.kernels.row_blocks import (
    ONE_PASS,
    box_bytes,
    cells_of,
    choose,
    chunk_of,
    fetch_chunk,
    gpu_footprint,
    layout,
    parameters,
    require_rows,
    require_tile,
    rows_of,
    steps_of,
    window_footprint,
    window_reads,
)
from iosim.kernels.streams import run_bytes
from iosim.launch import ClosedForm, Footprint, Kernel, Launch, Operand
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.problem import Problem, Rows, Schedule, tiles
from iosim.traffic import Work
from iosim.units import dtype_bytes

X, GAMMA, BETA, Y, MEAN, RSTD = range(6)
TWO_READS = "two-reads"
WELFORD_OPS = (
    5  # vector operations per element: two subtractions, two products, two sums, one fused
)
OUTPUT_OPS = 3  # subtraction, product with rstd, and one fused with γ and β
WARPS, VECTOR = 4, 4  # warps of a block and elements that a thread reads at once, PyTorch
FIELDS = ("gamma", "beta", "mean", "rstd", "parameter_rows", "statistic_rows", "statistic_bytes")
PAPER = "arXiv 1607.06450"


@block_program
def layernorm(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one chunk of one read."""
    row0, rows, boxed = rows_of(block, p)
    steps = p.chunks * p.reads
    at = row0 * p.row_bytes
    n = 0
    if tensors is not None:
        mean, squares = np.zeros(rows), np.zeros(rows)
    for step in range(first, min(last, steps)):
        col0, cols, left, width = chunk_of(step, p)
        n = load(out, n, X, p.flags, step, p.x + at + left, boxed, width, p.row_bytes)
        if tensors is not None:
            tile = fetch_chunk(tensors[X], row0, rows, col0, cols)
        if step < p.chunks:
            n = vector(out, n, step, p.tile_m, cols, WELFORD_OPS)
            if tensors is not None:
                welford(tile, col0, mean, squares)
        if step >= steps - p.chunks:
            high, pitch = p.parameter_rows, p.row_bytes
            n = load(out, n, GAMMA, p.once, step, p.gamma + left, high, width, pitch)
            n = load(out, n, BETA, p.once, step, p.beta + left, high, width, pitch)
            n = vector(out, n, step, p.tile_m, cols, OUTPUT_OPS)
            n = store(out, n, Y, p.once, step, p.y + at + left, boxed, width, p.row_bytes)
            if tensors is not None:
                scale_rows(tensors, tile, row0, col0, mean, squares, p)
    if last < steps:
        return n, False
    size, high = p.statistic_bytes, min(p.tile_m, p.statistic_rows - row0)
    at = row0 * size
    n = store(out, n, MEAN, p.once, steps - 1, p.mean + at, high, size, size)
    n = store(out, n, RSTD, p.once, steps - 1, p.rstd + at, high, size, size)
    if tensors is not None:
        for r in range(rows):
            tensors[MEAN][0, row0 + r, 0] = mean[r]
            tensors[RSTD][0, row0 + r, 0] = rstd_of(squares[r], p)
    return n, True


@numeric
def welford(x, before, mean, squares):
    """Takes a tile into the mean and the squared deviations of its rows, of `before` elements."""
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            deviation = x[r, c] - mean[r]
            mean[r] += deviation / (before + c + 1)
            squares[r] += deviation * (x[r, c] - mean[r])


@numeric
def rstd_of(squares, p):
    """1 / √(variance + ε) of a whole row."""
    return 1 / math.sqrt(squares / p.cols + LAYERNORM_EPS)


@numeric
def scale_rows(tensors, x, row0, col0, mean, squares, p):
    """Writes a tile of y."""
    gamma = fetch_chunk(tensors[GAMMA], 0, 1, col0, x.shape[1])
    beta = fetch_chunk(tensors[BETA], 0, 1, col0, x.shape[1])
    for r in range(x.shape[0]):
        rstd = rstd_of(squares[r], p)
        for c in range(x.shape[1]):
            y = (x[r, c] - mean[r]) * rstd * gamma[0, c] + beta[0, c]
            tensors[Y][0, row0 + r, col0 + c] = stored(y, p)


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """One pass where a row fits on chip, else two reads as PyTorch does them."""
    rows = require_rows(problem)
    threads = WARPS * chip.limits.threads_per_warp if chip.limits is not None else 1
    streamed = Schedule(tile=(1, threads * VECTOR), stages=1, warps=WARPS, variant=TWO_READS)
    return choose(rows, chip, streamed, footprint)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block: its rows (one-pass), or the chunks in flight (two-reads)."""
    rows = require_rows(problem)
    if chip.grid is None:
        return gpu_footprint(rows, schedule, chip)
    gamma = parameter_matrix(rows, chip)
    statistic = statistic_matrix(rows, chip)
    return window_footprint(
        rows,
        schedule,
        chip,
        column_bytes=2 * gamma.rows * dtype_bytes(rows.dtype),
        row_bytes=2 * statistic.row_bytes,
    )


def parameter_matrix(problem: Rows, chip: Chip) -> Matrix:
    """γ in memory, and β: one row."""
    return matrix(chip, 1, 1, problem.cols, dtype_bytes(problem.dtype))


def statistic_matrix(problem: Rows, chip: Chip) -> Matrix:
    """The means in memory, and rstd: one fp32 number for a row, on a TPU a row of lanes."""
    return matrix(chip, 1, problem.rows, 1, STATISTIC_BYTES)


def memory(problem: Rows, chip: Chip) -> tuple[tuple[Operand, ...], dict[str, int]]:
    """The operands where they lie, and the values of `parameters` that say so."""
    lies, gamma = layout(problem, chip), parameter_matrix(problem, chip)
    statistic = statistic_matrix(problem, chip)
    matrices = (lies, gamma, gamma, lies, statistic, statistic)
    names = ("X", "gamma", "beta", "Y", "mean", "rstd")
    roles = ("in", "in", "in", "out", "out", "out")
    sizes = [part.size_bytes for part in matrices]
    where = addresses(*sizes)
    operands = zip(names, roles, where, sizes, strict=True)
    values = {name.lower(): address for name, address in zip(names, where, strict=True)}
    values["parameter_rows"] = gamma.rows
    values["statistic_rows"] = statistic.rows  # fp32 pads to fewer rows than 16-bit types
    values["statistic_bytes"] = statistic.row_bytes
    return tuple(operand(*each) for each in operands), values


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per `tile[0]` rows."""
    rows = require_rows(problem)
    operands, values = memory(rows, chip)
    return (
        Launch(
            name="layernorm",
            program=layernorm,
            params=parameters(rows, schedule, chip, values, FIELDS),
            blocks=tiles(rows.rows, schedule.tile[0]),
            steps=steps_of(rows, schedule, chip),
            ops_per_step=6,
            ops_at_ends=2,
            operands=operands,
            footprint=footprint(rows, schedule, chip),
            work=work(rows, schedule),
            dtype=rows.dtype,
            stages=max(1, schedule.stages),
        ),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    """Vector operations alone."""
    cells = cells_of(require_rows(problem), schedule)
    return Work(issued_vector_ops=cells * (WELFORD_OPS + OUTPUT_OPS))


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """What is written and, on a TPU, read. What a GPU holds in L1 of γ, β, x is no arithmetic."""
    rows = require_rows(problem)
    if chip.grid is not None:
        return _grid_forms(rows, schedule, chip)
    return (
        ClosedForm(
            quantity="l1_write_bytes",
            formula="rows · columns · bytes + 2 · rows · 4, in sectors of each block",
            value=box_bytes(rows, schedule, chip) + 2 * statistic_bytes(rows, schedule),
            source=f"{PAPER}: y once; mean and rstd of a block in sectors of their own",
        ),
    )


def statistic_bytes(problem: Rows, schedule: Schedule) -> int:
    """Bytes that the blocks of a GPU store of one statistic, in whole sectors."""
    starts = np.arange(0, problem.rows, schedule.tile[0], dtype=np.int64)
    rows = np.minimum(schedule.tile[0], problem.rows - starts)
    return run_bytes(starts * STATISTIC_BYTES, rows * STATISTIC_BYTES)


def _grid_forms(problem: Rows, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    size = layout(problem, chip).size_bytes
    blocks, (_, n) = tiles(problem.rows, schedule.tile[0]), require_tile(problem, schedule, chip)
    reads = window_reads(problem, schedule, chip)
    fetched = blocks if n < problem.cols else min(blocks, chip.cores_used)
    times, visits = (f"{reads} · ", "row windows") if n < problem.cols else ("", "cores")
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula=f"{times}rows · columns · bytes + {visits} · 2 · columns · bytes, padded",
            value=reads * size + fetched * 2 * parameter_matrix(problem, chip).size_bytes,
            source=f"{PAPER}: γ and β again where their window does not hold all columns",
        ),
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="rows · columns · bytes + 2 · rows · 4, padded",
            value=size + 2 * statistic_matrix(problem, chip).size_bytes,
            source=f"{PAPER}: y, mean and rstd once",
        ),
    )


KERNEL = Kernel(
    name="layernorm",
    summary="Layer normalization of rows: read once where a row stays on chip, else twice",
    problem=Rows,
    loops="parallel over rows; one-pass: load, statistics, store; two-reads: chunks twice",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "rows of a block × columns of a chunk (one-pass: all columns, whatever is said)",
        "variant": "one-pass: rows stay on chip and are read once; two-reads: chunks twice",
        "stages": "two-reads: chunks in flight; from 2 on they are copied past L1",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER, "Welford, Technometrics 4 (3), 1962", "PyTorch, layer_norm_kernel.cu"),
    variants=(ONE_PASS, TWO_READS),
    sketch=(Rows(rows=16, cols=64), Schedule(tile=(4, 16), stages=1, warps=4, variant=TWO_READS)),
)
