"""FlashAttention-3 forward: a persistent grid, a producer of loads, consumers that take turns.

    for each block (one a core, parallel):
        for each work tile (head, query tile) of the block:
            load Q
            for each tile j of keys that the mask lets it see, the last one first:
                load K_j, then V of the tile before; the blocks of a cluster each ask for
                  one part of these rows and receive all of them
                for each consumer g, a warp group with its own 64 query rows:
                    issue S_j = Q K_jᵀ;  rescale O;  issue O += P V of the tile before
                    P = exp(S_j - new row maxima), while the next consumer's products run
            load V of the last tile; each consumer: O += P V
            store O / row sums, and the log-sum-exp

Shah et al., "FlashAttention-3", arXiv 2407.08608, algorithms 1 and 2. S of the next tile is issued
before the softmax of this one (section 3.2). In the variant ping-pong the softmax of one consumer
stands beside the products of the next (section 3.1); cooperative lets all products go first. Both
move the same bytes. Products that a warp group does not wait for at once are asynchronous, and an
operation that computes carries its consumer (1, 2, 3; the producer is 0) in `slot`.

A step is one key tile of one work tile, with the loads that one turn of the loop above issues;
where a query tile sees no key one step writes 0 and -inf. K and V have `stages` buffers each: the
loads of a step may go out once the step `stages` before it has ended.

Block b has the work tiles b, b + blocks, b + 2 · blocks …, as the library's static persistent
scheduler gives them. Under a mask, where work tiles differ in length, its dynamic one counts them
off to whichever block is free, the heaviest query tile of a head first. Here they are dealt out
before the launch, to the block that would be free first if all key tiles took equally long; what
the counter moves is left out, and so is the mixing of as many heads as fit in L2.

Not modelled: the consumers of a block and its producer share one clock that does one thing after
the other, so that the overlap which both variants are about does not show in it; the blocks of a
cluster are not held in step, so that a block may compute before its neighbours' parts are there.
Bytes are what this kernel gives. In fp8 O too is fp8, and V is not transposed on chip.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import (
    async_matrix,
    block_program,
    exps,
    inline,
    load,
    matrix,
    multicast,
    spill,
    store,
    vector,
)
from iosim.kernels.arithmetic import attend, consecutive, fetch, finish
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    forward_memory,
    parameters,
    require_attention,
)
from iosim.kernels.flash3_sizes import (
    PAPER,
    closed_forms,
    cut,
    deal,
    default_schedule,
    footprint,
    work,
)
from iosim.kernels.masks import key_tiles
from iosim.launch import Kernel, Launch
from iosim.ops import L1_BYPASS
from iosim.problem import Attention, Problem, Schedule

Q, K, V, O, LSE, K_SCALE, V_SCALE, LOCAL = range(8)
VARIANTS = ("ping-pong", "cooperative")
FIELDS = (
    "query_tiles", "cluster", "consumers", "consumer_rows", "ping_pong", "buffers",
)  # fmt: skip


@inline
def work_tile(index, p):
    """(head, query tile) of a work tile: those of a cluster follow each other in one head."""
    group = index // p.cluster
    groups = p.query_tiles // p.cluster
    if p.head_first:
        head, place = group % p.heads, group // p.heads
    else:
        head, place = group // groups, group % groups
    if p.causal or p.window > 0:
        place = groups - 1 - place
    return head, place * p.cluster + index % p.cluster


@inline
def load_keys(out, n, tensor, step, base, kv, tile, block, p):
    """A tile of K or V, or what this block asks for of one that its cluster shares."""
    key0 = tile * p.tile_n
    keys = min(p.tile_n, p.seqlen_k - key0)
    at = base + (kv * p.k_rows + key0) * p.k_row_bytes
    if p.cluster == 1:
        return load(out, n, tensor, L1_BYPASS, step, at, keys, p.k_row_bytes, p.k_row_bytes)
    part = (p.tile_n + p.cluster - 1) // p.cluster
    begin = block % p.cluster * part
    rows = min(part, keys - begin)
    if rows <= 0:
        return n
    at += begin * p.k_row_bytes
    return multicast(out, n, tensor, step, at, rows, p.k_row_bytes, p.cluster)


@inline
def scores(out, n, step, consumer, again, p):
    """S of one consumer; only for the first key tile of a work tile (`again` 0) does it wait."""
    if again:
        n = async_matrix(out, n, step, p.consumer_rows, p.tile_n, p.head_dim)
    else:
        n = matrix(out, n, step, p.consumer_rows, p.tile_n, p.head_dim)
    out[n - 1].slot = consumer
    return n


@inline
def softmax(out, n, step, consumer, p):
    """Row maxima, exponentials and sums of one consumer."""
    n = vector(out, n, step, p.consumer_rows, p.tile_n, p.softmax_ops)
    n = exps(out, n, step, p.consumer_rows, p.tile_n)
    out[n - 2].slot = consumer
    out[n - 1].slot = consumer
    return n


@inline
def output(out, n, step, consumer, more, p):
    """O of one consumer: rescaled, P V added; it waits for the last product (`more` 0)."""
    n = vector(out, n, step, p.consumer_rows, p.head_dim, 1)
    if more:
        n = async_matrix(out, n, step, p.consumer_rows, p.head_dim, p.tile_n)
    else:
        n = matrix(out, n, step, p.consumer_rows, p.head_dim, p.tile_n)
    out[n - 2].slot = consumer
    out[n - 1].slot = consumer
    return n


@inline
def turns(out, n, step, again, kv, tile, block, p):
    """The consumers on key tile `tile`, and (`again`) on P V of the one before it."""
    first = 1
    last = p.consumers
    if not p.ping_pong:
        for consumer in range(first, last + 1):
            n = scores(out, n, step, consumer, again, p)
    for consumer in range(first, last + 1):
        if p.ping_pong:
            n = scores(out, n, step, consumer, again, p)
        if again:
            if consumer == first:
                n = load_keys(out, n, V, step, p.v, kv, tile + 1, block, p)
            n = output(out, n, step, consumer, 1, p)
        if p.ping_pong and consumer > first:
            n = softmax(out, n, step, consumer - 1, p)
    if p.ping_pong:
        return softmax(out, n, step, last, p)
    for consumer in range(first, last + 1):
        n = softmax(out, n, step, consumer, p)
    return n


@block_program
def flash3(block, first, last, params, out, tensors):
    """Steps [first, last) of a block; a step is one key tile of one of its work tiles."""
    p, deals = params
    n = 0
    begin = 0  # the step with which a work tile begins
    for turn in range(deals.shape[1]):
        index = deals[block, turn]
        if index < 0:
            break
        if begin >= last:
            return n, False
        head, query = work_tile(index, p)
        kv = head // p.group
        row0 = query * p.tile_m
        rows = max(0, min(p.tile_m, p.seqlen - row0))  # 0: it only fills up a cluster
        tile0, tile_end = key_tiles(row0, max(rows, 1), p)
        sees = tile_end > tile0
        end = begin + max(tile_end - tile0, 1)
        q_at = (head * p.q_rows + row0) * p.row_bytes
        if tensors is not None:
            q = fetch(tensors[Q], head, row0, rows if sees else 0, p.head_dim)
            m, total = np.full(rows, -np.inf), np.zeros(rows)
            acc = np.zeros((rows, p.head_dim))
        for step in range(max(first, begin), min(last, end)):
            tile = tile_end - 1 - (step - begin)
            if sees:
                if step == begin and rows > 0:
                    n = load(out, n, Q, L1_BYPASS, step, p.q + q_at, rows, p.row_bytes, p.row_bytes)
                n = load_keys(out, n, K, step, p.k, kv, tile, block, p)
                n = turns(out, n, step, step > begin, kv, tile, block, p)
                if step == end - 1:
                    n = load_keys(out, n, V, step, p.v, kv, tile, block, p)
                    for consumer in range(1, p.consumers + 1):
                        n = output(out, n, step, consumer, 0, p)
                n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
                if tensors is not None:
                    key0 = tile * p.tile_n
                    keys = min(p.tile_n, p.seqlen_k - key0)
                    k = fetch(tensors[K], kv, key0, keys, p.head_dim)
                    v = fetch(tensors[V], kv, key0, keys, p.head_dim)
                    attend(q, k, v, consecutive(row0, rows), key0, m, total, acc, p)
            if step == end - 1 and rows > 0:
                n = store(out, n, O, 0, step, p.o + q_at, rows, p.row_bytes, p.row_bytes)
                at = p.lse + (head * p.seqlen + row0) * STATISTIC_BYTES
                size = rows * STATISTIC_BYTES
                n = store(out, n, LSE, 0, step, at, 1, size, size)
        if tensors is not None:
            finish(tensors[O], tensors[LSE], head, row0, m, total, acc, p)
        begin = end
    return n, last >= begin


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per core, or fewer where there are fewer work tiles.

    Raises RequestError for a chip without warp-group products, and for what `cut` refuses.
    """
    attention = require_attention(problem)
    form = cut(attention, schedule, chip)
    block = footprint(attention, schedule, chip)
    lse_bytes = attention.batch * attention.heads * attention.seqlen * STATISTIC_BYTES
    operands, values = forward_memory(attention, chip, block, lse_bytes)
    stages = max(1, schedule.stages)
    deals, steps = deal(attention, schedule, form)
    values.update(
        query_tiles=form.query_tiles,
        cluster=form.cluster,
        consumers=form.consumers,
        consumer_rows=form.rows,
        buffers=stages,
        spill_bytes=form.spill_bytes(block),
        ping_pong=int(schedule.variant in ("", VARIANTS[0])),
    )
    return (
        Launch(
            name="flash3",
            program=flash3,
            params=(parameters(attention, schedule, chip, values, FIELDS), deals),
            blocks=form.blocks,
            steps=steps,
            ops_per_step=7 + 7 * form.consumers,
            ops_at_ends=0,
            operands=operands,
            footprint=block,
            work=work(attention, schedule, chip),
            dtype=attention.dtype,
            stages=stages + 1,  # of the engine: the step that ends frees a buffer
            matrix_rows=form.rows,
            cluster=form.cluster,
        ),
    )


KERNEL = Kernel(
    name="flash3",
    summary="FlashAttention-3 forward: persistent grid, producer and consumer warps, multicast",
    problem=Attention,
    loops="blocks in parallel, each over its work tiles (batch · head, query tile); inside, over "
    "key tiles from the last: K, V of the tile before; per consumer: scores, P V, softmax",
    machines=("gpu",),
    parameters={
        "tile": "query rows (64 for each of 2 or 3 consumers) × key rows",
        "order": "query: work tiles of one head follow each other; head: one of every head first",
        "stages": "buffers of K and of V: how many key tiles the producer runs ahead",
        "cluster": "blocks that receive each tile of K and V together, asked for once; no mask",
        "variant": "ping-pong: softmax beside the products of the next consumer; cooperative: not",
        "spills": "registers of a thread that go through local memory at every step",
        "causal, window": "key tiles that no row sees are not visited; heaviest query tile first",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER,),
    variants=VARIANTS,
    sketch=(
        Attention(heads=1, seqlen=512, seqlen_k=256, head_dim=16),
        Schedule(tile=(128, 64), stages=2, cluster=2, variant=VARIANTS[0]),
    ),
)
