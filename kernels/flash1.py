"""FlashAttention-1 forward: a block owns a head, holds a tile of K and V, and walks over all of Q.

    for each head (parallel):
        for each tile of keys:
            load K and V
            for each tile of query rows that sees any of them:
                load Q, and the O, row sums l and row maxima m of the visits before
                S = Q Kᵀ;  P = exp(S - new m);  new l
                O = (O · l · exp(m - new m) + P V) / new l
                store O, l and m

Dao et al., "FlashAttention", arXiv 2205.14135, algorithm 1. Every tile of keys reads and writes the
output once more, so traffic grows with ⌈N/Bc⌉ · N · d, whatever the query tile is; FlashAttention-2
turned the loops around. O, l and m hold 0, 0 and -inf before the launch (a memset that is not
counted), and the first visit reads them like every other.

Loads go through L1, as the plain loads of the kernel behind the counters do. A tile comes back only
after the whole inner loop, when L1 has lost it: on the shapes of the counters under 0.2 % of the
loads hit, there and here.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import barrier, block_program, exps, load, matrix, spill, store, vector
from iosim.errors import RequestError
from iosim.kernels.arithmetic import fetch, revisit
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    from_shared,
    local_operand,
    operand,
    parameters,
    registers_of,
    require_attention,
    require_tile,
    tile_work,
)
from iosim.kernels.masks import key_spans, query_tiles, visited
from iosim.launch import ClosedForm, Footprint, Kernel, Launch
from iosim.memory.layout import addresses
from iosim.ops import L1_BYPASS
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work

Q, K, V, O, SUM, MAX, LOCAL = range(7)
PAPER = "arXiv 2205.14135"
OUTPUT_OPS = 3  # per element of O: scale what was there, add the product, divide


@block_program
def flash1(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one visit of a key tile to a query tile."""
    kv = block // p.group
    flags = L1_BYPASS if p.bypass else 0
    size = p.row_bytes
    begin = 0  # the step with which a key tile begins
    n = 0
    for tile in range((p.seqlen_k + p.tile_n - 1) // p.tile_n):
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        query0, query_end = query_tiles(key0, keys, p)
        end = begin + query_end - query0
        if tensors is not None:
            k = fetch(tensors[1], kv, key0, keys if end > begin else 0, p.head_dim)
            v = fetch(tensors[2], kv, key0, keys if end > begin else 0, p.head_dim)
        for step in range(max(first, begin), min(last, end)):
            if step == begin:
                at = (kv * p.k_rows + key0) * size
                n = load(out, n, K, flags, step, p.k + at, keys, size, size)
                n = load(out, n, V, flags, step, p.v + at, keys, size, size)
            row0 = (query0 + step - begin) * p.tile_m
            rows = min(p.tile_m, p.seqlen - row0)
            at = (block * p.q_rows + row0) * size
            statistic = (block * p.seqlen + row0) * STATISTIC_BYTES
            length = rows * STATISTIC_BYTES
            n = load(out, n, Q, flags, step, p.q + at, rows, size, size)
            n = load(out, n, O, flags, step, p.o + at, rows, size, size)
            n = load(out, n, SUM, flags, step, p.row_sum + statistic, 1, length, length)
            n = load(out, n, MAX, flags, step, p.row_max + statistic, 1, length, length)
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
            n = vector(out, n, step, p.tile_m, p.head_dim, OUTPUT_OPS)
            n = store(out, n, O, 0, step, p.o + at, rows, size, size)
            n = store(out, n, SUM, 0, step, p.row_sum + statistic, 1, length, length)
            n = store(out, n, MAX, 0, step, p.row_max + statistic, 1, length, length)
            n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
            if tensors is not None:
                revisit(tensors, k, v, block, row0, rows, key0, p)
            if step == end - 1:
                n = barrier(out, n, step)
        begin = end
    return n, last >= begin


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """64 × 128 with one stage, or smaller where that does not fit."""
    attention = require_attention(problem)
    warps = 8 if attention.head_dim > 64 else 4
    choices = [
        Schedule(tile=tile, stages=1, warps=warps)
        for tile in ((64, 128), (64, 64), (64, 32), (32, 32), (16, 16))
    ]
    return first_fit(choices, lambda schedule: [footprint(attention, schedule, chip)], chip)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory: Q, K, V and the O tile on its way. Registers: old and new O, scores in fp32.

    Old O can wait in shared memory where registers are short.
    That is what Triton 3.6 takes for query tiles of 64 rows; for 32 it needs half the room for O.
    """
    attention = require_attention(problem)
    m, n, _ = require_tile(attention, schedule, chip)
    values = m * (2 * attention.head_dim + n)
    if not from_shared(m, attention.dtype, chip):
        values += m * attention.head_dim // 2  # Q, two 16-bit values in a register
    shared = 2 * (m + max(1, schedule.stages) * n) * Tensors.of(attention, chip).q.row_bytes
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        **registers_of(values, schedule, chip, m * (attention.head_dim + n)),
    )


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per head. Raises RequestError for a chip that runs grids of windows."""
    attention = require_attention(problem)
    m, _, _ = require_tile(attention, schedule, chip)
    if chip.grid is not None:
        raise RequestError(f"flash1 has no form for {chip.name}: it re-reads what it has written")
    tensors = Tensors.of(attention, chip)
    heads = attention.batch * attention.heads
    statistic_bytes = heads * attention.seqlen * STATISTIC_BYTES
    block = footprint(attention, schedule, chip)
    where = addresses(*tensors.sizes, statistic_bytes, statistic_bytes, block.local_bytes)
    names = ("q", "k", "v", "o", "row_sum", "row_max", "local")
    values = {**dict(zip(names, where, strict=True)), "spill_bytes": block.local_bytes}
    return (
        Launch(
            name="flash1",
            program=flash1,
            params=parameters(attention, schedule, chip, values, ("row_sum", "row_max")),
            blocks=heads,
            steps=visited(attention, schedule),
            ops_per_step=17,
            ops_at_ends=0,
            operands=(
                *tensors.operands(attention, where),
                operand("l", "out", where[4], statistic_bytes),
                operand("m", "out", where[5], statistic_bytes),
                local_operand(block, where[6], chip),
            ),
            footprint=block,
            work=work(attention, schedule),
            dtype=attention.dtype,
            stages=max(1, schedule.stages),
            matrix_rows=m,
        ),
    )


def work(problem: Problem, schedule: Schedule) -> Work:
    """Flops and exps of the unmasked pairs, and of the whole tiles that are executed."""
    attention = require_attention(problem)
    run = visited(attention, schedule) * attention.batch * attention.heads
    return tile_work(attention, schedule, run, output_ops=OUTPUT_OPS)


def visits(problem: Attention, schedule: Schedule) -> tuple[int, int]:
    """Query rows that one head loads over all visits, and key rows that it loads."""
    m, n = schedule.tile[:2]
    first, end = key_spans(problem, m, n)
    row0 = np.arange(0, problem.seqlen, m)
    rows = np.minimum(m, problem.seqlen - row0)
    edges = np.zeros(tiles(problem.seqlen_k, n) + 1, dtype=np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, end, -1)
    key0 = np.arange(0, problem.seqlen_k, n)
    keys = np.minimum(n, problem.seqlen_k - key0)
    return int((rows * (end - first)).sum()), int(keys[np.cumsum(edges)[:-1] > 0].sum())


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and bytes: without a mask the rows of all visits are ⌈N/Bc⌉ · N."""
    attention = require_attention(problem)
    heads = attention.batch * attention.heads
    row = Tensors.of(attention, chip).q.row_bytes
    rows, keys = visits(attention, schedule)
    local_bytes = footprint(attention, schedule, chip).local_bytes
    spilled = " + visited tiles · threads · spilled registers · 4" if local_bytes else ""
    written = rows * (row + 2 * STATISTIC_BYTES) + visited(attention, schedule) * local_bytes
    return (
        ClosedForm(
            quantity="flops",
            formula="4 · unmasked pairs · d · heads",
            value=attention.matrix_flops(),
            source=f"{PAPER}, theorem 1",
        ),
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="heads · (2 · keys · d · bytes + rows of all visits · (2 · d · bytes + 8))",
            value=heads * (2 * keys * row + rows * 2 * (row + STATISTIC_BYTES)),
            source=f"{PAPER}, theorem 2: Q, O, l and m once per key tile",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"heads · (rows of all visits · (d · bytes + 8){spilled})",
            value=heads * written,
            source=f"{PAPER}, algorithm 1, lines 12 and 13: O, l and m once per key tile",
        ),
    )


KERNEL = Kernel(
    name="flash1",
    summary="FlashAttention-1 forward: key tiles outside, query tiles inside, O read and rewritten",
    problem=Attention,
    loops="parallel over batch · head; inside, over key tiles: K, V; over query tiles: Q, O, l, m",
    machines=("gpu",),
    parameters={
        "tile": "query rows × key rows",
        "spills": "registers of a thread that go through local memory at every step",
        "stages": "1: loads wait for the step before; more: they run ahead and pass L1 by",
        "causal, window": "pairs of tiles that the mask hides are not visited",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER,),
    sketch=(Attention(heads=1, seqlen=64, head_dim=16), Schedule(tile=(16, 16), stages=2, warps=4)),
)
