"""The backward pass by pencil and paper: flops, and the bytes that reach the cores and leave them.

On a GPU lse and delta are counted by the byte: exact where the statistics of every tile and head
begin at a sector, that is at a multiple of 8 rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.kernels.attention import STATISTIC_BYTES, Tensors, require_attention
from iosim.kernels.flash1 import visits
from iosim.kernels.flash2_bwd_sizes import (
    ATOMICS,
    REREAD,
    dkdv_footprint,
    dq_footprint,
    memory,
    reread_footprint,
    variant_of,
)
from iosim.kernels.masks import key_spans, keys_loaded, query_spans, visited
from iosim.launch import ClosedForm
from iosim.problem import Attention, Problem, Schedule, tiles

PAPER, FIRST_PAPER = "arXiv 2307.08691", "arXiv 2205.14135"
PALLAS = "jax.experimental.pallas.ops.tpu.flash_attention"


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes of the launches of a variant together."""
    attention = require_attention(problem)
    variant = variant_of(schedule, chip)
    flops = ClosedForm(
        quantity="flops",
        formula="10 · unmasked pairs · d · heads",
        value=attention.matrix_flops(products=5),
        source=f"{PAPER}, algorithm 2: S, dV, dP, dK and dQ",
    )
    if chip.grid is not None:
        return (flops, *_grid_forms(attention, schedule, chip))
    if variant == REREAD:
        return (flops, *_reread_forms(attention, schedule, chip))
    moved = _atomics_forms if variant == ATOMICS else _two_pass_forms
    return (flops, *moved(attention, schedule, chip))


def _parts(problem: Attention, schedule: Schedule, chip: Chip) -> dict[str, int]:
    """What the forms are sums of, over all heads."""
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    row = Tensors.of(problem, chip).q.row_bytes
    rows, keys = visits(problem, schedule)
    q = heads * problem.seqlen * row
    statistic = heads * problem.seqlen * STATISTIC_BYTES
    return {
        "K and V once": kv_heads * 2 * keys * row,
        "Q and dO of visits": heads * rows * 2 * (row + STATISTIC_BYTES),
        "sums of visits": heads * rows * problem.head_dim * STATISTIC_BYTES,
        "delta": statistic,
        "sums": statistic * problem.head_dim,
        "O and dO": 2 * q,
        "dQ": q,
        "dK and dV": kv_heads * 2 * problem.seqlen_k * row,
        "visits": heads * visited(problem, schedule),
    }


def _local(local_bytes: int) -> str:
    return " + visited tiles · threads · spilled registers · 4" if local_bytes else ""


def _atomics_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    part = _parts(problem, schedule, chip)
    local = dkdv_footprint(problem, schedule, chip).local_bytes
    columns = part["K and V once"] + part["Q and dO of visits"]
    stored = part["delta"] + part["sums"] + part["dQ"] + part["dK and dV"]
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula=(
                "KV heads · 2 · keys · d · bytes + heads ·"
                " (rows of all visits · (2 · d · bytes + 8) + N · (2 · d · bytes + 4 · d))"
            ),
            value=columns + part["O and dO"] + part["sums"],
            source=f"{PAPER}, algorithm 2: Q, dO, lse and delta once per key tile; "
            "delta: O and dO; convert: fp32 dQ",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=(
                "heads · (rows of all visits · 4 · d + N · (4 + 4 · d + d · bytes))"
                f" + KV heads · 2 · Nk · d · bytes{_local(local)}"
            ),
            value=part["sums of visits"] + stored + part["visits"] * local,
            source=f"{PAPER}, algorithm 2: fp32 dQ added to once per key tile; delta: zeros",
        ),
    )


def _two_pass_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    part = _parts(problem, schedule, chip)
    row = Tensors.of(problem, chip).q.row_bytes
    heads = problem.batch * problem.heads
    keys = keys_loaded(problem, schedule)
    rows = rows_of_tiles(problem, schedule)
    second = heads * 2 * (rows * (row + STATISTIC_BYTES) + keys * row)
    prints = [f(problem, schedule, chip) for f in (dkdv_footprint, dq_footprint)]
    local = sum(block.local_bytes for block in prints)
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula=(
                "KV heads · 2 · keys · d · bytes + heads · (2 · (N + key rows of visited tiles)"
                " · d · bytes + (rows of all visits + N) · (2 · d · bytes + 8))"
            ),
            value=part["K and V once"] + part["Q and dO of visits"] + part["O and dO"] + second,
            source=f"{PAPER}, algorithm 2 without dQ, and again by query tile: "
            "Q and dO once, K and V once per query tile; delta: O and dO",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"heads · N · (4 + d · bytes) + KV heads · 2 · Nk · d · bytes{_local(local)}",
            value=part["delta"] + part["dQ"] + part["dK and dV"] + part["visits"] * local,
            source=f"{PAPER}, algorithm 2: dQ, dK and dV once, and delta",
        ),
    )


