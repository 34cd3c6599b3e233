"""Paged decoding: Flash-Decoding over keys and values that lie in pages all over a pool.

    for each KV head of a sequence, tile of packed query rows, split of the keys (parallel):
        load Q: all query heads of the KV head together;  load the split's part of the page table
        for each tile of keys of the split that the mask lets a row see:
            load K of the tile, page by page;  S = Q Kᵀ;  online softmax
            load V of the tile, page by page;  O += P V
        store the partial O and the log-sum-exp in fp32
    for each few rows (parallel): combine the splits, as Flash-Decoding does

Kwon et al., "PagedAttention", arXiv 2309.06180. On a GPU a page holds all heads of a token side by
side ([page, token, head, d], as in vLLM and FlashInfer), its scales lie head by head. On a TPU a
head's pages lie together ([head, page, token, d], as in JAX's paged attention), every page of a
tile is a window of its own, and the table is prefetched as scalars, which are no windows.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import (
    block_program,
    exps,
    inline,
    load,
    matrix,
    move,
    numeric,
    spill,
    vector,
)
from iosim.kernels.arithmetic import attend, fetch, stored
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    dequantize,
    parameters,
    require_attention,
    require_tile,
)
from iosim.kernels.flash_decode_sizes import default_schedule as unpaged_schedule
from iosim.kernels.flash_decode_sizes import footprint, work
from iosim.kernels.packed import Packed, settle, split_span, store_split
from iosim.kernels.paged_decode_sizes import (
    INDEX_BYTES,
    closed_forms,
    memory,
    pieces_of,
    require_pages,
    tile_for_pages,
)
from iosim.kernels.split_kv import FIELDS, split_launches
from iosim.launch import Kernel, Launch
from iosim.ops import L1_BYPASS, LOAD, WINDOW
from iosim.problem import Problem, Schedule
from iosim.problem_variants import PagedDecode

Q, K, V, _, _, K_SCALE, V_SCALE, PAGES, LOCAL = range(9)
OWN_FIELDS = ("kv_heads", "page_size", "pages", "pool", "pieces", "table")
FIRST_SLOT = 8  # windows of pages come after those of the operands


@block_program
def split(block, first, last, params, out, tensors):
    """Steps [first, last) of a block; a step is one key tile of its split."""
    p, table = params
    kv, part, row0, rows, tile0, tile_end = split_span(block, p)
    steps = p.chunk if p.grid else tile_end - tile0
    once = WINDOW if p.grid else 0
    q_rows = min(p.tile_m, p.q_rows - row0)
    q_at = (kv * p.q_rows + row0) * p.row_bytes
    n = 0
    if first == 0:
        n = load(out, n, Q, once, 0, p.q + q_at, q_rows, p.row_bytes, p.row_bytes)
        if not p.grid and tile_end > tile0:
            n = load_table(out, n, kv // p.kv_heads, tile0, tile_end, p)
    if tensors is not None:
        q = fetch(tensors[Q], kv, row0, rows, p.head_dim)
        m, total = np.full(rows, -np.inf), np.zeros(rows)
        acc = np.zeros((rows, p.head_dim))
        numbers = np.arange(row0, row0 + rows) % p.seqlen
    for step in range(first, min(last, steps)):
        tile = step if p.grid else tile0 + step
        idle = p.grid and not tile0 <= tile < tile_end
        if idle:
            tile = tile0
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        n = load_pages(out, n, K, step, p.k, p.k_scale, kv, key0, keys, table, p)
        if not idle:
            n = dequantize(out, n, step, p.tile_n, p.head_dim, p)
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
        n = load_pages(out, n, V, step, p.v, p.v_scale, kv, key0, keys, table, p)
        if not idle:
            n = dequantize(out, n, step, p.tile_n, p.head_dim, p)
            n = vector(out, n, step, p.tile_m, p.head_dim, 1)  # rescale what is accumulated
            n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
            n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
            if tensors is not None:
                k = gather(tensors[K], tensors[K_SCALE], tensors[PAGES], kv, key0, keys, p)
                v = gather(tensors[V], tensors[V_SCALE], tensors[PAGES], kv, key0, keys, p)
                attend(q, k, v, numbers, key0, m, total, acc, p)
    if last < steps:
        return n, False
    n = store_split(out, n, max(steps - 1, 0), kv, part, row0, rows, p.head_dim, p)
    if tensors is not None:
        settle(tensors, kv * p.splits + part, row0, m, total, acc, p)
    return n, True


@inline
def load_table(out, n, sequence, tile0, tile_end, p):
    """The page numbers of key tiles [tile0, tile_end) of a sequence, at once."""
    first = tile0 * p.tile_n // p.page_size
    end = (min(tile_end * p.tile_n, p.seqlen_k) + p.page_size - 1) // p.page_size
    at = p.table + (sequence * p.pages + first) * INDEX_BYTES
    size = (end - first) * INDEX_BYTES
    return load(out, n, PAGES, L1_BYPASS, 0, at, 1, size, size)


@inline
def load_pages(out, n, tensor, step, base, scale, kv, key0, keys, table, p):
    """The keys (or values) from `key0` on, a box for each page that holds some of them."""
    sequence = kv // p.kv_heads
    head = kv % p.kv_heads
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    for piece in range(p.pieces):
        key = key0 + piece * p.page_size
        if key >= key0 + keys:
            break
        page = table[sequence * p.pages + key // p.page_size]
        inside = key % p.page_size
        count = min(keys - piece * p.page_size, p.page_size)
        if p.grid:
            slot = FIRST_SLOT + (tensor - K) * p.pieces + piece
            wanted = min(p.tile_n, p.k_rows - inside)  # whole pages, padded as they lie
            at = base + ((head * p.pool + page) * p.k_rows + inside) * p.k_row_bytes
            size = p.k_row_bytes
            n = move(out, n, LOAD, tensor, flags, step, slot, at, wanted, size, size)
        else:
            at = base + ((page * p.page_size + inside) * p.kv_heads + head) * p.k_row_bytes
            pitch = p.kv_heads * p.k_row_bytes
            n = load(out, n, tensor, flags, step, at, count, p.k_row_bytes, pitch)
            if p.scale_rows > 0:
                at = scale + ((page * p.kv_heads + head) * p.page_size + inside) * STATISTIC_BYTES
                size = count * STATISTIC_BYTES
                n = load(out, n, tensor + K_SCALE - K, flags, step, at, 1, size, size)
    return n


@numeric
def gather(tensor, scales, pages, kv, key0, keys, p):
    """A tile of keys or values out of their pages, times their scales where there are some."""
    tile = np.empty((keys, p.head_dim))
    head = kv % p.kv_heads
    for r in range(keys):
        page = np.int64(pages[kv // p.kv_heads, (key0 + r) // p.page_size])
        inside = (key0 + r) % p.page_size
        for d in range(p.head_dim):
            if p.grid:
                tile[r, d] = tensor[head * p.pool + page, inside, d]
            else:
                tile[r, d] = tensor[page, inside * p.kv_heads + head, d]
            if p.scale_rows > 0:
                tile[r, d] = stored(tile[r, d] * scales[page, head, inside], p)
    return tile


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """That of Flash-Decoding, with key tiles that pages fit."""
    paged = require_pages(problem)
    chosen = unpaged_schedule(paged, chip)
    return tile_for_pages(paged, chosen, chip)


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """The splits, and on a GPU the launch that combines them."""
    paged = require_pages(require_attention(problem, scales=True))
    _, n, _ = require_tile(paged, schedule, chip)
    lies, pieces = memory(paged, schedule, chip), pieces_of(paged, n)
    values = {
        **lies.values,
        "kv_heads": paged.kv_heads,
        "page_size": paged.page_size,
        "pages": paged.pages,
        "pool": paged.batch * paged.pages,
        "pieces": pieces,
    }
    table = np.ascontiguousarray(paged.page_table().ravel())
    return split_launches(
        paged,
        schedule,
        chip,
        program=split,
        params=(parameters(paged, schedule, chip, values, (*FIELDS, *OWN_FIELDS)), table),
        lies=lies,
        o=(Packed.of(paged, chip).q, paged.head_dim),
        footprint=footprint(paged, schedule, chip),
        work=work(paged, schedule),
        most_ops=(9 + 4 * pieces, 4),
    )


KERNEL = Kernel(
    name="paged-decode",
    summary="Flash-Decoding over keys and values in pages, found through a table",
    problem=PagedDecode,
    loops="parallel over (sequence · KV head, row tile, split); inside, over key tiles, page by "
    "page: K, V; then parallel over rows: all splits",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "packed query rows × key rows, a multiple of the page or a part of it",
        "page_size": "keys of a page",
        "pattern_seed": "order of the pages in the pool; 0: one after the other",
        "splits": "parts of the keys of a KV head (GPU); by default as fill the cores",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "key tiles that no row of the block sees are not visited",
        "kv_dtype": "K and V stored in fp8 or int8 with an fp32 scale per row (GPU)",
        "spills": "registers of a thread that go through local memory at every step",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("arXiv 2309.06180",),
    sketch=(
        PagedDecode(heads=2, kv_heads=1, seqlen_k=128, head_dim=16, page_size=8),
        Schedule(tile=(16, 16), stages=2, warps=4, splits=2),
    ),
)
