"""Standard attention: three kernels one after the other, with the scores in memory between them.

    scores:   for each tile of S (parallel): load Q and K;  S = Q Kᵀ · scale, -inf where masked
    softmax:  for each few rows of S (parallel): load them, P = softmax, store P
    output:   for each tile of query rows (parallel):
                  for each tile of keys: load P and V;  O += P V
                  store O

Algorithm 0 of Dao et al., "FlashAttention", arXiv 2205.14135: S and P are N × N in the dtype of the
problem, each written once and read once, 4 · N² elements beside Q, K, V and O. A mask saves
nothing: matrix products compute all of it, as in PyTorch's unfused attention.

Rows of the softmax are cut as PyTorch cuts them: a warp per row up to 2048 keys, then a block of
1024 threads per row, which is read once while the block can hold it, else three times (maximum,
sum, output). On a TPU the three are grids of windows, and a softmax window holds whole rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, exps, load, matrix, store, vector
from iosim.kernels.arithmetic import multiply_output, multiply_scores, softmax_rows, write_rows
from iosim.kernels.attention import Tensors, operand, parameters, require_attention, require_tile
from iosim.kernels.masks import block_of
from iosim.kernels.standard_sizes import (
    PAPER,
    ROW_OPS,
    closed_forms,
    default_schedule,
    output_footprint,
    score_matrix,
    score_ops,
    scores_footprint,
    softmax_cut,
    works,
)
from iosim.launch import Kernel, Launch, Operand
from iosim.memory.layout import addresses
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Attention, Problem, Schedule, tiles

FIELDS = ("score_rows", "score_row_bytes", "softmax_rows", "passes", "scores", "probabilities")
FIRST, SECOND, RESULT = range(3)  # operands of the products: Q, K, S and P, V, O


@block_program
def scores(block, first, last, p, out, tensors):
    """One step: a tile of S."""
    columns = (p.seqlen_k + p.tile_n - 1) // p.tile_n
    head, query = block_of(block // columns, p)
    row0 = query * p.tile_m
    key0 = block % columns * p.tile_n
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    rows = min(p.tile_m, p.q_rows - row0)
    keys = min(p.tile_n, p.k_rows - key0)
    left = key0 * p.itemsize
    width = min(p.tile_n * p.itemsize, p.score_row_bytes - left)
    q_at = p.q + (head * p.q_rows + row0) * p.row_bytes
    k_at = p.k + (head // p.group * p.k_rows + key0) * p.row_bytes
    s_at = p.scores + (head * p.score_rows + row0) * p.score_row_bytes + left
    n = load(out, 0, FIRST, flags, 0, q_at, rows, p.row_bytes, p.row_bytes)
    n = load(out, n, SECOND, flags, 0, k_at, keys, p.row_bytes, p.row_bytes)
    n = matrix(out, n, 0, p.tile_m, p.tile_n, p.head_dim)
    n = vector(out, n, 0, p.tile_m, p.tile_n, p.softmax_ops)
    once = WINDOW if p.grid else 0
    n = store(out, n, RESULT, once, 0, s_at, rows, width, p.score_row_bytes)
    if tensors is not None:
        rows = min(p.tile_m, p.seqlen - row0)
        keys = min(p.tile_n, p.seqlen_k - key0)
        multiply_scores(tensors, head, row0, rows, key0, keys, p)
    return n, True


@block_program
def softmax(block, first, last, p, out, tensors):
    """One step: a few rows, read `passes` times and written once."""
    groups = (p.seqlen + p.softmax_rows - 1) // p.softmax_rows
    head = block // groups
    row0 = block % groups * p.softmax_rows
    flags = WINDOW if p.grid else 0
    rows = min(p.softmax_rows, p.score_rows - row0)
    size = p.score_row_bytes
    at = (head * p.score_rows + row0) * size
    n = 0
    for _ in range(p.passes):
        n = load(out, n, 0, flags, 0, p.scores + at, rows, size, size)
    n = vector(out, n, 0, p.softmax_rows, p.seqlen_k, p.softmax_ops)
    n = exps(out, n, 0, p.softmax_rows, p.seqlen_k)
    n = store(out, n, 1, flags, 0, p.probabilities + at, rows, size, size)
    if tensors is not None:
        softmax_rows(tensors, head, row0, min(p.softmax_rows, p.seqlen - row0), p)
    return n, True


@block_program
def output(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; a step is one key tile."""
    head, query = block_of(block, p)
    row0 = query * p.tile_m
    steps = (p.seqlen_k + p.tile_n - 1) // p.tile_n
    flags = WINDOW if p.grid else (L1_BYPASS if p.bypass else 0)
    rows = min(p.tile_m, p.q_rows - row0)
    p_at = p.probabilities + (head * p.score_rows + row0) * p.score_row_bytes
    v_at = p.v + head // p.group * p.k_rows * p.row_bytes
    o_at = p.o + (head * p.q_rows + row0) * p.row_bytes
    n = 0
    if tensors is not None:
        acc = np.zeros((min(p.tile_m, p.seqlen - row0), p.head_dim))
    for step in range(first, min(last, steps)):
        key0 = step * p.tile_n
        left = key0 * p.itemsize
        width = min(p.tile_n * p.itemsize, p.score_row_bytes - left)
        at = v_at + key0 * p.row_bytes
        keys = min(p.tile_n, p.k_rows - key0)
        n = load(out, n, FIRST, flags, step, p_at + left, rows, width, p.score_row_bytes)
        n = load(out, n, SECOND, flags, step, at, keys, p.row_bytes, p.row_bytes)
        n = matrix(out, n, step, p.tile_m, p.head_dim, p.tile_n)
        if tensors is not None:
            keys = min(p.tile_n, p.seqlen_k - key0)
            multiply_output(tensors, acc, head, row0, key0, keys, p)
    if last < steps:
        return n, False
    once = WINDOW if p.grid else 0
    n = store(out, n, RESULT, once, steps - 1, o_at, rows, p.row_bytes, p.row_bytes)
    if tensors is not None:
        write_rows(tensors[2], head, row0, acc, p)
    return n, True


