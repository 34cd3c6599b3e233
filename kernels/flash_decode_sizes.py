"""Flash-Decoding: how large its blocks are, where its tensors lie, what it moves by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from iosim.chip import Chip
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    from_shared,
    local_operand,
    operand,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
)
from iosim.kernels.combine import combine_bytes, scratch
from iosim.kernels.masks import seen
from iosim.kernels.packed import (
    Packed,
    default_splits,
    key_chunk,
    keys_of_tiles,
    kv_tile_bytes,
    partial_sizes,
    row_tile,
    row_tile_spans,
    statistic_sectors,
    visited_tiles,
)
from iosim.launch import ClosedForm, Footprint, Operand
from iosim.memory.layout import addresses
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.units import dtype_bytes, round_up

SOURCE = "Flash-Decoding, 2023"


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """Up to 64 packed rows × 64 keys with three stages and as many splits as fill the cores.

    On a TPU up to 128 rows × windows of 512 keys.
    """
    attention = require_attention(problem, scales=True)
    if chip.grid is not None:
        lanes = chip.grid.lanes
        rows, most = row_tile(attention, lanes), round_up(attention.seqlen_k, lanes)
        choices = [Schedule(tile=(rows, min(n, most)), stages=2) for n in (512, 256, lanes)]
    else:
        choices = [
            Schedule(tile=(row_tile(attention, m), n), stages=stages, warps=4)
            for m, n in ((64, 64), (32, 64), (16, 64), (16, 32), (16, 16))
            for stages in (3, 2, 1)
        ]
    chosen = first_fit(choices, lambda schedule: [footprint(attention, schedule, chip)], chip)
    if chip.grid is not None:
        return chosen
    m, n = chosen.tile[:2]
    packed = Packed.of(attention, chip)
    blocks = packed.count * tiles(packed.rows, m)
    splits = default_splits(blocks, chip.cores_used, tiles(attention.seqlen_k, n))
    return Schedule(tile=chosen.tile, stages=chosen.stages, warps=chosen.warps, splits=splits)


def footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block of the splits.

    Shared memory is what Triton 3.6 takes: from 64 rows on Q + stages × (K + V); below, where there
    is no warp-group product, Q + (stages - 1) × (K + V) + P. Registers: fp32 accumulator and
    scores, 16-bit probabilities. VMEM: two of each window, fp32 m, l and O, and spilled scores.
    """
    m, n, _ = require_tile(problem, schedule, chip)
    q_bytes = m * Packed.of(problem, chip).q.row_bytes
    kv_bytes = kv_tile_bytes(problem, schedule, chip)
    if chip.grid is not None:
        lanes = chip.grid.lanes
        width = round_up(problem.head_dim, lanes)
        return Footprint(
            window_bytes=chip.grid.window_buffers * (2 * q_bytes + kv_bytes),
            scratch_bytes=m * (2 * lanes + width) * STATISTIC_BYTES,
            temporary_bytes=spilled_bytes(m * n, chip),
        )
    stages = max(1, schedule.stages)
    values = m * problem.head_dim + m * n + m * n // 2
    shared = q_bytes + stages * kv_bytes
    if not from_shared(m, problem.dtype, chip):
        values += m * problem.head_dim // 2
        shared = q_bytes + max(1, stages - 1) * kv_bytes + m * n * dtype_bytes(problem.dtype)
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        **registers_of(values, schedule, chip, m * (problem.head_dim + n)),
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The operands of the splits, O (where a second launch writes it), and their addresses."""

    operands: tuple[Operand, ...]
    result: Operand
    values: Mapping[str, int]


def memory(problem: Attention, schedule: Schedule, chip: Chip) -> Memory:
    """Q, K, V, partial outputs and log-sum-exps, scales, local memory; O apart.

    A chip that runs grids has no partial ones: O itself stands in their place.
    """
    tensors, packed = Tensors.of(problem, chip), Packed.of(problem, chip)
    block = footprint(problem, schedule, chip)
    part, lse = partial_sizes(problem, schedule, problem.head_dim)
    if chip.grid is not None:
        part = lse = 0
    q, k, scale = packed.q.size_bytes, tensors.k.size_bytes, tensors.scale.size_bytes
    where = addresses(q, k, k, part, lse, scale, scale, block.local_bytes, q)
    rows, keys = seen(problem)
    q_needed = packed.count * problem.group * rows * packed.q.row_bytes
    k_needed = tensors.k.count * keys * tensors.k.row_bytes
    result = operand("O", "out", where[8], q)
    partial = result if chip.grid else scratch("O_part", where[3], part)
    read = (
        ("Q", where[0], q, q_needed),
        ("K", where[1], k, k_needed),
        ("V", where[2], k, k_needed),
    )
    operands = (
        *(
            Operand(name=name, role="in", address=at, size_bytes=size, unique_bytes=needed)
            for name, at, size, needed in read
        ),
        partial,
        scratch("lse_part", where[4], lse),
        *tensors.scale_operands(problem, where[5:7]),
        local_operand(block, where[7], chip),
    )
    names = ("q", "k", "v", "o", "lse", "k_scale", "v_scale", "local")
    values = dict(zip(names, where, strict=False))
    values["o"] = partial.address
    values["spill_bytes"] = block.local_bytes
    return Memory(operands=operands, result=result, values=values)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them over all launches."""
    attention = require_attention(problem, scales=True)
    flops = ClosedForm(
        quantity="flops",
        formula="4 · unmasked pairs · d · heads",
        value=attention.matrix_flops(),
        source=f"{SOURCE}: as attention without splits",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(attention, schedule, chip))


