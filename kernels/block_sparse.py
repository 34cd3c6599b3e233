"""Block-sparse FlashAttention: a block visits only the key tiles that a mask of blocks shows it.

    for each tile of query rows (parallel):
        load where its list of key tiles begins and ends
        load Q
        for each key tile of the list:
            every 32nd time: load the next 32 numbers of the list, one for each lane of a warp
            load K;  S = Q Kᵀ;  new row maxima;  P = exp(S - max)
            load V;  O = O · exp(old max - max) + P V
        store O / row sums, and the log-sum-exp

Dao et al., "FlashAttention", arXiv 2205.14135, section 3.3 and algorithm 5, in the order of loops
of FlashAttention-2 (arXiv 2307.08691). The lists are int32 in compressed sparse rows, the same for
all heads; a causal or windowed mask has taken the tiles out of them that it hides wholly. A query
tile with an empty list gives O = 0 and a log-sum-exp of -inf and reads neither K nor V. Assumed:
numbers of the list are read past L1, and early enough that no load of K waits for them.

On a TPU the same block is a run of grid steps (batch · head, query tile, place in the list), whose
last axis is as long as the longest list, as in `jax.experimental.pallas.ops.tpu.splash_attention`.
Lists are prefetched scalars: they lie in SMEM before the first step, are no window, and are not
counted. Steps beyond the end of a list point at its last tile again, so that nothing is fetched
(splash attention pads lists that way where it shards them, else with tile 0, which it fetches).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, inline, load, matrix, spill, store, vector
from iosim.errors import RequestError
from iosim.kernels import flash2
from iosim.kernels.arithmetic import attend, consecutive, fetch, finish
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    local_operand,
    operand,
    parameters,
    require_attention,
    require_tile,
    tile_work,
)
from iosim.kernels.block_sparse_sizes import (
    INDEX_BYTES,
    KeyLists,
    key_lists,
    keys_listed,
    list_bytes,
    seen,
    window_rows,
)
from iosim.kernels.masks import block_of
from iosim.launch import ClosedForm, Footprint, Kernel, Launch, Operand
from iosim.memory.layout import addresses
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Problem, Schedule, tiles
from iosim.problem_variants import BlockSparse

Q, K, V, O, LSE, BLOCKS, LOCAL = range(7)
PAPER = "arXiv 2205.14135"
SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"


@block_program
def block_sparse(block, first, last, params, out, tensors):
    """Steps [first, last) of a block; a step is one key tile of its list."""
    p, table = params
    head, query = block_of(block, p)
    kv = head // p.group
    row0 = query * p.tile_m
    rows = min(p.tile_m, p.seqlen - row0)
    queries = (p.seqlen + p.tile_m - 1) // p.tile_m
    begin = table[query]
    visits = table[query + 1] - begin
    steps = p.grid_steps if p.grid else visits
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    once = WINDOW if p.grid else 0
    q_rows = min(p.tile_m, p.q_rows - row0)
    q_at = (head * p.q_rows + row0) * p.row_bytes
    n = 0
    if first == 0:
        if not p.grid:
            n = load_list(out, n, 0, query, 2, p)
        n = load(out, n, Q, once, 0, p.q + q_at, q_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        q = fetch(tensors[Q], head, row0, rows, p.head_dim)
        m, total = np.full(rows, -np.inf), np.zeros(rows)
        acc = np.zeros((rows, p.head_dim))
        if not p.grid:
            begin = int(tensors[BLOCKS][0, 0, query])
            visits = int(tensors[BLOCKS][0, 0, query + 1]) - begin
    for step in range(first, min(last, steps)):
        idle = step >= visits
        tile = table[table.size - queries + query] if idle else table[queries + 1 + begin + step]
        if not p.grid and step % p.lanes == 0:
            place = queries + 1 + begin + step
            n = load_list(out, n, step, place, min(p.lanes, visits - step), p)
        key0 = tile * p.tile_n
        k_rows = min(p.tile_n, p.k_rows - key0)
        at = (kv * p.k_rows + key0) * p.k_row_bytes
        n = load(out, n, K, flags, step, p.k + at, k_rows, p.k_row_bytes, p.k_row_bytes)
        if not idle:
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load(out, n, V, flags, step, p.v + at, k_rows, p.k_row_bytes, p.k_row_bytes)
        if not idle:
            n = vector(out, n, step, p.tile_m, p.head_dim, 1)  # rescale what is accumulated
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
            n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
            if tensors is not None:
                if not p.grid:
                    key0 = int(tensors[BLOCKS][0, 0, queries + 1 + begin + step]) * p.tile_n
                keys = min(p.tile_n, p.seqlen_k - key0)
                k = fetch(tensors[K], kv, key0, keys, p.head_dim)
                v = fetch(tensors[V], kv, key0, keys, p.head_dim)
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


@inline
def load_list(out, n, step, place, count, p):
    """`count` numbers of the lists in memory, from `place` on."""
    size = count * INDEX_BYTES
    return load(out, n, BLOCKS, L1_BYPASS, step, p.blocks + place * INDEX_BYTES, 1, size, size)


def require_blocks(problem: Problem) -> BlockSparse:
    """`problem` as a BlockSparse. Raises RequestError for another kind."""
    require_attention(problem)
    if not isinstance(problem, BlockSparse):
        raise RequestError(f"block-sparse needs a BlockSparse problem, not {problem}")
    return problem


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """The tile of flash2, each side cut to the greatest divisor that it shares with a mask block.

    Raises RequestError on a TPU for mask blocks that no window divides.
    """
    sparse = require_blocks(problem)
    side = sparse.mask_block
    if chip.grid is not None and side % chip.grid.lanes:
        raise RequestError(
            f"{chip.name} needs mask blocks of a multiple of {chip.grid.lanes} rows, not {side}"
        )
    dense = flash2.default_schedule(sparse, chip)
    return replace(dense, tile=tuple(math.gcd(length, side) for length in dense.tile))


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """On-chip memory of a block: that of flash2. The list takes one register of a thread more."""
    return flash2.footprint(problem, schedule, chip)


def require_whole_blocks(problem: BlockSparse, schedule: Schedule, chip: Chip) -> None:
    """Raises RequestError for a tile of which a mask block does not hold a whole number."""
    m, n, _ = require_tile(problem, schedule, chip)
    if problem.mask_block % m or problem.mask_block % n:
        best = default_schedule(problem, chip).tile
        raise RequestError(
            f"tile {m}x{n} does not divide mask blocks of {problem.mask_block}; both sides must, "
            f"as those of {'x'.join(map(str, best))} do"
        )


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: heads × query tiles blocks. GPUs store the log-sum-exp, grids only O."""
    sparse = require_blocks(problem)
    require_whole_blocks(sparse, schedule, chip)
    lists = key_lists(sparse, schedule)
    block = footprint(sparse, schedule, chip)
    operands, values = _memory(sparse, chip, block, lists)
    values["grid_steps"] = steps = max(1, lists.longest)
    values["lanes"] = chip.limits.threads_per_warp if chip.limits is not None else 1
    own = ("blocks", "grid_steps", "lanes")
    return (
        Launch(
            name="block-sparse",
            program=block_sparse,
            params=(parameters(sparse, schedule, chip, values, own), lists.table),
            blocks=sparse.batch * sparse.heads * tiles(sparse.seqlen, schedule.tile[0]),
            steps=steps,
            ops_per_step=10,
            ops_at_ends=4,
            operands=operands,
            footprint=block,
            work=tile_work(sparse, schedule, lists.indices.size * sparse.batch * sparse.heads),
            dtype=sparse.dtype,
            stages=max(1, schedule.stages),
            matrix_rows=schedule.tile[0],
        ),
    )


