"""Matrix product C = A · B, row-major: a block owns a tile of C and loops over k.

    for each tile of C (parallel; tile rows in groups, inside a group column by column):
        for each tile of k:
            load a tile of A;  load a tile of B;  C tile += A tile · B tile
        store the tile of C

The order of blocks is that of the Triton matrix multiplication tutorial. On a TPU the same block is
a run of grid steps (m, n, k) with k fastest: A, B, C are windows over padded matrices, the sum is
kept in an fp32 scratch tile, as in the matmul of the JAX Pallas TPU documentation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.emit import async_matrix, block_program, inline, load, numeric, store
from iosim.errors import RequestError
from iosim.kernels.streams import operand, register_tile, tile_sectors
from iosim.launch import ClosedForm, Footprint, Kernel, Launch
from iosim.memory.layout import Matrix, addresses
from iosim.memory.layout import matrix as laid_out
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Gemm, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import SECTOR_BYTES, ceil_div, dtype_bytes, round_up

A, B, C = range(3)
ACCUMULATOR_BYTES = 4  # sums are fp32 on every chip
OTHER_REGISTERS = 40  # addresses, fragments of A and B, the loop
TRITON = "Triton tutorial 03, matrix multiplication"
PALLAS = "JAX documentation, Pallas TPU matrix multiplication"

PARAMS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "m", "n", "k", "tile_m", "tile_n", "tile_k", "group", "grid", "bypass",
            "itemsize", "m_rows", "k_rows", "a_pitch", "b_pitch", "a", "b", "c",
        )
    ]
)  # fmt: skip


@inline
def tile_of(block, p):
    """(tile row, tile column) of a block: groups of tile rows, column by column inside."""
    tile_rows = (p.m + p.tile_m - 1) // p.tile_m
    tile_columns = (p.n + p.tile_n - 1) // p.tile_n
    width = p.group * tile_columns
    first = block // width * p.group
    rows = min(tile_rows - first, p.group)
    inside = block % width
    return first + inside % rows, inside // rows


@numeric
def multiply(a, b, sums, row0, column0, k0, p):
    """Adds the product of one tile of A and one of B to `sums`, inside the matrices."""
    for r in range(min(p.tile_m, p.m - row0)):
        for c in range(min(p.tile_n, p.n - column0)):
            for i in range(k0, min(k0 + p.tile_k, p.k)):
                sums[r, c] += a[row0 + r, i] * b[i, column0 + c]


@numeric
def finish(c, sums, row0, column0, p):
    """Writes the tile of C."""
    for r in range(min(p.tile_m, p.m - row0)):
        for i in range(min(p.tile_n, p.n - column0)):
            c[row0 + r, column0 + i] = sums[r, i]


@block_program
def gemm(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one tile of k."""
    tile_row, tile_column = tile_of(block, p)
    row0 = tile_row * p.tile_m
    column0 = tile_column * p.tile_n
    steps = (p.k + p.tile_k - 1) // p.tile_k
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    rows = min(p.tile_m, p.m_rows - row0)
    left = column0 * p.itemsize
    width = min(p.tile_n * p.itemsize, p.b_pitch - left)
    n = 0
    if tensors is not None:
        sums = np.zeros((p.tile_m, p.tile_n))
    for step in range(first, min(last, steps)):
        k0 = step * p.tile_k
        depth = min(p.tile_k * p.itemsize, p.a_pitch - k0 * p.itemsize)
        k_rows = min(p.tile_k, p.k_rows - k0)
        a_at = p.a + row0 * p.a_pitch + k0 * p.itemsize
        b_at = p.b + k0 * p.b_pitch + left
        n = load(out, n, A, flags, step, a_at, rows, depth, p.a_pitch)
        n = load(out, n, B, flags, step, b_at, k_rows, width, p.b_pitch)
        n = async_matrix(out, n, step, p.tile_m, p.tile_n, p.tile_k)
        if tensors is not None:
            multiply(tensors[0], tensors[1], sums, row0, column0, k0, p)
    if last < steps:
        return n, False
    c_at = p.c + row0 * p.b_pitch + left
    n = store(out, n, C, WINDOW if p.grid else 0, steps - 1, c_at, rows, width, p.b_pitch)
    if tensors is not None:
        finish(tensors[2], sums, row0, column0, p)
    return n, True


