"""Unfused attention: how large its blocks are, what they execute, what they move by arithmetic."""

from __future__ import annotations

from dataclasses import replace

from iosim.chip import Chip
from iosim.kernels.attention import (
    MASK_OPS,
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
    window_choices,
)
from iosim.kernels.row_blocks import kept, row_cut
from iosim.kernels.streams import tile_sectors
from iosim.launch import ClosedForm, Footprint, why_not
from iosim.memory.layout import Matrix
from iosim.memory.layout import matrix as laid_out
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import SECTOR_BYTES, dtype_bytes, round_up

PAPER = "arXiv 2205.14135"
ROW_OPS = 4  # vector operations per score of the softmax: maximum, subtraction, sum, division


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """128 × 128 with two stages on a GPU, 512 × 512 windows on a TPU; smaller where needed."""
    attention = require_attention(problem)
    if chip.grid is not None:
        choices = window_choices(attention, chip)
    else:
        choices = [
            Schedule(tile=tile, stages=stages, warps=8)
            for tile in ((128, 128), (128, 64), (64, 64), (32, 32), (16, 16))
            for stages in (2, 1)
        ]
    prints = (scores_footprint, output_footprint)
    return first_fit(choices, lambda schedule: [f(attention, schedule, chip) for f in prints], chip)


def score_matrix(problem: Attention, chip: Chip) -> Matrix:
    """S and P in memory: a matrix of seqlen × seqlen_k for every query head."""
    heads, size = problem.batch * problem.heads, dtype_bytes(problem.dtype)
    return laid_out(chip, heads, problem.seqlen, problem.seqlen_k, size)


def scores_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory: the tiles of Q and K. VMEM: two of each window, and an fp32 tile of S."""
    m, n, _ = require_tile(problem, schedule, chip)
    row_bytes = Tensors.of(problem, chip).q.row_bytes
    if chip.grid is not None:
        moved = (m + n) * row_bytes + m * n * dtype_bytes(problem.dtype)
        return Footprint(
            window_bytes=chip.grid.window_buffers * moved,
            temporary_bytes=spilled_bytes(m * n, chip),
        )
    return _gpu_footprint((m + n) * row_bytes, m * n, schedule, chip)


def output_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory: stages × tiles of P and V. VMEM: two of each window, and O in fp32."""
    m, n, _ = require_tile(problem, schedule, chip)
    row_bytes = Tensors.of(problem, chip).q.row_bytes
    moved = m * n * dtype_bytes(problem.dtype) + n * row_bytes
    if chip.grid is not None:
        width = round_up(problem.head_dim, chip.grid.lanes)
        return Footprint(
            window_bytes=chip.grid.window_buffers * (moved + m * row_bytes),
            scratch_bytes=m * width * STATISTIC_BYTES,
        )
    return _gpu_footprint(max(1, schedule.stages) * moved, m * problem.head_dim, schedule, chip)


def _gpu_footprint(shared: int, values: int, schedule: Schedule, chip: Chip) -> Footprint:
    """What spills is left out: these launches move none of it."""
    registers = {**registers_of(values, schedule, chip), "spilled_registers": 0}
    return Footprint(shared_bytes=schedule.shared_bytes or shared, **registers)