def _cache_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    packed, tensors = Packed.of(problem, chip), Tensors.of(problem, chip)
    splits, row = max(1, schedule.splits), packed.q.row_bytes
    key_bytes = tensors.k.row_bytes + STATISTIC_BYTES * problem.scaled
    loaded, written = combine_bytes(problem, splits, problem.head_dim, row)
    parts, _ = partial_sizes(problem, schedule, problem.head_dim)
    spilled = footprint(problem, schedule, chip).local_bytes * visited_tiles(problem, schedule)
    keys = 2 * keys_of_tiles(problem, schedule) * key_bytes
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="splits · Q + KV heads · 2 · keys of visited tiles · d · bytes; "
            "then splits · heads · N · (d + 1) · 4",
            value=packed.count * (splits * packed.rows * row + keys) + loaded,
            source=f"{SOURCE}: Q once per split, K and V once per group of query heads",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula="splits · heads · N · (d + 1) · 4, in sectors; then heads · N · d · bytes",
            value=parts + statistic_sectors(problem, schedule) + packed.count * spilled + written,
            source=f"{SOURCE}: partial outputs in fp32, then O",
        ),
    )


def drained_form(problem: Attention, schedule: Schedule, chip: Chip) -> ClosedForm:
    """What a grid writes: O once."""
    packed = Packed.of(problem, chip)
    return ClosedForm(
        quantity="vmem_drain_bytes",
        formula="heads · N · padded row bytes",
        value=packed.count * _window_rows(packed, schedule) * packed.q.row_bytes,
        source=f"{SOURCE}, without splits: O once",
    )


def _grid_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    packed, tensors = Packed.of(problem, chip), Tensors.of(problem, chip)
    drained = drained_form(problem, schedule, chip)
    first, end = row_tile_spans(problem, *schedule.tile[:2])
    every = (end - first == key_chunk(problem, schedule)).all()
    one_window = key_chunk(problem, schedule) == 1
    if problem.scaled or not every or (one_window and first.size > 1) or chip.cores_used > 1:
        return (drained,)
    n, most = schedule.tile[1], tensors.k.rows
    keys = min(key_chunk(problem, schedule) * n, most) * first.size
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula="(heads · N + KV heads · row tiles · 2 · Nk) · padded row bytes",
            value=drained.value + 2 * packed.count * keys * tensors.k.row_bytes,
            source=f"{SOURCE}, without splits: K and V once per tile of packed rows",
        ),
        drained,
    )


def _window_rows(packed: Packed, schedule: Schedule) -> int:
    """Rows that the windows of one KV head cover: whole tiles, cut at the padded matrix."""
    m = schedule.tile[0]
    starts = np.arange(0, packed.rows, m)
    return int(np.minimum(m, packed.q.rows - starts).sum())