def require_gemm(problem: Problem) -> Gemm:
    """`problem` as a Gemm. Raises RequestError for another kind."""
    if not isinstance(problem, Gemm):
        raise RequestError(f"gemm needs a matrix product, not {problem}")
    return problem


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """128 × 128 × 64, 8 warps and up to 3 stages on a GPU, windows of 512 × 512 × 512 on a TPU."""
    product = require_gemm(problem)
    if chip.grid is not None:
        lanes = chip.grid.lanes
        sides = (min(512, round_up(side, lanes)) for side in (product.m, product.n, product.k))
        return Schedule(tile=tuple(sides), group=1, stages=2)
    assert chip.limits is not None
    stage_bytes = 2 * 128 * 64 * dtype_bytes(product.dtype)
    stages = max(1, min(3, chip.limits.shared_per_block_bytes // stage_bytes))
    return Schedule(tile=(128, 128, 64), group=8, stages=stages, warps=8)


def checked(problem: Problem, schedule: Schedule, chip: Chip) -> Schedule:
    """`schedule` as `chip` runs it: a grid goes row by row, which is group 1.

    Raises RequestError for a tile that cannot be: a TPU's windows are whole register tiles.
    """
    text = "x".join(map(str, schedule.tile))
    if len(schedule.tile) != 3:
        raise RequestError(f"gemm needs a tile m × n × k, not {text}")
    if chip.grid is None:
        return schedule
    rows, lanes = register_tile(chip, dtype_bytes(require_gemm(problem).dtype))
    if schedule.tile[0] % rows or schedule.tile[1] % lanes or schedule.tile[2] % lanes:
        raise RequestError(
            f"{chip.name} needs a tile of multiples of {rows} × {lanes} × {lanes}, not {text}"
        )
    return replace(schedule, group=1)


def matrices(problem: Gemm, chip: Chip) -> tuple[Matrix, Matrix, Matrix]:
    """A, B and C in memory as the chip lays them out."""
    size = dtype_bytes(problem.dtype)
    return (
        laid_out(chip, 1, problem.m, problem.k, size),
        laid_out(chip, 1, problem.k, problem.n, size),
        laid_out(chip, 1, problem.m, problem.n, size),
    )


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory: stages × (tile of A + tile of B). VMEM: buffers × windows, fp32 sums.

    Registers per thread: the fp32 tile of C spread over the threads, and 40 more. Triton 3.6
    reports 101, 72 and 64 on the `gemm` rows of the counters where this gives 104, 72 and 72. An
    estimate: `Schedule.registers` takes a compiler's own number.
    """
    m, n, k = schedule.tile
    size = dtype_bytes(require_gemm(problem).dtype)
    if chip.grid is not None:
        return Footprint(
            window_bytes=chip.grid.window_buffers * (m * k + k * n + m * n) * size,
            scratch_bytes=m * n * ACCUMULATOR_BYTES,
        )
    assert chip.limits is not None
    threads = schedule.warps * chip.limits.threads_per_warp
    registers = min(chip.limits.registers_per_thread, ceil_div(m * n, threads) + OTHER_REGISTERS)
    return Footprint(
        shared_bytes=schedule.shared_bytes or schedule.stages * (m * k + k * n) * size,
        registers=schedule.registers or registers,
        threads=threads,
    )


def parameters(problem: Gemm, schedule: Schedule, chip: Chip, where: list[int]) -> Any:
    """The record of PARAMS that the block program reads; `where` holds the addresses."""
    a, b, _ = matrices(problem, chip)
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    tile_m, tile_n, tile_k = schedule.tile
    values = {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_k": tile_k,
        "group": schedule.group,
        "grid": int(chip.grid is not None),
        "bypass": int(schedule.stages > 1),
        "itemsize": dtype_bytes(problem.dtype),
        "m_rows": a.rows,
        "k_rows": b.rows,
        "a_pitch": a.row_bytes,
        "b_pitch": b.row_bytes,
        **dict(zip("abc", where, strict=True)),
    }
    for name, value in values.items():
        record[name] = value
    return record[0]


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per tile of C."""
    product, schedule = require_gemm(problem), checked(problem, schedule, chip)
    sizes = [each.size_bytes for each in matrices(product, chip)]
    where = addresses(*sizes)
    roles = (("A", "in"), ("B", "in"), ("C", "out"))
    return (
        Launch(
            name="gemm",
            program=gemm,
            params=parameters(product, schedule, chip, where),
            blocks=tiles(product.m, schedule.tile[0]) * tiles(product.n, schedule.tile[1]),
            steps=tiles(product.k, schedule.tile[2]),
            ops_per_step=3,
            ops_at_ends=1,
            operands=tuple(
                operand(name, role, address, size)
                for (name, role), address, size in zip(roles, where, sizes, strict=True)
            ),
            footprint=footprint(product, schedule, chip),
            work=work(product, schedule),
            dtype=product.dtype,
            stages=schedule.stages,
        ),
    )


def work(problem: Gemm, schedule: Schedule) -> Work:
    """Flops of the product, and of the whole tiles that are executed."""
    m, n, k = (
        round_up(side, tile)
        for side, tile in zip((problem.m, problem.n, problem.k), schedule.tile, strict=True)
    )
    return Work(flops=problem.matrix_flops(), issued_flops=2 * m * n * k)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them, ragged edges included."""
    product, schedule = require_gemm(problem), checked(problem, schedule, chip)
    flops = ClosedForm(
        quantity="flops",
        formula="2 · m · n · k",
        value=product.matrix_flops(),
        source="Golub and Van Loan, Matrix Computations, section 1.1",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(product, schedule, chip))


def _cache_forms(problem: Gemm, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """In whole sectors of each row of each box; loads that go through L1 are no arithmetic."""
    size = dtype_bytes(problem.dtype)
    tile_m, tile_n, tile_k = schedule.tile
    a, b, c = matrices(problem, chip)
    written = tile_sectors(problem.m, c.row_bytes, tile_m, tile_n * size)
    forms = [
        ClosedForm(
            quantity="l1_write_bytes",
            formula="m · n · bytes, in sectors",
            value=written * SECTOR_BYTES,
            source=f"{TRITON}: every tile of C once",
        )
    ]
    if schedule.stages > 1:
        per_column = tile_sectors(problem.m, a.row_bytes, tile_m, tile_k * size)
        per_row = tile_sectors(problem.k, b.row_bytes, tile_k, tile_n * size)
        sectors = tiles(problem.n, tile_n) * per_column + tiles(problem.m, tile_m) * per_row
        forms.append(
            ClosedForm(
                quantity="l1_fill_bytes",
                formula="(⌈n / tile n⌉ · m · k + ⌈m / tile m⌉ · k · n) · bytes, in sectors",
                value=sectors * SECTOR_BYTES,
                source=f"{TRITON}: A once per tile column of C, B once per tile row",
            )
        )
    return tuple(forms)


def _grid_forms(problem: Gemm, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Of padded matrices: with two steps of k or more, every step fetches both windows."""
    a, b, c = matrices(problem, chip)
    tile_m, tile_n, tile_k = schedule.tile
    drained = ClosedForm(
        quantity="vmem_drain_bytes",
        formula="C, padded",
        value=c.size_bytes,
        source=f"{PALLAS}: C leaves after the last step of k",
    )
    if tiles(problem.k, tile_k) == 1:
        return (drained,)  # what stays in its window depends on where cores share the grid
    filled = ClosedForm(
        quantity="vmem_fill_bytes",
        formula="⌈n / tile n⌉ · A + ⌈m / tile m⌉ · B, padded",
        value=tiles(problem.n, tile_n) * a.size_bytes + tiles(problem.m, tile_m) * b.size_bytes,
        source=f"{PALLAS}: grid (m, n, k), k fastest",
    )
    return filled, drained


KERNEL = Kernel(
    name="gemm",
    summary="Matrix product C = A · B: tiles of C in parallel, tiles of A and B streamed along k",
    problem=Gemm,
    loops="parallel over tiles of C, in groups of tile rows; inside, over tiles of k",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "m × n × k",
        "group": "tile rows launched together, column by column; 1: row by row (GPU)",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(TRITON, PALLAS),
    sketch=(Gemm(m=64, n=64, k=64), Schedule(tile=(16, 16, 16), stages=2, warps=4, group=2)),
)
