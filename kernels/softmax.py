"""Softmax of rows, read once where a row stays on chip, else twice.

    one-pass: for each few rows (parallel):
                  load them;  m = maximum, s = sum of exp(x - m)
                  store exp(x - m) / s
    online:   for each few rows (parallel):
                  for each chunk of columns:
                      load it;  new maximum m;  s = s · exp(old m - m) + sum of exp(x - m)
                  for each chunk of columns:
                      load it again;  store exp(x - m) / s

The plain algorithm for a row that does not stay on chip reads it three times: maximum, sum, output.
The online one corrects the sum whenever the maximum grows, so that one read gives both: three
accesses of an element instead of four. Milakov & Gimelshein, "Online normalizer calculation for
softmax", arXiv 1805.02867, algorithm 3. The statistics are fp32; x and y are stored in the dtype
of the problem. A row of -inf alone gives 0.

A GPU's blocks are those of PyTorch's softmax: four rows with a warp for each up to 2048 columns,
then 32 warps for a row (row_blocks.py). On a TPU a window holds whole rows, or a chunk of them
that the grid visits twice.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, load, store, vector
from iosim.jit import numeric
from iosim.kernels.arithmetic import stored
from iosim.kernels.attention import operand
from iosim.kernels.row_blocks import (
    BLOCK_WARPS,
    ONE_PASS,
    VECTOR_BYTES,
    begins_at_sectors,
    box_bytes,
    cells_of,
    choose,
    chunk_of,
    fetch_chunk,
    gpu_footprint,
    layout,
    parameters,
    reads_of,
    require_rows,
    rows_of,
    steps_of,
    window_footprint,
    window_reads,
)
from iosim.launch import ClosedForm, Footprint, Kernel, Launch
from iosim.memory.layout import addresses
from iosim.problem import Problem, Rows, Schedule, tiles
from iosim.traffic import Work
from iosim.units import dtype_bytes

X, Y = range(2)
ONLINE = "online"
SUM_OPS = 3  # vector operations per element of the statistics: maximum, subtraction, sum
OUTPUT_OPS = 1  # and of the output: product with 1 / s
AGAIN_OPS = 2  # subtraction and product, where the exponentials were not kept
PAPER = "arXiv 1805.02867"


@block_program
def softmax(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one chunk of one read."""
    row0, rows, boxed = rows_of(block, p)
    steps = p.chunks * p.reads
    at = row0 * p.row_bytes
    n = 0
    if tensors is not None:
        m, total = np.full(rows, -np.inf), np.zeros(rows)
    for step in range(first, min(last, steps)):
        col0, cols, left, width = chunk_of(step, p)
        n = load(out, n, X, p.flags, step, p.x + at + left, boxed, width, p.row_bytes)
        if tensors is not None:
            tile = fetch_chunk(tensors[X], row0, rows, col0, cols)
        if step < p.chunks:
            n = vector(out, n, step, p.tile_m, cols, SUM_OPS)
            n = exps(out, n, step, p.tile_m, cols)
            if tensors is not None:
                gather(tile, m, total)
        if step >= steps - p.chunks:
            n = vector(out, n, step, p.tile_m, cols, OUTPUT_OPS if p.reads == 1 else AGAIN_OPS)
            if p.reads > 1:
                n = exps(out, n, step, p.tile_m, cols)
            n = store(out, n, Y, p.once, step, p.y + at + left, boxed, width, p.row_bytes)
            if tensors is not None:
                normalize(tensors[Y], tile, row0, col0, m, total, p)
    return n, last >= steps


@numeric
def gather(x, m, total):
    """The online normalizer of a tile: updates the maximum and the sum of every row in place."""
    for r in range(x.shape[0]):
        peak = m[r]
        for c in range(x.shape[1]):
            peak = max(peak, x[r, c])
        if peak == -np.inf:
            continue  # nothing but -inf so far
        total[r] *= np.exp(m[r] - peak)
        for c in range(x.shape[1]):
            total[r] += np.exp(x[r, c] - peak)
        m[r] = peak