def softmax_cut(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[int, int, Footprint]:
    """(rows of a softmax block, how often it reads them, its footprint); see row_blocks.py."""
    lies = score_matrix(problem, chip)
    keys = problem.seqlen_k
    if chip.grid is not None:
        values_bytes = round_up(keys, chip.grid.lanes) * STATISTIC_BYTES
        window_bytes = chip.grid.window_buffers * 2 * lies.row_bytes
        packed = laid_out(chip, 1, 1, 1, dtype_bytes(problem.dtype)).rows
        rows, most = schedule.tile[0], chip.grid.scoped_limit_bytes
        while rows > packed and rows * (window_bytes + values_bytes) > most:
            rows = round_up(rows // 2, packed)
        return (
            rows,
            1,
            Footprint(
                window_bytes=rows * window_bytes,
                temporary_bytes=spilled_bytes(rows * values_bytes // STATISTIC_BYTES, chip),
            ),
        )
    rows, warps = row_cut(keys)
    block = kept(rows, keys, warps, dtype_bytes(problem.dtype), chip)
    if why_not(block, chip):
        return rows, 3, replace(block, shared_bytes=0)
    return rows, 1, block


def score_ops(problem: Attention) -> int:
    """Vector operations per score of the first product: scale, and the mask where there is one."""
    return 1 + MASK_OPS * (problem.causal or problem.window > 0)


def works(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[Work, Work, Work]:
    """What the three launches are asked for, and execute: a mask spares none of it."""
    m, n = schedule.tile[:2]
    rows, _, _ = softmax_cut(problem, schedule, chip)
    heads, d = problem.batch * problem.heads, problem.head_dim
    asked = problem.matrix_flops(products=1)
    height, width = (tiles(problem.seqlen, m) * m, tiles(problem.seqlen_k, n) * n)
    whole = heads * height * width
    cells = heads * tiles(problem.seqlen, rows) * rows * problem.seqlen_k
    return (
        Work(
            flops=asked,
            issued_flops=2 * whole * d,
            issued_vector_ops=whole * score_ops(problem),
        ),
        Work(exps=problem.exps, issued_exps=cells, issued_vector_ops=cells * ROW_OPS),
        Work(flops=asked, issued_flops=2 * whole * d),
    )


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them over the three launches.

    On a GPU in whole sectors of each row of each box, which is exact where every head's scores
    begin at a sector.
    """
    attention = require_attention(problem)
    flops = ClosedForm(
        quantity="flops",
        formula="4 · unmasked pairs · d · heads; all pairs are computed",
        value=attention.matrix_flops(),
        source=f"{PAPER}, section 3.1",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(attention, schedule, chip))


def _cache_forms(problem: Attention, schedule: Schedule, chip: Chip) -> list[ClosedForm]:
    m, n = schedule.tile[:2]
    rows, passes, _ = softmax_cut(problem, schedule, chip)
    heads, itemsize = problem.batch * problem.heads, dtype_bytes(problem.dtype)
    row, pitch = problem.head_dim * itemsize, problem.seqlen_k * itemsize
    query_tiles, key_tiles = tiles(problem.seqlen, m), tiles(problem.seqlen_k, n)
    q = tile_sectors(problem.seqlen, row, m, row)
    k = tile_sectors(problem.seqlen_k, row, n, row)
    tiled = tile_sectors(problem.seqlen, pitch, m, n * itemsize)
    whole = tile_sectors(problem.seqlen, pitch, rows, pitch)
    forms = [
        ClosedForm(
            quantity="l1_write_bytes",
            formula="heads · (2 · N² + N · d) · bytes, in sectors",
            value=heads * (tiled + whole + q) * SECTOR_BYTES,
            source=f"{PAPER}, algorithm 0: S, P and O once",
        )
    ]
    if schedule.stages > 1 and passes == 1:  # what comes again through L1 is no arithmetic
        read = key_tiles * q + 2 * query_tiles * k + whole + tiled
        forms.append(
            ClosedForm(
                quantity="l1_fill_bytes",
                formula="heads · (2 · N² + (⌈N/n⌉ + 2 · ⌈N/m⌉) · N · d) · bytes, in sectors",
                value=heads * read * SECTOR_BYTES,
                source=f"{PAPER}, algorithm 0, in tiles: S and P once, Q, K and V once per tile",
            )
        )
    return forms


def _grid_forms(problem: Attention, schedule: Schedule, chip: Chip) -> list[ClosedForm]:
    tensors, s = Tensors.of(problem, chip), score_matrix(problem, chip).size_bytes
    query_tiles = tiles(problem.seqlen, schedule.tile[0])
    k = problem.group * tensors.k.size_bytes  # K of every query head
    forms = [
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="S + P + O, padded",
            value=2 * s + tensors.q.size_bytes,
            source=f"{PAPER}, algorithm 0: S, P and O once",
        )
    ]
    one_key_window = schedule.tile[1] >= problem.seqlen_k  # then it stays from step to step
    if chip.cores_used == 1 and not one_key_window:
        forms.append(
            ClosedForm(
                quantity="vmem_fill_bytes",
                formula="S + P + Q + ⌈N/m⌉ · (K + V) of every query head, padded",
                value=2 * s + tensors.q.size_bytes + 2 * query_tiles * k,
                source=f"{PAPER}, algorithm 0, in windows: K and V once per query window",
            )
        )
    return forms
