"""FlashAttention-2 forward: a block owns a tile of query rows and streams K and V past it.

    for each tile of query rows (parallel):
        load Q
        for each tile of keys that the mask lets it see:
            load K;  S = Q Kᵀ;  new row maxima;  P = exp(S - max)
            load V;  O = O · exp(old max - max) + P V
        store O / row sums, and the log-sum-exp

Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1. On a TPU the same block is a run of grid
steps (batch · head, query tile, key tile): Q, K, V, O are windows, and steps that the mask skips
point at the first visible key tile, as `jax.experimental.pallas.ops.tpu.flash_attention` does.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, load, matrix, spill, store, vector
from iosim.kernels.arithmetic import attend, consecutive, fetch, fetch_keys, finish
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    dequantize,
    first_fit,
    forward_memory,
    from_shared,
    load_scale,
    parameters,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
    tile_work,
    window_choices,
)
from iosim.kernels.masks import (
    block_of,
    key_spans,
    key_tiles,
    keys_loaded,
    rows_fetched,
    visited,
)
from iosim.kernels.streams import run_bytes
from iosim.launch import ClosedForm, Footprint, Kernel, Launch
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import round_up

Q, K, V, O, LSE, K_SCALE, V_SCALE, LOCAL = range(8)
PAPER = "arXiv 2307.08691"
PALLAS = "jax.experimental.pallas.ops.tpu.flash_attention"


@block_program
def flash2(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one key tile."""
    head, query = block_of(block, p)
    kv = head // p.group
    row0 = query * p.tile_m
    rows = min(p.tile_m, p.seqlen - row0)
    tile0, tile_end = key_tiles(row0, rows, p)
    steps = (p.seqlen_k + p.tile_n - 1) // p.tile_n if p.grid else tile_end - tile0
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    once = WINDOW if p.grid else 0
    q_rows = min(p.tile_m, p.q_rows - row0)
    q_at = (head * p.q_rows + row0) * p.row_bytes
    n = 0
    if first == 0:
        n = load(out, n, Q, once, 0, p.q + q_at, q_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        q = fetch(tensors[Q], head, row0, rows, p.head_dim)
        m, total = np.full(rows, -np.inf), np.zeros(rows)
        acc = np.zeros((rows, p.head_dim))
    for step in range(first, min(last, steps)):
        tile = step if p.grid else tile0 + step
        idle = p.grid and not tile0 <= tile < tile_end
        if idle:
            tile = tile0
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        k_rows = min(p.tile_n, p.k_rows - key0)
        at = (kv * p.k_rows + key0) * p.k_row_bytes
        n = load(out, n, K, flags, step, p.k + at, k_rows, p.k_row_bytes, p.k_row_bytes)
        n = load_scale(out, n, K_SCALE, flags, step, p.k_scale, kv, key0, p)
        if not idle:
            n = dequantize(out, n, step, p.tile_n, p.head_dim, p)
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load(out, n, V, flags, step, p.v + at, k_rows, p.k_row_bytes, p.k_row_bytes)
        n = load_scale(out, n, V_SCALE, flags, step, p.v_scale, kv, key0, p)
        if not idle:
            n = dequantize(out, n, step, p.tile_n, p.head_dim, p)
            n = vector(out, n, step, p.tile_m, p.head_dim, 1)  # rescale what is accumulated
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
            n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
            if tensors is not None:
                k = fetch_keys(tensors[K], tensors[K_SCALE], kv, key0, keys, p.head_dim, p)
                v = fetch_keys(tensors[V], tensors[V_SCALE], kv, key0, keys, p.head_dim, p)
                attend(q, k, v, consecutive(row0, rows), key0, m, total, acc, p)
    if last < steps:
        return n, False
    n = store(out, n, O, once, max(steps - 1, 0), p.o + q_at, q_rows, p.row_bytes, p.row_bytes)
    if p.lse > 0:
        at = p.lse + (head * p.seqlen + row0) * STATISTIC_BYTES
        size = rows * STATISTIC_BYTES
        n = store(out, n, LSE, once, max(steps - 1, 0), at, 1, size, size)
    if tensors is not None:
        finish(tensors[O], tensors[LSE], head, row0, m, total, acc, p)
    return n, True


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """128 × 64 with two stages on a GPU, 512 × 512 windows on a TPU; smaller where that is needed.

    A second group of warps from 128 columns on, so that the accumulator fits the registers.
    """
    attention = require_attention(problem, scales=True)
    if chip.grid is not None:
        choices = window_choices(attention, chip)
    else:
        warps = 8 if attention.head_dim > 64 else 4
        choices = [
            Schedule(tile=tile, stages=stages, warps=warps)
            for tile in ((128, 64), (64, 64), (64, 32), (32, 32), (16, 16))
            for stages in (2, 1)
        ]
    return first_fit(choices, lambda schedule: [footprint(attention, schedule, chip)], chip)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block.

    Shared memory is Q + stages × (K + V), what Triton 3.6 takes for tiles of 64 rows and more;
    where it has no warp-group product (32 rows) it keeps one stage fewer and P instead:
    Q + (stages - 1) × (K + V) + P. Registers: fp32 accumulator and scores, 16-bit probabilities,
    which can take the place of the scores where there is no room for both.

    VMEM is two of each window, fp32 m, l and O, and the vector registers that the compiler spills:
    one fp32 score tile per inner step, for these are unrolled. libtpu 0.0.42.1 refuses the same
    blocks, and takes the same to 20 % on all others tried (128 columns and more) but one (36 %).
    """
    attention = require_attention(problem, scales=True)
    m, n, _ = require_tile(attention, schedule, chip)
    tensors = Tensors.of(attention, chip)
    q_bytes = m * tensors.q.row_bytes
    scale_bytes = tensors.scale.rows * n * STATISTIC_BYTES if attention.scaled else 0
    kv_bytes = 2 * (n * tensors.k.row_bytes + scale_bytes)
    if chip.grid is not None:
        lanes = chip.grid.lanes
        width = round_up(attention.head_dim, lanes)
        return Footprint(
            window_bytes=chip.grid.window_buffers * (2 * q_bytes + kv_bytes),
            scratch_bytes=m * (2 * lanes + width) * STATISTIC_BYTES,
            temporary_bytes=spilled_bytes(m * n, chip),
        )
    fewest = m * attention.head_dim + m * n
    values = fewest + m * n // 2
    if not from_shared(m, attention.dtype, chip):
        values += m * attention.head_dim // 2  # Q, two 16-bit values in a register
    return Footprint(
        shared_bytes=schedule.shared_bytes or q_bytes + max(1, schedule.stages) * kv_bytes,
        **registers_of(values, schedule, chip, fewest),
    )


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: heads × query tiles blocks. GPUs store the log-sum-exp, grids only O."""
    attention = require_attention(problem, scales=True)
    m, n, _ = require_tile(attention, schedule, chip)
    block = footprint(attention, schedule, chip)
    heads = attention.batch * attention.heads
    lse_bytes = 0 if chip.grid else heads * attention.seqlen * STATISTIC_BYTES
    operands, values = forward_memory(attention, chip, block, lse_bytes)
    return (
        Launch(
            name="flash2",
            program=flash2,
            params=parameters(attention, schedule, chip, values),
            blocks=heads * tiles(attention.seqlen, m),
            steps=tiles(attention.seqlen_k, n),
            ops_per_step=13,
            ops_at_ends=3,
            operands=operands,
            footprint=block,
            work=work(attention, schedule),
            dtype=attention.dtype,
            stages=max(1, schedule.stages),
            matrix_rows=m,
        ),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    """Flops and exps of the unmasked pairs, and of the whole tiles that are executed."""
    attention = require_attention(problem, scales=True)
    heads = attention.batch * attention.heads
    return tile_work(attention, schedule, visited(attention, schedule) * heads)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them, from tile counts alone."""
    attention = require_attention(problem, scales=True)
    flops = ClosedForm(
        quantity="flops",
        formula="4 · unmasked pairs · d · heads",
        value=attention.matrix_flops(),
        source=f"{PAPER}, section 4.1",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(attention, schedule, chip))


def _cache_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    heads = problem.batch * problem.heads
    tensors = Tensors.of(problem, chip)
    keys = keys_loaded(problem, schedule)
    scales = " + 2 · key rows · 4" if problem.scaled else ""
    key_bytes = tensors.k.row_bytes + STATISTIC_BYTES * problem.scaled
    local_bytes = footprint(problem, schedule, chip).local_bytes
    spilled = " + visited tiles · threads · spilled registers · 4" if local_bytes else ""
    written = problem.seqlen * tensors.q.row_bytes * heads + stored_lse_bytes(problem, schedule)
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula=f"heads · ((N + 2 · key rows of visited tiles) · d · bytes{scales})",
            value=heads * (problem.seqlen * tensors.q.row_bytes + 2 * keys * key_bytes),
            source=f"{PAPER}, algorithm 1: Q once, K and V once per query tile",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"heads · (N · (d · bytes + 4){spilled}), in sectors",
            value=written + heads * visited(problem, schedule) * local_bytes,
            source=f"{PAPER}, algorithm 1: O and the log-sum-exp once",
        ),
    )


def stored_lse_bytes(problem: Attention, schedule: Schedule) -> int:
    """Bytes of the sectors that all blocks write of the log-sum-exp, each block its own."""
    m = schedule.tile[0]
    row0 = np.arange(0, problem.seqlen, m, dtype=np.int64)
    top = np.arange(problem.batch * problem.heads, dtype=np.int64)[:, None] * problem.seqlen
    rows = np.minimum(m, problem.seqlen - row0)
    return run_bytes((top + row0) * STATISTIC_BYTES, rows * STATISTIC_BYTES)


def _grid_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    tensors = Tensors.of(problem, chip)
    q = tensors.q
    m = schedule.tile[0]
    q_rows = q.count * min(tiles(problem.seqlen, m) * m, q.rows)
    fill = q_rows * q.row_bytes
    fill += 2 * window_rows(problem, schedule, chip, tensors.k.rows) * tensors.k.row_bytes
    scales = ""
    if problem.scaled:
        numbers = tensors.scale.row_bytes // STATISTIC_BYTES  # of a row, padded
        height = tensors.scale.rows * STATISTIC_BYTES
        fill += 2 * window_rows(problem, schedule, chip, numbers) * height
        scales = " + 2 · fp32 scales of these rows, padded"
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula="(heads · N + 2 · rows of key windows whose index changes) · padded row bytes"
            + scales,
            value=fill,
            source=f"{PALLAS}: a skipped step points at the first visible key window",
        ),
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="heads · N · padded row bytes",
            value=q_rows * q.row_bytes,
            source=f"{PALLAS}: O once",
        ),
    )


def window_rows(problem: Attention, schedule: Schedule, chip: Chip, most: int) -> int:
    """Rows of the K windows that a grid fetches: those whose index is not that of the step before.

    `most` are the rows of one head, padded: the last window ends there. Blocks follow each other in
    the order of the schedule.
    """
    n = schedule.tile[1]
    first, end = key_spans(problem, schedule.tile[0], n)
    heads = problem.batch * problem.heads
    block = np.arange(heads * first.size)
    query = block // heads if schedule.order == "head" else block % first.size
    kv = (block % heads if schedule.order == "head" else block // first.size) // problem.group
    steps, cores = tiles(problem.seqlen_k, n), chip.cores_used
    return rows_fetched(first[query], end[query], kv, (n, most), steps, cores)


KERNEL = Kernel(
    name="flash2",
    summary="FlashAttention-2 forward: query tiles in parallel, K and V streamed, scores on chip",
    problem=Attention,
    loops="parallel over (batch · head, query tile); inside, over key tiles: K, scores, softmax, V",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "query rows × key rows (TPU: block_q × block_k_major × block_k)",
        "order": "query: tiles of one head follow each other; head: one tile of every head first",
        "spills": "registers of a thread that go through local memory at every step",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "key tiles that no row of the query tile sees are not visited",
        "kv_dtype": "K and V stored in fp8 or int8 with an fp32 scale per row, widened on chip",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("arXiv 2307.08691",),
    sketch=(Attention(heads=1, seqlen=64, head_dim=16), Schedule(tile=(16, 16), stages=2, warps=4)),
)