@numeric
def normalize(y, x, row0, col0, m, total, p):
    """Writes exp(x - m) / total of a tile; rows of -inf alone are 0."""
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            share = np.exp(x[r, c] - m[r]) / total[r] if total[r] > 0 else 0.0
            y[0, row0 + r, col0 + c] = stored(share, p)


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """One pass where a row fits on chip, else online.

    Then a chunk of a GPU is a vector of 16 bytes for each of 1024 threads, and two stages let the
    next one be on its way.
    """
    rows = require_rows(problem)
    chunk = 0 if chip.limits is None else BLOCK_WARPS * chip.limits.threads_per_warp * VECTOR_BYTES
    tile = (1, max(1, chunk // dtype_bytes(rows.dtype)))
    streamed = Schedule(tile=tile, stages=2, warps=BLOCK_WARPS, variant=ONLINE)
    return choose(rows, chip, streamed, footprint)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block: its rows (one-pass), or the chunks in flight (online)."""
    rows = require_rows(problem)
    if chip.grid is not None:
        return window_footprint(rows, schedule, chip, column_bytes=0, row_bytes=0)
    return gpu_footprint(rows, schedule, chip)


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per `tile[0]` rows."""
    rows = require_rows(problem)
    size = layout(rows, chip).size_bytes
    x, y = addresses(size, size)
    return (
        Launch(
            name="softmax",
            program=softmax,
            params=parameters(rows, schedule, chip, {"x": x, "y": y}),
            blocks=tiles(rows.rows, schedule.tile[0]),
            steps=steps_of(rows, schedule, chip),
            ops_per_step=5,
            ops_at_ends=0,
            operands=(operand("X", "in", x, size), operand("Y", "out", y, size)),
            footprint=footprint(rows, schedule, chip),
            work=work(rows, schedule),
            dtype=rows.dtype,
            stages=max(1, schedule.stages),
        ),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    """An exponential of every element; online computes it twice."""
    rows = require_rows(problem)
    cells, reads = cells_of(rows, schedule), reads_of(schedule)
    ops = SUM_OPS + (OUTPUT_OPS if reads == 1 else AGAIN_OPS)
    return Work(exps=rows.elements, issued_exps=cells * reads, issued_vector_ops=cells * ops)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Accesses of an element: two where its row stays on chip, else three."""
    rows = require_rows(problem)
    once = schedule.variant == ONE_PASS
    source = f"{PAPER}, " + ("a row on chip: one load, one store" if once else "section 3: 2 loads")
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return moved(rows, schedule, chip, source)


def _cache_forms(
    problem: Rows, schedule: Schedule, chip: Chip, source: str
) -> tuple[ClosedForm, ...]:
    moved, reads = box_bytes(problem, schedule, chip), reads_of(schedule)
    written = ClosedForm(
        quantity="l1_write_bytes",
        formula="rows · columns · bytes, in sectors",
        value=moved,
        source=source,
    )
    past_l1 = reads > 1 and schedule.stages > 1
    if not past_l1 and (reads > 1 or not begins_at_sectors(problem, schedule)):
        return (written,)  # what L1 still holds is no arithmetic
    times = f"{reads} · " if reads > 1 else ""
    read = ClosedForm(
        quantity="l1_fill_bytes",
        formula=f"{times}rows · columns · bytes, in sectors",
        value=reads * moved,
        source=source,
    )
    return read, written


def _grid_forms(
    problem: Rows, schedule: Schedule, chip: Chip, source: str
) -> tuple[ClosedForm, ...]:
    size, reads = layout(problem, chip).size_bytes, window_reads(problem, schedule, chip)
    times = f"{reads} · " if reads > 1 else ""
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula=f"{times}rows · columns · bytes, padded",
            value=reads * size,
            source=source,
        ),
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="rows · columns · bytes, padded",
            value=size,
            source=source,
        ),
    )


KERNEL = Kernel(
    name="softmax",
    summary="Softmax of rows: read once where a row stays on chip, else twice (online)",
    problem=Rows,
    loops="parallel over rows; one-pass: load, statistics, store; online: chunks twice",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "rows of a block × columns of a chunk (one-pass: all columns, whatever is said)",
        "variant": "one-pass: rows stay on chip and are read once; online: chunks are read twice",
        "stages": "online: chunks in flight; from 2 on they are copied past L1 into shared memory",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER, "PyTorch, PersistentSoftmax.cuh and SoftMax.cu"),
    variants=(ONE_PASS, ONLINE),
    sketch=(Rows(rows=16, cols=64), Schedule(tile=(4, 16), stages=1, warps=4, variant=ONLINE)),
)