def memory(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[list[Operand], Any]:
    """Q, K, V, O, S and P where they lie, and the values of `parameters` that say so."""
    tensors, lies = Tensors.of(problem, chip), score_matrix(problem, chip)
    where = addresses(*tensors.sizes, lies.size_bytes, lies.size_bytes)
    scratch = [
        operand(name, "scratch", address, lies.size_bytes)
        for name, address in zip("SP", where[4:], strict=True)
    ]
    rows, passes, _ = softmax_cut(problem, schedule, chip)
    values = {
        **dict(zip(("q", "k", "v", "o", "scores", "probabilities"), where, strict=True)),
        "score_rows": lies.rows,
        "score_row_bytes": lies.row_bytes,
        "softmax_rows": rows,
        "passes": passes,
    }
    return [*tensors.operands(problem, where), *scratch], values


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """Three launches: scores, softmax, output. S and P pass from one to the next."""
    attention = require_attention(problem)
    require_tile(attention, schedule, chip)
    return (
        scores_launch(attention, schedule, chip),
        softmax_launch(attention, schedule, chip),
        output_launch(attention, schedule, chip),
    )


def scores_launch(problem: Attention, schedule: Schedule, chip: Chip) -> Launch:
    """A block per tile of S."""
    (q, k, _, _, s, _), values = memory(problem, schedule, chip)
    m, n = schedule.tile[:2]
    heads = problem.batch * problem.heads
    values["softmax_ops"] = score_ops(problem)
    return Launch(
        name="scores",
        program=scores,
        params=parameters(problem, schedule, chip, values, FIELDS),
        blocks=heads * tiles(problem.seqlen, m) * tiles(problem.seqlen_k, n),
        steps=1,
        ops_per_step=5,
        ops_at_ends=0,
        operands=(q, k, s),
        footprint=scores_footprint(problem, schedule, chip),
        work=works(problem, schedule, chip)[0],
        dtype=problem.dtype,
        stages=max(1, schedule.stages),
        matrix_rows=m,
    )


def softmax_launch(problem: Attention, schedule: Schedule, chip: Chip) -> Launch:
    """A block per few rows of S."""
    (_, _, _, _, s, p), values = memory(problem, schedule, chip)
    rows, passes, footprint = softmax_cut(problem, schedule, chip)
    values["softmax_ops"] = ROW_OPS
    return Launch(
        name="softmax",
        program=softmax,
        params=parameters(problem, schedule, chip, values, FIELDS),
        blocks=problem.batch * problem.heads * tiles(problem.seqlen, rows),
        steps=1,
        ops_per_step=passes + 3,
        ops_at_ends=0,
        operands=(s, p),
        footprint=footprint,
        work=works(problem, schedule, chip)[1],
        dtype=problem.dtype,
    )


def output_launch(problem: Attention, schedule: Schedule, chip: Chip) -> Launch:
    """A block per tile of O."""
    (_, _, v, o, _, p), values = memory(problem, schedule, chip)
    m, n = schedule.tile[:2]
    return Launch(
        name="output",
        program=output,
        params=parameters(problem, schedule, chip, values, FIELDS),
        blocks=problem.batch * problem.heads * tiles(problem.seqlen, m),
        steps=tiles(problem.seqlen_k, n),
        ops_per_step=3,
        ops_at_ends=1,
        operands=(p, v, o),
        footprint=output_footprint(problem, schedule, chip),
        work=works(problem, schedule, chip)[2],
        dtype=problem.dtype,
        stages=max(1, schedule.stages),
        matrix_rows=m,
    )


KERNEL = Kernel(
    name="standard",
    summary="Unfused attention: scores, softmax and output as three kernels, N × N in memory",
    problem=Attention,
    loops="over tiles of S: Q, K; over rows: S, P; over query tiles and key tiles: P, V, then O",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "query rows × key rows of both products; query rows bound a TPU's softmax window",
        "order": "query: tiles of one head follow each other; head: one tile of every head first",
        "stages": "steps that the loads of the second product run ahead of, plus one",
        "causal, window": "masked scores are -inf and cost what the others cost",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=(PAPER,),
    sketch=(Attention(heads=1, seqlen=64, head_dim=16), Schedule(tile=(16, 16), stages=2, warps=4)),
)
