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
from iosim.emit import block_program, exps, load, matrix, numeric, store, vector
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    block_of,
    key_tiles,
    operand,
    parameters,
    require_attention,
    score_registers,
    visible_keys,
)
from iosim.launch import ClosedForm, Footprint, Kernel, Launch
from iosim.memory.layout import addresses
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import round_up

Q, K, V, O, LSE = range(5)
SOFTMAX_OPS = 5  # vector operations per score: scale, maximum, subtraction, sum, conversion
MASK_OPS = 2  # more where a mask may hide keys: comparison, selection


@numeric
def attend(q, k, v, head, kv, row0, rows, key0, keys, m, total, acc, p):
    """One step of the online softmax on real numbers: updates m, total and acc in place."""
    for r in range(rows):
        low, high = visible_keys(row0 + r, p)
        scores = np.empty(keys)
        peak = m[r]
        for c in range(keys):
            s = 0.0
            for d in range(p.head_dim):
                s += q[head, row0 + r, d] * k[kv, key0 + c, d]
            seen = low <= key0 + c < high
            scores[c] = s * p.scale if seen else -np.inf
            peak = max(peak, scores[c])
        weight = np.exp(m[r] - peak) if peak > -np.inf else 0.0
        total[r] *= weight
        for d in range(p.head_dim):
            acc[r, d] *= weight
        for c in range(keys):
            e = np.exp(scores[c] - peak) if peak > -np.inf else 0.0
            total[r] += e
            for d in range(p.head_dim):
                acc[r, d] += e * v[kv, key0 + c, d]
        m[r] = peak


