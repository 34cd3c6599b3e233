"""FlashAttention-1 backward: a block owns a head, holds a tile of K and V, and walks over all of Q.

    for each KV head (parallel):
        for each tile of keys:
            load K and V
            for each of its query heads, for each tile of its rows that sees any of the keys:
                load Q, O, dO, l and m, and the dQ of the visits before
                S = Q Kᵀ;  P = exp(S - m) / l;  dV += Pᵀ dO;  dP = dO Vᵀ
                dS = P ∘ (dP - rowsum(dO ∘ O));  dQ += dS K;  dK += dSᵀ Q
                store dQ
            store dK and dV

Dao et al., "FlashAttention", arXiv 2205.14135, algorithm 4: the variant "reread-dq" of flash2-bwd.
There is no delta in memory, so O is read again at every visit, and dQ is kept in the dtype of the
problem, rounded each time. dQ holds 0 before the launch (a memset that is not counted). Key tiles
that no row sees take a step of their own, which stores zeros. GPUs only.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import (
    barrier,
    block_program,
    exps,
    inline,
    load,
    matrix,
    numeric,
    spill,
    store,
    vector,
)
from iosim.kernels.arithmetic import fetch, write_rows
from iosim.kernels.attention import STATISTIC_BYTES, local_operand, parameters
from iosim.kernels.flash2_bwd_sizes import (
    FIELDS,
    REREAD,
    REREAD_OPS,
    RESULT_OPS,
    memory,
    reread_footprint,
    score_ops,
    works,
)
from iosim.kernels.gradients import add_product, add_transposed, recompute, row_dots, scaled
from iosim.kernels.masks import query_spans, query_tiles
from iosim.launch import Launch
from iosim.ops import L1_BYPASS
from iosim.problem import Attention, Schedule

Q, K, V, O, DO, SUM, MAX, DQ, DK, DV, LOCAL = range(11)


@block_program
def reread(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one visit of a key tile to a query tile."""
    size = p.row_bytes
    begin = 0  # the step with which a key tile begins
    n = 0
    for tile in range((p.seqlen_k + p.tile_n - 1) // p.tile_n):
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        query0, query_end = query_tiles(key0, keys, p)
        turns = query_end - query0
        end = begin + max(1, p.group * turns)
        k_at = (block * p.k_rows + key0) * size
        if tensors is not None:
            k = fetch(tensors[K], block, key0, keys if turns > 0 else 0, p.head_dim)
            v = fetch(tensors[V], block, key0, keys if turns > 0 else 0, p.head_dim)
            dk, dv = np.zeros((keys, p.head_dim)), np.zeros((keys, p.head_dim))
        for step in range(max(first, begin), min(last, end)):
            if turns > 0:
                if step == begin:
                    n = load(out, n, K, L1_BYPASS, step, p.k + k_at, keys, size, size)
                    n = load(out, n, V, L1_BYPASS, step, p.v + k_at, keys, size, size)
                head = block * p.group + (step - begin) // turns
                row0 = (query0 + (step - begin) % turns) * p.tile_m
                rows = min(p.tile_m, p.seqlen - row0)
                n = visit(out, n, step, head, row0, rows, p)
                if tensors is not None:
                    add_visit(tensors, k, v, dk, dv, head, row0, rows, key0, p)
            if step == end - 1:
                n = vector(out, n, step, p.tile_n, p.head_dim, RESULT_OPS)
                n = store(out, n, DK, 0, step, p.dk + k_at, keys, size, size)
                n = store(out, n, DV, 0, step, p.dv + k_at, keys, size, size)
                n = barrier(out, n, step)
                if tensors is not None:
                    write_rows(tensors[DK], block, key0, scaled(dk, p.scale), p)
                    write_rows(tensors[DV], block, key0, dv, p)
        begin = end
    return n, last >= begin


@inline
def visit(out, n, step, head, row0, rows, p):
    """The operations of a visit, but for K and V."""
    size = p.row_bytes
    at = (head * p.q_rows + row0) * size
    statistic = (head * p.seqlen + row0) * STATISTIC_BYTES
    length = rows * STATISTIC_BYTES
    n = load(out, n, Q, L1_BYPASS, step, p.q + at, rows, size, size)
    n = load(out, n, O, L1_BYPASS, step, p.o + at, rows, size, size)
    n = load(out, n, DO, L1_BYPASS, step, p.do + at, rows, size, size)
    n = load(out, n, DQ, L1_BYPASS, step, p.dq + at, rows, size, size)
    n = load(out, n, SUM, L1_BYPASS, step, p.row_sum + statistic, 1, length, length)
    n = load(out, n, MAX, L1_BYPASS, step, p.row_max + statistic, 1, length, length)
    n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # S
    n = exps(out, n, step, p.tile_m, p.tile_n)
    n = matrix(out, n, step, p.tile_n, p.head_dim, p.tile_m)  # dV
    n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # dP
    n = vector(out, n, step, p.tile_m, p.head_dim, REREAD_OPS)
    n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
    n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)  # dQ
    n = store(out, n, DQ, 0, step, p.dq + at, rows, size, size)
    n = matrix(out, n, step, p.tile_n, p.head_dim, p.tile_m)  # dK
    return spill(out, n, LOCAL, step, p.local, p.spill_bytes)


@numeric
def add_visit(tensors, k, v, dk, dv, head, row0, rows, key0, p):
    """What a visit adds to dK, dV and, in memory, dQ."""
    q = fetch(tensors[Q], head, row0, rows, p.head_dim)
    do = fetch(tensors[DO], head, row0, rows, p.head_dim)
    dots = row_dots(do, fetch(tensors[O], head, row0, rows, p.head_dim))
    total = fetch(tensors[SUM], head, row0, rows, 1)
    peak = fetch(tensors[MAX], head, row0, rows, 1)
    weights, slopes = recompute(q, k, v, do, peak, total, dots, row0, key0, p)
    add_transposed(dv, weights, do)
    add_transposed(dk, slopes, q)
    dq = fetch(tensors[DQ], head, row0, rows, p.head_dim)
    add_product(dq, scaled(slopes, p.scale), k)
    write_rows(tensors[DQ], head, row0, dq, p)


def reread_launch(problem: Attention, schedule: Schedule, chip: Chip) -> Launch:
    """One launch: a block per KV head."""
    lies = memory(problem, chip, REREAD)
    block = reread_footprint(problem, schedule, chip)
    values = {
        **lies.values(),
        "spill_bytes": block.local_bytes,
        "softmax_ops": score_ops(problem),
    }
    m, n = schedule.tile[:2]
    first, end = query_spans(problem, m, n)
    names = ("Q", "K", "V", "O", "dO", "l", "m", "dQ", "dK", "dV")
    return Launch(
        name="reread-dq",
        program=reread,
        params=parameters(problem, schedule, chip, values, FIELDS),
        blocks=problem.batch * problem.kv_heads,
        steps=int(np.maximum(problem.group * (end - first), 1).sum()),
        ops_per_step=23,
        ops_at_ends=0,
        operands=(
            *(lies.operands[name] for name in names),
            local_operand(block, lies.local, chip),
        ),
        footprint=block,
        work=works(problem, schedule, chip)[0],
        dtype=problem.dtype,
        stages=max(1, schedule.stages),
        matrix_rows=min(m, n),
    )
