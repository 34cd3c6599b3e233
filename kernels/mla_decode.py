"""Multi-head latent attention, decoding: one row per token serves every head as key and as value.

    for each sequence, tile of packed query rows, split of the keys (parallel):
        load Q (latent and rotary part): the rows of all heads together
        for each tile of tokens of the split that the mask lets a row see:
            load the tile once;  S = Q · tileᵀ;  online softmax
            O += P · (the first latent_dim columns of the same tile)
        store the partial O and the log-sum-exp in fp32
    for each few rows (parallel): combine the splits, as Flash-Decoding does

DeepSeek-V2, arXiv 2405.04434, section 2.1, with the up-projections absorbed into Q and the output,
as in FlashMLA. The cache holds head_dim (512 + 64) elements per token instead of 2 · heads · d.
Scores are scaled by 1 / √head_dim of the stored row; DeepSeek scales by the 192 elements of a key
before it is absorbed, which changes no byte. On a TPU: one grid without splits.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, load, matrix, spill, vector
from iosim.kernels.arithmetic import attend, fetch, fetch_keys
from iosim.kernels.attention import (
    dequantize,
    load_scale,
    parameters,
    require_attention,
    require_tile,
)
from iosim.kernels.mla_decode_sizes import (
    closed_forms,
    default_schedule,
    footprint,
    memory,
    output_of,
    require_latent,
    work,
)
from iosim.kernels.packed import settle, split_span, store_split
from iosim.kernels.split_kv import FIELDS, split_launches
from iosim.launch import Kernel, Launch
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Problem, Schedule
from iosim.problem_variants import LatentDecode

Q, KV, SCALE, _, _, LOCAL = range(6)


@block_program
def split(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one tile of tokens of its split."""
    kv, part, row0, rows, tile0, tile_end = split_span(block, p)
    steps = p.chunk if p.grid else tile_end - tile0
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    once = WINDOW if p.grid else 0
    q_rows = min(p.tile_m, p.q_rows - row0)
    n = 0
    if first == 0:
        at = p.q + (kv * p.q_rows + row0) * p.row_bytes
        n = load(out, n, Q, once, 0, at, q_rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        q = fetch(tensors[Q], kv, row0, rows, p.head_dim)
        m, total = np.full(rows, -np.inf), np.zeros(rows)
        acc = np.zeros((rows, p.latent_dim))
        numbers = np.arange(row0, row0 + rows) % p.seqlen
    for step in range(first, min(last, steps)):
        tile = step if p.grid else tile0 + step
        idle = p.grid and not tile0 <= tile < tile_end
        if idle:
            tile = tile0
        key0 = tile * p.tile_n
        keys = min(p.tile_n, p.seqlen_k - key0)
        k_rows = min(p.tile_n, p.k_rows - key0)
        at = p.k + (kv * p.k_rows + key0) * p.k_row_bytes
        n = load(out, n, KV, flags, step, at, k_rows, p.k_row_bytes, p.k_row_bytes)
        n = load_scale(out, n, SCALE, flags, step, p.k_scale, kv, key0, p)
        if not idle:
            n = dequantize(out, n, step, p.tile_n, p.head_dim, p)
            n = matrix(out, n, step, p.tile_m, p.tile_n, p.head_dim)
            n = vector(out, n, step, p.tile_m, p.tile_n, p.softmax_ops)
            n = exps(out, n, step, p.tile_m, p.tile_n)
            n = vector(out, n, step, p.tile_m, p.latent_dim, 1)  # rescale what is accumulated
            n = matrix(out, n, step, p.tile_m, p.latent_dim, p.tile_n)
            n = spill(out, n, LOCAL, step, p.local, p.spill_bytes)
            if tensors is not None:
                k = fetch_keys(tensors[KV], tensors[SCALE], kv, key0, keys, p.head_dim, p)
                attend(q, k, k, numbers, key0, m, total, acc, p)
    if last < steps:
        return n, False
    n = store_split(out, n, max(steps - 1, 0), kv, part, row0, rows, p.latent_dim, p)
    if tensors is not None:
        settle(tensors, kv * p.splits + part, row0, m, total, acc, p)
    return n, True


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """The splits, and on a GPU the launch that combines them."""
    latent = require_latent(require_attention(problem, scales=True))
    require_tile(latent, schedule, chip)
    lies = memory(latent, schedule, chip)
    values = {**lies.values, "latent_dim": latent.latent_dim}
    return split_launches(
        latent,
        schedule,
        chip,
        program=split,
        params=parameters(latent, schedule, chip, values, (*FIELDS, "latent_dim")),
        lies=lies,
        o=(output_of(latent, chip), latent.latent_dim),
        footprint=footprint(latent, schedule, chip),
        work=work(latent, schedule),
        most_ops=(10, 3),
    )


KERNEL = Kernel(
    name="mla-decode",
    summary="Multi-head latent attention: one row per token is key and value of every head",
    problem=LatentDecode,
    loops="parallel over (sequence, row tile, split); inside, over tiles of tokens: the tile once, "
    "scores, softmax, output; then parallel over rows: all splits",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "packed query rows (heads · queries) × tokens",
        "latent_dim": "elements of a row that are the value; head_dim is the whole row",
        "splits": "parts of the tokens of a sequence (GPU); by default as fill the cores",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "tiles of tokens that no row of the block sees are not visited",
        "kv_dtype": "the cache stored in fp8 or int8 with an fp32 scale per row, widened on chip",
        "spills": "registers of a thread that go through local memory at every step",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("arXiv 2405.04434",),
    sketch=(
        LatentDecode(heads=32, seqlen_k=64, head_dim=32, latent_dim=16),
        Schedule(tile=(16, 16), stages=2, warps=4, splits=2),
    ),
)