@numeric
def finish(o, lse, head, row0, rows, m, total, acc, p):
    """Writes the output rows and their log-sum-exp; fully masked rows are 0 and -inf."""
    for r in range(rows):
        for d in range(p.head_dim):
            o[head, row0 + r, d] = acc[r, d] / total[r] if total[r] > 0 else 0.0
        if p.lse > 0:
            lse[head, row0 + r] = m[r] + np.log(total[r]) if total[r] > 0 else -np.inf


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
    softmax_ops = SOFTMAX_OPS + MASK_OPS * (p.causal | (p.window > 0))
    q_rows = min(p.tile_m, p.q_rows - row0)
    q_at = (head * p.q_rows + row0) * p.row_bytes
    n = 0
    if first == 0:
        n = load(out, n, Q, once, 0, p.q + q_at, q_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        m, total = np.full(rows, -np.inf), np.zeros(rows)
        acc = np.zeros((rows, p.head_dim))
    for step in range(first, min(last, steps)):
        tile = step if p.grid else tile0 + step
        idle = p.grid and not tile0 <= tile < tile_end
        if idle:
            tile = min(tile0, (p.seqlen_k - 1) // p.tile_n)
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        k_rows = min(p.tile_n, p.k_rows - key0)
        at = (kv * p.k_rows + key0) * p.row_bytes
        n = load(out, n, K, flags, step, p.k + at, k_rows, p.row_bytes, p.row_bytes)
        if not idle:
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load(out, n, V, flags, step, p.v + at, k_rows, p.row_bytes, p.row_bytes)
        if not idle:
            n = vector(out, n, step, p.tile_m, p.head_dim, 1)  # rescale what is accumulated
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
            if tensors is not None:
                q, k, v = tensors[0], tensors[1], tensors[2]
                attend(q, k, v, head, kv, row0, rows, key0, keys, m, total, acc, p)
    if last < steps:
        return n, False
    n = store(out, n, O, once, max(steps - 1, 0), p.o + q_at, q_rows, p.row_bytes, p.row_bytes)
    if p.lse > 0:
        at = p.lse + (head * p.seqlen + row0) * STATISTIC_BYTES
        size = rows * STATISTIC_BYTES
        n = store(out, n, LSE, once, max(steps - 1, 0), at, 1, size, size)
    if tensors is not None:
        finish(tensors[3], tensors[4], head, row0, rows, m, total, acc, p)
    return n, True


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """128 × 64 with two stages on a GPU, 512 × 512 windows on a TPU."""
    attention = require_attention(problem)
    if chip.grid is not None:
        side = (512, 512)
        longest = (round_up(attention.seqlen, 128), round_up(attention.seqlen_k, 128))
        return Schedule(tile=(min(side[0], longest[0]), min(side[1], longest[1])), stages=2)
    wide = attention.head_dim > 64
    return Schedule(tile=(128, 64), stages=2, warps=8 if wide else 4)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory: Q + stages × (K + V). VMEM: two of each window, fp32 m, l and O, scores.

    The compiler's temporaries are one fp32 score tile per unrolled inner step.
    """
    attention = require_attention(problem)
    m, n = schedule.tile[:2]
    row_bytes = Tensors.of(attention, chip).q.row_bytes
    if chip.grid is not None:
        inner = min(schedule.tile[2] if len(schedule.tile) > 2 else n, n)
        lanes = chip.grid.lanes
        width = round_up(attention.head_dim, lanes)
        return Footprint(
            window_bytes=chip.grid.window_buffers * 2 * (m + n) * row_bytes,
            scratch_bytes=m * (2 * lanes + width) * STATISTIC_BYTES,
            temporary_bytes=m * n * STATISTIC_BYTES if inner > lanes else 0,
        )
    warps = schedule.warps or 4
    threads = warps * (chip.limits.threads_per_warp if chip.limits else 32)
    shared = (m + max(1, schedule.stages) * 2 * n) * row_bytes
    registers = score_registers(m, n, attention.head_dim, threads)
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        registers=schedule.registers or registers,
        threads=threads,
    )


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: heads × query tiles blocks. GPUs store the log-sum-exp, grids only O."""
    attention = require_attention(problem)
    tensors = Tensors.of(attention, chip)
    heads = attention.batch * attention.heads
    lse_bytes = 0 if chip.grid else heads * attention.seqlen * STATISTIC_BYTES
    where = addresses(*tensors.sizes, lse_bytes)
    operands = tensors.operands(where)
    starts = dict(zip(("q", "k", "v", "o"), where, strict=False))
    if lse_bytes:
        operands += (operand("lse", "out", where[4], lse_bytes),)
        starts["lse"] = where[4]
    return (
        Launch(
            name="flash2",
            program=flash2,
            params=parameters(attention, schedule, chip, starts),
            blocks=heads * tiles(attention.seqlen, schedule.tile[0]),
            steps=tiles(attention.seqlen_k, schedule.tile[1]),
            ops_per_step=7,
            ops_at_ends=3,
            operands=operands,
            footprint=footprint(attention, schedule, chip),
            work=work(attention, schedule),
            dtype=attention.dtype,
            stages=max(1, schedule.stages),
        ),
    )


def visited(problem: Problem, schedule: Schedule) -> int:
    """(query tile, key tile) pairs that one head visits."""
    attention = require_attention(problem)
    m, n = schedule.tile[:2]
    row0 = np.arange(0, attention.seqlen, m)
    spans = []
    for start in row0.tolist():
        seen = [attention.visible(r) for r in _corner_rows(attention, start, m)]
        seen = [(low, high) for low, high in seen if high > low]
        if seen:
            low, high = min(s[0] for s in seen), max(s[1] for s in seen)
            spans.append(tiles(high, n) - low // n)
    return sum(spans)


def _corner_rows(problem: Problem, start: int, m: int) -> list[int]:
    attention = require_attention(problem)
    end = min(start + m, attention.seqlen) - 1
    if not attention.causal and not attention.window:
        return [start]
    inside = (-attention.diagonal, attention.seqlen_k - 1 - attention.diagonal)
    return [start, end, *(r for r in inside if start < r < end)]


def work(problem: Problem, schedule: Schedule) -> Work:
    """Flops and exps of the unmasked pairs, and of the whole tiles that are executed."""
    attention = require_attention(problem)
    m, n = schedule.tile[:2]
    scores = visited(attention, schedule) * m * n * attention.batch * attention.heads
    ops = SOFTMAX_OPS + MASK_OPS * (attention.causal or attention.window > 0)
    return Work(
        flops=attention.matrix_flops(),
        exps=attention.exps,
        issued_flops=4 * scores * attention.head_dim,
        issued_exps=scores,
        issued_vector_ops=scores * ops + scores // n * attention.head_dim,
    )


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Bytes that arrive at the cores and leave them, from tile counts alone."""
    attention = require_attention(problem)
    heads = attention.batch * attention.heads
    n = schedule.tile[1]
    d = attention.head_dim * Tensors.of(attention, chip).itemsize
    if chip.grid is not None:
        return ()
    ragged = attention.seqlen_k % n == 0 or visited(attention, schedule) == 0
    forms = [
        ClosedForm(
            quantity="flops",
            formula="4 · unmasked pairs · d · heads",
            value=attention.matrix_flops(),
            source="arXiv 2307.08691, section 4.1",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula="heads · N · (d · bytes + 4)",
            value=heads * attention.seqlen * (d + STATISTIC_BYTES),
            source="arXiv 2307.08691, algorithm 1: O and the log-sum-exp once",
        ),
    ]
    if ragged:
        tiles_seen = visited(attention, schedule)
        forms.append(
            ClosedForm(
                quantity="l1_fill_bytes",
                formula="heads · (N + 2 · Bc · visited tiles) · d · bytes",
                value=heads * (attention.seqlen + 2 * n * tiles_seen) * d,
                source="arXiv 2307.08691, algorithm 1: Q once, K and V once per query tile",
            )
        )
    return tuple(forms)


KERNEL = Kernel(
    name="flash2",
    summary="FlashAttention-2 forward: query tiles in parallel, K and V streamed, scores on chip",
    problem=Attention,
    loops="parallel over (batch · head, query tile); inside, over key tiles: K, scores, softmax, V",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "query rows × key rows (TPU: block_q × block_k_major × block_k)",
        "order": "query: tiles of one head follow each other; head: one tile of every head first",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "key tiles that no row of the query tile sees are not visited",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("arXiv 2307.08691",),
)
