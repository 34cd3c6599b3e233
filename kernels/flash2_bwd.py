"""FlashAttention-2 backward: a block owns a tile of keys and streams Q and dO past it.

    delta:    for each tile of query rows (parallel):
                  load O and dO;  delta = rowsum(dO ∘ O);  store delta, and zeros over dQ's sums
    dkdv:     for each tile of keys (parallel):
                  load K and V
                  for each query head of their KV head, for each tile of its rows that sees a key:
                      load Q and lse;  S = Q Kᵀ;  P = exp(S - lse)
                      load dO and delta;  dV += Pᵀ dO;  dP = dO Vᵀ;  dS = P ∘ (dP - delta)
                      dK += dSᵀ Q;  add dS K to dQ's sums in memory
                  store dK and dV
    convert:  for each tile of query rows (parallel):  load dQ's fp32 sums, store dQ

Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2. Its own kernels clear the sums of dQ in
`delta` (flash_bwd_preprocess_kernel.h), so no launch of its own does; they walk from the last query
tile to the first. That is the variant "atomics".

"two-pass" adds nothing in memory: `dkdv` walks from the first tile and leaves dQ out, and in the
place of convert stands

    dq:       for each tile of query rows (parallel):
                  load Q, dO, lse and delta
                  for each tile of keys that the mask lets it see:
                      load K and V;  S = Q Kᵀ;  P = exp(S - lse)
                      dP = dO Vᵀ;  dS = P ∘ (dP - delta);  dQ += dS K
                  store dQ

Triton's tutorial 06 and `jax.experimental.pallas.ops.tpu.flash_attention` do this: seven matrix
products per pair of tiles for five. On a TPU both are grids of windows: steps that the mask skips
point at the first visible window (JAX: at window 0). "reread-dq" is in flash1_bwd.py.

A block of dkdv takes all query heads of its KV head, so that dK and dV are written once;
FlashAttention and JAX write them per query head and sum them in a kernel that is not theirs.

All loads of a GPU go past L1, with one stage too (cp.async.cg); Q, dO, lse and delta of the next
step are loaded ahead together, where FlashAttention double-buffers Q alone.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import atomic, block_program, exps, inline, load, matrix, spill, store, vector
from iosim.kernels.arithmetic import fetch, write_rows
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    local_operand,
    parameters,
    require_attention,
    require_tile,
)
from iosim.kernels.flash1_bwd import reread_launch
from iosim.kernels.flash2_bwd_forms import closed_forms
from iosim.kernels.flash2_bwd_sizes import (
    ATOMICS,
    FIELDS,
    REREAD,
    RESULT_OPS,
    ROW_OPS,
    TWO_PASS,
    VARIANTS,
    default_schedule,
    footprints,
    memory,
    score_ops,
    variant_of,
    works,
)
from iosim.kernels.gradients import (
    add_fp32,
    add_product,
    add_transposed,
    ones,
    recompute,
    row_dots,
    scaled,
    write_fp32,
)
from iosim.kernels.masks import block_of, key_tiles, query_tiles
from iosim.launch import Footprint, Kernel, Launch
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work

PAPER = "arXiv 2307.08691"
PALLAS = "jax.experimental.pallas.ops.tpu.flash_attention"


@inline
def column_of(block, p):
    """(KV head, first key) of a block that owns a key tile."""
    heads = p.heads // p.group
    columns = (p.seqlen_k + p.tile_n - 1) // p.tile_n
    if p.head_first:
        return block % heads, block // heads * p.tile_n
    return block // columns, block % columns * p.tile_n


@inline
def load_rows(out, n, tensor, flags, step, base, head, row0, p):
    """A tile of Q, O or dO."""
    at = base + (head * p.q_rows + row0) * p.row_bytes
    rows = min(p.tile_m, p.q_rows - row0)
    return load(out, n, tensor, flags, step, at, rows, p.row_bytes, p.row_bytes)


@inline
def load_statistic(out, n, tensor, flags, step, base, head, row0, p):
    """The lse or the delta of a tile of query rows."""
    at = base + (head * p.stat_rows + row0) * p.stat_row_bytes
    rows = min(p.tile_m, p.stat_rows - row0)
    return load(out, n, tensor, flags, step, at, rows, p.stat_row_bytes, p.stat_row_bytes)


@block_program
def delta(block, first, last, p, out, tensors):
    """The one step of a block: delta, and zeros for dkdv to add to.

    Operands O, dO, delta, dQ_accum.
    """
    head, query = block_of(block, p)
    row0 = query * p.tile_m
    flags = WINDOW if p.grid else L1_BYPASS
    once = WINDOW if p.grid else 0
    rows = min(p.tile_m, p.seqlen - row0)
    n = load_rows(out, 0, 0, flags, 0, p.o, head, row0, p)
    n = load_rows(out, n, 1, flags, 0, p.do, head, row0, p)
    n = vector(out, n, 0, p.tile_m, p.head_dim, ROW_OPS)
    at = p.delta + (head * p.stat_rows + row0) * p.stat_row_bytes
    stored = min(p.tile_m, p.stat_rows - row0)
    n = store(out, n, 2, once, 0, at, stored, p.stat_row_bytes, p.stat_row_bytes)
    if p.atomics:
        size = p.head_dim * STATISTIC_BYTES
        n = store(out, n, 3, 0, 0, p.dq_accum + (head * p.seqlen + row0) * size, rows, size, size)
    if tensors is not None:
        o = fetch(tensors[0], head, row0, rows, p.head_dim)
        do = fetch(tensors[1], head, row0, rows, p.head_dim)
        write_fp32(tensors[2], head, row0, row_dots(do, o))
        if p.atomics:
            write_fp32(tensors[3], head, row0, np.zeros((rows, p.head_dim)))
    return n, True


@block_program
def dkdv(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is a query tile of one of the heads.

    Operands Q, K, V, dO, lse, delta, dK, dV, dQ_accum, local.
    """
    kv, key0 = column_of(block, p)
    keys = min(p.tile_n, p.seqlen_k - key0)
    query0, query_end = query_tiles(key0, keys, p)
    turns = (p.seqlen + p.tile_m - 1) // p.tile_m if p.grid else query_end - query0
    steps = p.group * turns
    flags = WINDOW if p.grid else L1_BYPASS
    once = WINDOW if p.grid else 0
    k_rows = min(p.tile_n, p.k_rows - key0)
    k_at = (kv * p.k_rows + key0) * p.row_bytes
    n = 0
    if first == 0 and steps > 0:
        n = load(out, n, 1, flags, 0, p.k + k_at, k_rows, p.row_bytes, p.row_bytes)
        n = load(out, n, 2, flags, 0, p.v + k_at, k_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        some = keys if query_end > query0 else 0
        k = fetch(tensors[1], kv, key0, some, p.head_dim)
        v = fetch(tensors[2], kv, key0, some, p.head_dim)
        dk, dv = np.zeros((keys, p.head_dim)), np.zeros((keys, p.head_dim))
    for step in range(first, min(last, steps)):
        head = kv * p.group + step // turns
        tile = step % turns
        idle = p.grid and not query0 <= tile < query_end
        if idle:
            tile = query0
        elif not p.grid:
            tile = query_end - 1 - tile if p.atomics else query0 + tile
        row0 = tile * p.tile_m
        rows = min(p.tile_m, p.seqlen - row0)
        n = load_rows(out, n, 0, flags, step, p.q, head, row0, p)
        n = load_statistic(out, n, 4, flags, step, p.lse, head, row0, p)
        if not idle:
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # S
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load_rows(out, n, 3, flags, step, p.do, head, row0, p)
        n = load_statistic(out, n, 5, flags, step, p.delta, head, row0, p)
        if idle:
            continue
        n = matrix(out, n, step, p.tile_n, p.head_dim, p.tile_m)  # dV
        n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # dP
        n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
        n = matrix(out, n, step, p.tile_n, p.head_dim, p.tile_m)  # dK
        at = (head * p.seqlen + row0) * p.head_dim * STATISTIC_BYTES
        if p.atomics:
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)  # dQ
            size = p.head_dim * STATISTIC_BYTES
            n = atomic(out, n, 8, 0, step, p.dq_accum + at, rows, size, size)
        n = spill(out, n, 9, step, p.local, p.spill_bytes)
        if tensors is not None:
            q = fetch(tensors[0], head, row0, rows, p.head_dim)
            do = fetch(tensors[3], head, row0, rows, p.head_dim)
            peak = fetch(tensors[4], head, row0, rows, 1)
            dots = fetch(tensors[5], head, row0, rows, 1)
            weights, slopes = recompute(q, k, v, do, peak, ones(rows), dots, row0, key0, p)
            add_transposed(dv, weights, do)
            add_transposed(dk, slopes, q)
            if p.atomics:
                dq = np.zeros((rows, p.head_dim))
                add_product(dq, slopes, k)
                add_fp32(tensors[8], head, row0, dq)
    if last < steps:
        return n, False
    end = max(steps - 1, 0)
    n = vector(out, n, end, p.tile_n, p.head_dim, RESULT_OPS)
    n = store(out, n, 6, once, end, p.dk + k_at, k_rows, p.row_bytes, p.row_bytes)
    n = store(out, n, 7, once, end, p.dv + k_at, k_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        write_rows(tensors[6], kv, key0, scaled(dk, p.scale), p)
        write_rows(tensors[7], kv, key0, dv, p)
    return n, True


@block_program
def dq(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is a key tile.

    Operands Q, K, V, dO, lse, delta, dQ, local.
    """
    head, query = block_of(block, p)
    kv = head // p.group
    row0 = query * p.tile_m
    rows = min(p.tile_m, p.seqlen - row0)
    tile0, tile_end = key_tiles(row0, rows, p)
    steps = (p.seqlen_k + p.tile_n - 1) // p.tile_n if p.grid else tile_end - tile0
    flags = WINDOW if p.grid else L1_BYPASS
    once = WINDOW if p.grid else 0
    n = 0
    if first == 0 and steps > 0:
        n = load_rows(out, n, 0, flags, 0, p.q, head, row0, p)
        n = load_rows(out, n, 3, flags, 0, p.do, head, row0, p)
        n = load_statistic(out, n, 4, flags, 0, p.lse, head, row0, p)
        n = load_statistic(out, n, 5, flags, 0, p.delta, head, row0, p)
    if tensors is not None:
        some = rows if tile_end > tile0 else 0
        q = fetch(tensors[0], head, row0, some, p.head_dim)
        do = fetch(tensors[3], head, row0, some, p.head_dim)
        peak, dots = fetch(tensors[4], head, row0, some, 1), fetch(tensors[5], head, row0, some, 1)
        acc = np.zeros((rows, p.head_dim))
    for step in range(first, min(last, steps)):
        tile = step if p.grid else tile0 + step
        idle = p.grid and not tile0 <= tile < tile_end
        if idle:
            tile = tile0
        key0 = tile * p.tile_n
        k_rows = min(p.tile_n, p.k_rows - key0)
        at = (kv * p.k_rows + key0) * p.row_bytes
        n = load(out, n, 1, flags, step, p.k + at, k_rows, p.row_bytes, p.row_bytes)
        if not idle:
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # S
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load(out, n, 2, flags, step, p.v + at, k_rows, p.row_bytes, p.row_bytes)
        if idle:
            continue
        n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)  # dP
        n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
        n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)  # dQ
        n = spill(out, n, 7, step, p.local, p.spill_bytes)
        if tensors is not None:
            keys = min(p.tile_n, p.seqlen_k - key0)
            k = fetch(tensors[1], kv, key0, keys, p.head_dim)
            v = fetch(tensors[2], kv, key0, keys, p.head_dim)
            _, slopes = recompute(q, k, v, do, peak, ones(rows), dots, row0, key0, p)
            add_product(acc, slopes, k)
    if last < steps:
        return n, False
    end = max(steps - 1, 0)
    n = vector(out, n, end, p.tile_m, p.head_dim, ROW_OPS)
    at = p.dq + (head * p.q_rows + row0) * p.row_bytes
    stored = min(p.tile_m, p.q_rows - row0)
    n = store(out, n, 6, once, end, at, stored, p.row_bytes, p.row_bytes)
    if tensors is not None:
        write_rows(tensors[6], head, row0, scaled(acc, p.scale), p)
    return n, True


@block_program
def convert(block, first, last, p, out, tensors):
    """The one step of a block: dQ of its sums. Operands dQ_accum, dQ."""
    head, query = block_of(block, p)
    row0 = query * p.tile_m
    rows = min(p.tile_m, p.seqlen - row0)
    size = p.head_dim * STATISTIC_BYTES
    at = head * p.seqlen + row0
    n = load(out, 0, 0, L1_BYPASS, 0, p.dq_accum + at * size, rows, size, size)
    n = vector(out, n, 0, p.tile_m, p.head_dim, ROW_OPS)
    n = store(out, n, 1, 0, 0, p.dq + at * p.row_bytes, rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        acc = fetch(tensors[0], head, row0, rows, p.head_dim)
        write_rows(tensors[1], head, row0, scaled(acc, p.scale), p)
    return n, True


_PLANS = {  # program, operands, operations of a step, of both ends; launches in their order
    "delta": (delta, ("O", "dO", "delta", "dQ_accum"), 5, 0),
    "dkdv": (dkdv, ("Q", "K", "V", "dO", "lse", "delta", "dK", "dV", "dQ_accum"), 14, 5),
    "dq": (dq, ("Q", "K", "V", "dO", "lse", "delta", "dQ"), 9, 6),
    "convert": (convert, ("dQ_accum", "dQ"), 3, 0),
}
_LAUNCHES = {ATOMICS: ("delta", "dkdv", "convert"), TWO_PASS: ("delta", "dkdv", "dq")}


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """delta, dkdv and convert or dq; one launch of "reread-dq".

    Raises RequestError for a variant that the chip has no form of.
    """
    attention = require_attention(problem)
    require_tile(attention, schedule, chip)
    variant = variant_of(schedule, chip)
    if variant == REREAD:
        return (reread_launch(attention, schedule, chip),)
    blocks = footprints(attention, schedule, chip)
    work = works(attention, schedule, chip)
    return tuple(
        _launch(name, attention, schedule, chip, blocks[i], work[i])
        for i, name in enumerate(_LAUNCHES[variant])
    )


def _launch(
    name: str, problem: Attention, schedule: Schedule, chip: Chip, block: Footprint, work: Work
) -> Launch:
    program, operands, per_step, at_ends = _PLANS[name]
    variant = variant_of(schedule, chip)
    lies = memory(problem, chip, variant)
    m, n = schedule.tile[:2]
    heads, rows, columns = (
        problem.batch * problem.heads, tiles(problem.seqlen, m), tiles(problem.seqlen_k, n)
    )  # fmt: skip
    owns_keys = name == "dkdv"
    steps = {"dkdv": problem.group * rows, "dq": columns}.get(name, 1)
    values = {
        **lies.values(),
        "spill_bytes": block.local_bytes,
        "softmax_ops": score_ops(problem),
        "atomics": int(variant == ATOMICS),
    }
    spilled = (local_operand(block, lies.local, chip),) if name in ("dkdv", "dq") else ()
    return Launch(
        name=name,
        program=program,
        params=parameters(problem, schedule, chip, values, FIELDS),
        blocks=heads // problem.group * columns if owns_keys else heads * rows,
        steps=steps,
        ops_per_step=per_step,
        ops_at_ends=at_ends,
        operands=(*(lies.operands[operand] for operand in operands), *spilled),
        footprint=block,
        work=work,
        dtype=problem.dtype,
        stages=max(1, schedule.stages),
        matrix_rows=min(m, n),
    )


KERNEL = Kernel(
    name="flash2-bwd",
    summary="FlashAttention-2 backward: key tiles in parallel, Q and dO streamed, S recomputed",
    problem=Attention,
    loops="parallel over (batch · KV head, key tile): K, V; inside, over query tiles: Q, dO, "
    "5 products; dQ by atomic additions or in a second pass over query tiles",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "query rows × key rows (TPU: block_q × block_k_major × block_k)",
        "order": "query: tiles of one head follow each other; head: one tile of every head first",
        "variant": "atomics: dQ is added to in L2; two-pass: dQ by a launch of its own; "
        "reread-dq: FlashAttention-1's, dQ read and rewritten at every visit",
        "spills": "registers of a thread that go through local memory at every step",
        "stages": "1: Q single-buffered; 2: loads of the next query tile run ahead",
        "causal, window": "pairs of tiles that the mask hides are not visited",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER, "arXiv 2205.14135", PALLAS),
    variants=VARIANTS,
    sketch=(
        Attention(heads=1, seqlen=64, head_dim=16, causal=True),
        Schedule(tile=(16, 16), stages=1, warps=4),
    ),
)
