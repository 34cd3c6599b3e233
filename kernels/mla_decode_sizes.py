"""Latent attention: how large its blocks are, where its tensors lie, what it moves by hand."""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import (
    DEQUANT_OPS,
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    from_shared,
    local_operand,
    mask_ops,
    operand,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
)
from iosim.kernels.combine import combine_bytes, scratch
from iosim.kernels.flash_decode_sizes import Memory
from iosim.kernels.masks import rows_fetched, seen
from iosim.kernels.packed import (
    Packed,
    default_splits,
    key_chunk,
    keys_of_tiles,
    partial_sizes,
    row_tile,
    row_tile_spans,
    statistic_sectors,
    visited_tiles,
)
from iosim.launch import ClosedForm, Footprint, Operand
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.problem import Problem, Schedule, tiles
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
    if chip.grid is not None:
        lanes = chip.grid.lanes
        rows, most = row_tile(latent, lanes), round_up(latent.seqlen_k, lanes)
        choices = [Schedule(tile=(rows, min(n, most)), stages=2) for n in (512, 256, lanes)]
    else:
        choices = [
            Schedule(tile=(row_tile(latent, m), n), stages=stages, warps=8)
            for m, n, stages in (
                (64, 64, 2), (64, 64, 1), (64, 32, 1), (32, 32, 2), (32, 32, 1), (16, 32, 1),
                (16, 16, 1),
            )
        ]  # fmt: skip
    chosen = first_fit(choices, lambda schedule: [footprint(latent, schedule, chip)], chip)
    if chip.grid is not None:
        return chosen
    m, n = chosen.tile[:2]
    blocks = latent.batch * tiles(latent.heads * latent.seqlen, m)
    splits = default_splits(blocks, chip.cores_used, tiles(latent.seqlen_k, n))
    return Schedule(tile=chosen.tile, stages=chosen.stages, warps=chosen.warps, splits=splits)


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
    """Q, the cache and its scales, partial outputs and log-sum-exps, local memory; O apart."""
    tensors, packed = Tensors.of(problem, chip), Packed.of(problem, chip)
    block = footprint(problem, schedule, chip)
    part, lse = partial_sizes(problem, schedule, problem.latent_dim)
    if chip.grid is not None:
        part = lse = 0
    o = output_of(problem, chip).size_bytes
    q, k, scale = packed.q.size_bytes, tensors.k.size_bytes, tensors.scale.size_bytes
    where = addresses(q, k, scale, part, lse, block.local_bytes, o)
    rows, keys = seen(problem)
    needed = (
        packed.count * problem.heads * rows * packed.q.row_bytes,
        tensors.k.count * keys * tensors.k.row_bytes,
        tensors.scale.count * keys * STATISTIC_BYTES,
    )
    read = zip(("Q", "KV", "KV_scale"), where, (q, k, scale), needed, strict=False)
    result = operand("O", "out", where[6], o)
    partial = result if chip.grid else scratch("O_part", where[3], part)
    operands = (
        *(
            Operand(name=name, role="in", address=at, size_bytes=size, unique_bytes=unique)
            for name, at, size, unique in read
        ),
        partial,
        scratch("lse_part", where[4], lse),
        local_operand(block, where[5], chip),
    )
    names = ("q", "k", "k_scale", "o", "lse", "local")
    values = dict(zip(names, where, strict=False))
    values["o"] = partial.address
    values["spill_bytes"] = block.local_bytes
    return Memory(operands=operands, result=result, values=values)


def work(problem: LatentDecode, schedule: Schedule) -> Work:
    """Of the splits: flops and exps of the unmasked pairs, and of the whole tiles."""
    m, n = schedule.tile[:2]
    run = visited_tiles(problem, schedule) * problem.batch
    scores = run * m * n
    vector_ops = scores * mask_ops(problem) + run * m * problem.latent_dim
    if problem.scaled:
        vector_ops += run * n * problem.head_dim * DEQUANT_OPS
    return Work(
        flops=problem.matrix_flops(),
        exps=problem.exps,
        issued_flops=2 * scores * (problem.head_dim + problem.latent_dim),
        issued_exps=scores,
        issued_vector_ops=vector_ops,
    )


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
    splits = max(1, schedule.splits)
    key_bytes = tensors.k.row_bytes + STATISTIC_BYTES * problem.scaled
    row = output_of(problem, chip).row_bytes
    loaded, written = combine_bytes(problem, splits, problem.latent_dim, row)
    parts, _ = partial_sizes(problem, schedule, problem.latent_dim)
    spilled = footprint(problem, schedule, chip).local_bytes * visited_tiles(problem, schedule)
    tokens = keys_of_tiles(problem, schedule) * key_bytes
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="splits · Q + batch · tokens of visited tiles · d · bytes; "
            "then splits · heads · N · (latent + 1) · 4",
            value=packed.count * (splits * packed.rows * packed.q.row_bytes + tokens) + loaded,
            source=f"{PAPER}: a token once per tile of packed rows, key and value at once",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula="splits · heads · N · (latent + 1) · 4, in sectors; then heads · N · latent",
            value=parts + statistic_sectors(problem, schedule) + packed.count * spilled + written,
            source="Flash-Decoding, 2023: partial outputs in fp32, then O",
        ),
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
