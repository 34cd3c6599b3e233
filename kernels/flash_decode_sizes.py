"""Flash-Decoding: how large its blocks are, where its tensors lie, what it moves by arithmetic."""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    from_shared,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
    tile_work,
)
from iosim.kernels.combine import combine_bytes
from iosim.kernels.masks import seen
from iosim.kernels.packed import Packed, keys_of_tiles, row_tile, row_tile_spans, visited_tiles
from iosim.kernels.split_kv import (
    Memory,
    Read,
    key_chunk,
    kv_tile_bytes,
    split_memory,
    split_schedule,
    written_form,
)
from iosim.launch import ClosedForm, Footprint
from iosim.problem import Attention, Problem, Schedule
from iosim.traffic import Work
from iosim.units import dtype_bytes, round_up

SOURCE = "Flash-Decoding, 2023"


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """Up to 64 packed rows × 64 keys with three stages and as many splits as fill the cores.

    On a TPU up to 128 rows × windows of 512 keys.
    """
    attention = require_attention(problem, scales=True)
    choices = [
        Schedule(tile=(row_tile(attention, m), n), stages=stages, warps=4)
        for m, n in ((64, 64), (32, 64), (16, 64), (16, 32), (16, 16))
        for stages in (3, 2, 1)
    ]
    return split_schedule(
        attention, chip, choices, lambda choice: footprint(attention, choice, chip)
    )


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


def memory(problem: Attention, schedule: Schedule, chip: Chip) -> Memory:
    """Q, K, V, what is stored, the scales of K and V, local memory; O apart."""
    tensors, packed = Tensors.of(problem, chip), Packed.of(problem, chip)
    rows, keys = seen(problem)
    q_needed = packed.count * problem.group * rows * packed.q.row_bytes
    k = (tensors.k.size_bytes, tensors.k.count * keys * tensors.k.row_bytes)
    scale = (tensors.scale.size_bytes, tensors.scale.count * keys * STATISTIC_BYTES)
    return split_memory(
        problem,
        schedule,
        chip,
        footprint(problem, schedule, chip),
        (packed.q, problem.head_dim),
        [Read("q", "Q", packed.q.size_bytes, q_needed), Read("k", "K", *k), Read("v", "V", *k)],
        [Read("k_scale", "K_scale", *scale), Read("v_scale", "V_scale", *scale)],
    )


def work(problem: Attention, schedule: Schedule) -> Work:
    """Of the splits: flops and exps of the unmasked pairs, and of the whole tiles."""
    run = visited_tiles(problem, schedule) * problem.batch * problem.kv_heads
    return tile_work(problem, schedule, run)


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
    loaded, _ = combine_bytes(problem, splits, problem.head_dim, row)
    keys = 2 * keys_of_tiles(problem, schedule) * key_bytes
    local_bytes = footprint(problem, schedule, chip).local_bytes
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="splits · Q + KV heads · 2 · keys of visited tiles · d · bytes; "
            "then splits · heads · N · (d + 1) · 4",
            value=packed.count * (splits * packed.rows * row + keys) + loaded,
            source=f"{SOURCE}: Q once per split, K and V once per group of query heads",
        ),
        written_form(problem, schedule, (packed.q, problem.head_dim), local_bytes, "d"),
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
