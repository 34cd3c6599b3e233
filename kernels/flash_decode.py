"""Flash-Decoding: the keys of each KV head are split, so that a few query rows fill the chip.

    for each KV head, tile of packed query rows, split of the keys (parallel):
        load Q: all query heads of the KV head together
        for each tile of keys of the split that the mask lets a row see:
            load K;  S = Q Kᵀ;  online softmax
            load V;  O += P V
        store the partial O and the log-sum-exp in fp32
    for each few rows (parallel):
        load the partial O and log-sum-exp of all splits;  O = their weighted sum;  store O

Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023. With one split the
second launch still runs and rounds. On a TPU the steps of a grid run one after the other, so that
splits gain nothing: it is one grid (KV head, tile of rows, key tile), and O is written at once.
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
from iosim.kernels.flash_decode_sizes import closed_forms, default_schedule, footprint, memory, work
from iosim.kernels.packed import Packed, settle, split_span, store_split
from iosim.kernels.split_kv import FIELDS, split_launches
from iosim.launch import Kernel, Launch
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Problem, Schedule
from iosim.problem_variants import Decode

Q, K, V, _, _, K_SCALE, V_SCALE, LOCAL = range(8)


@block_program
def split(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one key tile of its split."""
    kv, part, row0, rows, tile0, tile_end = split_span(block, p)
    steps = p.chunk if p.grid else tile_end - tile0
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    once = WINDOW if p.grid else 0
    q_rows = min(p.tile_m, p.q_rows - row0)
    q_at = (kv * p.q_rows + row0) * p.row_bytes
    n = 0
    if first == 0:
        n = load(out, n, Q, once, 0, p.q + q_at, q_rows, p.row_bytes, p.row_bytes)
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
                attend(q, k, v, numbers, key0, m, total, acc, p)
    if last < steps:
        return n, False
    n = store_split(out, n, max(steps - 1, 0), kv, part, row0, rows, p.head_dim, p)
    if tensors is not None:
        settle(tensors, kv * p.splits + part, row0, m, total, acc, p)
    return n, True


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """The splits, and on a GPU the launch that combines them."""
    attention = require_attention(problem, scales=True)
    require_tile(attention, schedule, chip)
    lies, o = memory(attention, schedule, chip), (Packed.of(attention, chip).q, attention.head_dim)
    return split_launches(
        attention,
        schedule,
        chip,
        program=split,
        params=parameters(attention, schedule, chip, lies.values, FIELDS),
        lies=lies,
        o=o,
        footprint=footprint(attention, schedule, chip),
        work=work(attention, schedule),
        most_ops=(13, 3),
    )


KERNEL = Kernel(
    name="flash-decode",
    summary="Flash-Decoding: keys split over blocks, query heads of a KV head packed, then merged",
    problem=Decode,
    loops="parallel over (batch · KV head, row tile, split); inside, over key tiles: K, V; "
    "then parallel over rows: all splits",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "packed query rows × key rows (TPU: block_q × block_k_major × block_k)",
        "splits": "parts of the keys of a KV head (GPU); by default as fill the cores",
        "stages": "steps that loads run ahead of, plus one (shared memory grows with it)",
        "causal, window": "key tiles that no row of the block sees are not visited",
        "kv_dtype": "K and V stored in fp8 or int8 with an fp32 scale per row, widened on chip",
        "spills": "registers of a thread that go through local memory at every step",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("Dao, Haziza, Massa, Sizov, Flash-Decoding, 2023",),
    sketch=(
        Decode(heads=4, kv_heads=2, seqlen_k=128, head_dim=16),
        Schedule(tile=(16, 16), stages=2, warps=4, splits=2),
    ),
)