def _reread_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    heads = problem.batch * problem.heads
    part = _parts(problem, schedule, chip)
    row = Tensors.of(problem, chip).q.row_bytes
    rows, _ = visits(problem, schedule)
    local = reread_footprint(problem, schedule, chip).local_bytes
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula=(
                "KV heads · 2 · keys · d · bytes + heads · rows of all visits · (4 · d · bytes + 8)"
            ),
            value=part["K and V once"] + heads * rows * (4 * row + 2 * STATISTIC_BYTES),
            source=f"{FIRST_PAPER}, algorithm 4: Q, O, dO, dQ, l and m once per key tile",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=(
                "heads · rows of all visits · d · bytes"
                f" + KV heads · 2 · Nk · d · bytes{_local(local)}"
            ),
            value=heads * rows * row + part["dK and dV"] + part["visits"] * local,
            source=f"{FIRST_PAPER}, algorithm 4: dQ once per key tile, dK and dV once",
        ),
    )


def rows_of_tiles(problem: Attention, schedule: Schedule) -> int:
    """Query rows of one head that stand in a tile which sees a key."""
    m, n = schedule.tile[:2]
    first, end = key_spans(problem, m, n)
    row0 = np.arange(0, problem.seqlen, m)
    return int(np.minimum(m, problem.seqlen - row0)[first < end].sum())


def _grid_forms(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    tensors = Tensors.of(problem, chip)
    q, k = tensors.q, tensors.k
    row = memory(problem, chip, variant_of(schedule, chip)).statistic
    q_rows, statistics = (query_rows(problem, schedule, chip, m.rows) for m in (q, row))
    k_rows = key_rows(problem, schedule, chip, k.rows)
    fills = (
        2 * q.size_bytes  # delta
        + (2 * k.size_bytes + 2 * q_rows * q.row_bytes + 2 * statistics * row.row_bytes)
        + (2 * q.size_bytes + 2 * row.size_bytes + 2 * k_rows * k.row_bytes)
    )
    return (
        ClosedForm(
            quantity="vmem_fill_bytes",
            formula=(
                "2 · (K + V) of windows whose index changes by query tile, 2 · (Q + lse) by key"
                " tile; K + V, 4 · Q and 2 · lse once; padded"
            ),
            value=fills,
            source=f"{PALLAS}: a skipped step points at the first visible window",
        ),
        ClosedForm(
            quantity="vmem_drain_bytes",
            formula="dQ + dK + dV + delta, padded",
            value=q.size_bytes + 2 * k.size_bytes + row.size_bytes,
            source=f"{PALLAS}: every result once",
        ),
    )


def query_rows(problem: Attention, schedule: Schedule, chip: Chip, most: int) -> int:
    """Rows of the query windows that dkdv fetches, of matrices of `most` rows."""
    m, n = schedule.tile[:2]
    first, end = query_spans(problem, m, n)
    kv_heads = problem.batch * problem.kv_heads
    block = np.arange(kv_heads * first.size)
    column = block // kv_heads if schedule.order == "head" else block % first.size
    kv = block % kv_heads if schedule.order == "head" else block // first.size
    turn = np.repeat(column, problem.group)
    head = (kv[:, None] * problem.group + np.arange(problem.group)).ravel()
    fresh = np.zeros(turn.size, dtype=np.bool_)
    shares = np.array_split(block, chip.cores_used)
    fresh[[share[0] * problem.group for share in shares if share.size]] = True
    return _window_rows((head, first[turn], end[turn]), fresh, m, most, tiles(problem.seqlen, m))


def key_rows(problem: Attention, schedule: Schedule, chip: Chip, most: int) -> int:
    """Rows of the key windows that dq fetches, of matrices of `most` rows."""
    m, n = schedule.tile[:2]
    first, end = key_spans(problem, m, n)
    heads = problem.batch * problem.heads
    block = np.arange(heads * first.size)
    query = block // heads if schedule.order == "head" else block % first.size
    kv = (block % heads if schedule.order == "head" else block // first.size) // problem.group
    fresh = np.zeros(block.size, dtype=np.bool_)
    shares = np.array_split(block, chip.cores_used)
    fresh[[share[0] for share in shares if share.size]] = True
    return _window_rows((kv, first[query], end[query]), fresh, n, most, tiles(problem.seqlen_k, n))


def _window_rows(
    walks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    fresh: NDArray[np.bool_],
    tile: int,
    most: int,
    count: int,
) -> int:
    """Rows fetched by walks over `count` tiles: (matrix, first tile seen, end of those seen).

    A walk begins at its first visible tile, visits the others, and goes back to the first where the
    mask skips steps at its end. `fresh`: the walk begins on a core that holds no window.
    """
    which, first, end = walks
    skips = end < count
    last = np.where(skips, first, end - 1)
    top = np.minimum((first + 1) * tile, most)  # where the first window ends
    changed = fresh.copy()
    changed[1:] |= (first[1:] != last[:-1]) | (which[1:] != which[:-1])
    fetches = changed.astype(np.int64) + (skips & (end - first > 1))
    others = np.maximum(np.minimum(end * tile, most) - top, 0)
    return int((fetches * (top - first * tile) + others).sum())
