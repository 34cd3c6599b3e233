"""Latent attention: how large its blocks are, where its tensors lie, what it moves by hand."""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
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
from iosim.kernels.masks import rows_fetched, seen
from iosim.kernels.packed import Packed, keys_of_tiles, row_tile, row_tile_spans, visited_tiles
from iosim.kernels.split_kv import (
    Memory,
    Read,
    key_chunk,
    split_memory,
    split_schedule,
    written_form,
)
from iosim.launch import ClosedForm, Footprint
from iosim.memory.layout import Matrix, matrix
from iosim.problem import Problem, Schedule
from iosim.problem_variants import LatentDecode
from iosim.traffic import Work
from iosim.units import dtype_bytes, round_up

PAPER = "arXiv 2405.04434"


def require_latent(problem: Problem) -> LatentDecode:
    """`problem` as a LatentDecode. Raises RequestError for another kind."""
    if not isinstance(problem, LatentDecode):
        raise RequestError(f"mla-decode needs a latent problem (LatentDecode), not {problem}")
    return problem


def output_of(problem: LatentDecode, chip: Chip) -> Matrix:
    """O: packed rows of latent_dim elements for every sequence."""
    rows = problem.heads * problem.seqlen
    return matrix(chip, problem.batch, rows, problem.latent_dim, dtype_bytes(problem.dtype))


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """64 packed rows × 64 tokens, as FlashMLA, two stages where they fit, and splits to fill.

    On a TPU up to 128 rows × windows of 512 tokens.
    """
    latent = require_latent(require_attention(problem, scales=True))
    choices = [
        Schedule(tile=(row_tile(latent, m), n), stages=stages, warps=8)
        for m, n, stages in (
            (64, 64, 2), (64, 64, 1), (64, 32, 1), (32, 32, 2), (32, 32, 1), (16, 32, 1),
            (16, 16, 1),
        )
    ]  # fmt: skip
    return split_schedule(latent, chip, choices, lambda choice: footprint(latent, choice, chip))


def footprint(problem: LatentDecode, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block of the splits.

    Shared memory: Q + stages × the tile (it is key and value) + P, which other warps read.
    Registers: fp32 accumulator of latent_dim columns and scores. VMEM: two of each window, fp32 m,
    l and O, and spilled scores.
    """
    m, n, _ = require_tile(problem, schedule, chip)
    tensors = Tensors.of(problem, chip)
    q_bytes = m * Packed.of(problem, chip).q.row_bytes
    scale_bytes = tensors.scale.rows * n * STATISTIC_BYTES if problem.scaled else 0
    kv_bytes = n * tensors.k.row_bytes + scale_bytes
    if chip.grid is not None:
        lanes = chip.grid.lanes
        width = round_up(problem.latent_dim, lanes)
        o_bytes = m * output_of(problem, chip).row_bytes
        return Footprint(
            window_bytes=chip.grid.window_buffers * (q_bytes + o_bytes + kv_bytes),
            scratch_bytes=m * (2 * lanes + width) * STATISTIC_BYTES,
            temporary_bytes=spilled_bytes(m * n, chip),
        )
    values = m * problem.latent_dim + m * n
    if not from_shared(m, problem.dtype, chip):
        values += m * problem.head_dim // 2
    p_bytes = m * n * dtype_bytes(problem.dtype)
    shared = q_bytes + max(1, schedule.stages) * kv_bytes + p_bytes
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        **registers_of(values, schedule, chip, m * (problem.latent_dim + n)),
    )


def memory(problem: LatentDecode, schedule: Schedule, chip: Chip) -> Memory:
    """Q, the cache and its scales, what is stored, local memory; O apart."""
    tensors, packed = Tensors.of(problem, chip), Packed.of(problem, chip)
    rows, keys = seen(problem)
    q_needed = packed.count * problem.heads * rows * packed.q.row_bytes
    kv = (tensors.k.size_bytes, tensors.k.count * keys * tensors.k.row_bytes)
    scale = (tensors.scale.size_bytes, tensors.scale.count * keys * STATISTIC_BYTES)
    return split_memory(
        problem,
        schedule,
        chip,
        footprint(problem, schedule, chip),
        (output_of(problem, chip), problem.latent_dim),
        [
            Read("q", "Q", packed.q.size_bytes, q_needed),
            Read("k", "KV", *kv),
            Read("k_scale", "KV_scale", *scale),
        ],
        [],
    )


def work(problem: LatentDecode, schedule: Schedule) -> Work:
    """Of the splits: flops and exps of the unmasked pairs, and of the whole tiles."""
    run = visited_tiles(problem, schedule) * problem.batch
    return tile_work(problem, schedule, run, value_dim=problem.latent_dim, tensors=1)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them over all launches."""
    latent = require_latent(require_attention(problem, scales=True))
    flops = ClosedForm(
        quantity="flops",
        formula="2 · unmasked pairs · (d + latent) · heads",
        value=latent.matrix_flops(),
        source=f"{PAPER}, section 2.1: scores over the row, outputs over its latent part",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(latent, schedule, chip))


def _cache_forms(problem: LatentDecode, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    packed, tensors = Packed.of(problem, chip), Tensors.of(problem, chip)
    splits, o = max(1, schedule.splits), output_of(problem, chip)
    key_bytes = tensors.k.row_bytes + STATISTIC_BYTES * problem.scaled
    loaded, _ = combine_bytes(problem, splits, problem.latent_dim, o.row_bytes)
    tokens = keys_of_tiles(problem, schedule) * key_bytes
    local_bytes = footprint(problem, schedule, chip).local_bytes
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="splits · Q + batch · tokens of visited tiles · d · bytes; "
            "then splits · heads · N · (latent + 1) · 4",
            value=packed.count * (splits * packed.rows * packed.q.row_bytes + tokens) + loaded,
            source=f"{PAPER}: a token once per tile of packed rows, key and value at once",
        ),
        written_form(problem, schedule, (o, problem.latent_dim), local_bytes, "latent"),
    )


def _grid_forms(problem: LatentDecode, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    o, q, k = output_of(problem, chip), Packed.of(problem, chip).q, Tensors.of(problem, chip).k
    m, n = schedule.tile[:2]
    starts = np.arange(0, problem.heads * problem.seqlen, m)
    rows = int(np.minimum(m, o.rows - starts).sum())
    first, end = row_tile_spans(problem, m, n)
    block = np.arange(problem.batch * first.size)
    tile, sequence = block % first.size, block // first.size
    steps, cores = key_chunk(problem, schedule), chip.cores_used
    tokens = rows_fetched(first[tile], end[tile], sequence, (n, k.rows), steps, cores)
    filled = ClosedForm(
        quantity="vmem_fill_bytes",
        formula="(batch · heads · N + rows of windows of tokens whose index changes) · padded row",
        value=q.count * rows * q.row_bytes + tokens * k.row_bytes,
        source=f"{PAPER}: a token once per tile of packed rows, key and value at once",
    )
    drained = ClosedForm(
        quantity="vmem_drain_bytes",
        formula="batch · heads · N · padded row bytes of O",
        value=o.count * rows * o.row_bytes,
        source=f"{PAPER}: O once",
    )
    return (drained,) if problem.scaled else (filled, drained)  # scales are padded in their own way