def _memory(
    problem: BlockSparse, chip: Chip, block: Footprint, lists: KeyLists
) -> tuple[tuple[Operand, ...], dict[str, int]]:
    """Q, K, V, O, lse, the lists, local memory; and where they lie. Grids have the first four."""
    tensors = Tensors.of(problem, chip)
    heads = problem.batch * problem.heads
    lse_bytes = 0 if chip.grid else heads * problem.seqlen * STATISTIC_BYTES
    list_bytes = 0 if chip.grid else lists.size_bytes
    where = addresses(*tensors.sizes, lse_bytes, list_bytes, block.local_bytes)
    names = ("q", "k", "v", "o", "lse", "blocks", "local")
    values = dict(zip(names, where, strict=True))
    values["lse"] = where[LSE] if lse_bytes else 0
    values["spill_bytes"] = block.local_bytes
    rows, keys = seen(problem)
    q = tensors.q.size_bytes - heads * (problem.seqlen - rows) * tensors.q.row_bytes
    k = tensors.k.size_bytes - tensors.k.count * (problem.seqlen_k - keys) * tensors.k.row_bytes
    dense = tensors.operands(problem, where)
    operands = (
        *(replace(o, unique_bytes=size) for o, size in zip(dense[:O], (q, k, k), strict=True)),
        dense[O],
        operand("lse", "out", where[LSE], lse_bytes),
        operand("blocks", "in", where[BLOCKS], list_bytes),
        local_operand(block, where[LOCAL], chip),
    )
    return operands, values


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them, from the lists alone."""
    sparse = require_blocks(problem)
    flops = ClosedForm(
        quantity="flops",
        formula="4 · pairs that are seen · d · heads",
        value=sparse.matrix_flops(),
        source=f"{PAPER}, section 3.3",
    )
    moved = _grid_forms if chip.grid is not None else _cache_forms
    return (flops, *moved(sparse, schedule, chip))


def _cache_forms(problem: BlockSparse, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    assert chip.limits is not None
    heads = problem.batch * problem.heads
    row_bytes = Tensors.of(problem, chip).q.row_bytes
    lists = key_lists(problem, schedule)
    keys = keys_listed(problem, lists, schedule.tile[1])
    listed = list_bytes(lists, chip.limits.threads_per_warp)
    local_bytes = footprint(problem, schedule, chip).local_bytes
    spilled = " + visited tiles · threads · spilled registers · 4" if local_bytes else ""
    written = heads * problem.seqlen * row_bytes + flash2.stored_lse_bytes(problem, schedule)
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="heads · ((N + 2 · key rows of listed tiles) · d · bytes + sectors of lists)",
            value=heads * ((problem.seqlen + 2 * keys) * row_bytes + listed),
            source=f"{PAPER}, algorithm 5: hidden blocks are skipped; lists: 32 indices a read",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"heads · (N · (d · bytes + 4){spilled}), in sectors",
            value=written + heads * lists.indices.size * local_bytes,
            source=f"{flash2.PAPER}, algorithm 1: O and the log-sum-exp once",
        ),
    )


def _grid_forms(problem: BlockSparse, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    tensors = Tensors.of(problem, chip)
    q, m = tensors.q, schedule.tile[0]
    q_bytes = q.count * min(tiles(problem.seqlen, m) * m, q.rows) * q.row_bytes
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula="(heads · N + 2 · rows of key windows whose index changes) · padded row bytes",
            value=q_bytes + 2 * window_rows(problem, schedule, chip) * tensors.k.row_bytes,
            source=f"{SPLASH}: a step beyond the list points at its last key window",
        ),
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="heads · N · padded row bytes",
            value=q_bytes,
            source=f"{SPLASH}: O once",
        ),
    )


KERNEL = Kernel(
    name="block-sparse",
    summary="Block-sparse FlashAttention: query tiles in parallel, each streams the keys it sees",
    problem=BlockSparse,
    loops="parallel over (batch · head, query tile); inside, over the key tiles of its list",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "query rows × key rows; both divide the side of a mask block",
        "density": "share of the mask blocks that are seen, drawn at random (Python: blocks)",
        "order": "query: tiles of one head follow each other; head: one tile of every head first",
        "spills": "registers of a thread that go through local memory at every step",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "key tiles that no row of the query tile sees stand in no list",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("arXiv 2205.14135, section 3.3", "arXiv 2307.08691"),
    sketch=(
        BlockSparse(heads=1, seqlen=64, head_dim=16, mask_block=16, density=0.5),
        Schedule(tile=(16, 16), stages=2, warps=4),
    ),
)
