"""What the block programs of decoding share: query rows packed by KV head, splits of the keys.

The query rows of all heads that share a KV head lie one after the other in memory and are one
matrix: packed row r is query row r % seqlen of the r // seqlen-th of those heads (grouped-query
attention, arXiv 2305.13245). A block then reads each key once for the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.emit import inline, numeric, store
from iosim.kernels.arithmetic import stored
from iosim.kernels.attention import STATISTIC_BYTES
from iosim.kernels.masks import key_tiles
from iosim.memory.layout import Matrix, matrix
from iosim.ops import WINDOW
from iosim.problem import Attention, Schedule
from iosim.units import ceil_div, dtype_bytes, round_up

LEAST_ROWS = 16  # rows of the smallest matrix instruction: fewer are padded
RESULT, LSE = 3, 4  # operands of every split launch: what it stores


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Q and O of a decoding kernel: a matrix of `rows` packed rows for each of `count` KV heads."""

    q: Matrix
    count: int
    rows: int

    @classmethod
    def of(cls, problem: Attention, chip: Chip) -> Packed:
        """The layout of `problem` on `chip`."""
        count, rows = problem.batch * problem.kv_heads, problem.group * problem.seqlen
        size = dtype_bytes(problem.dtype)
        return cls(q=matrix(chip, count, rows, problem.head_dim, size), count=count, rows=rows)


def row_tile_spans(problem: Attention, m: int, n: int) -> tuple[NDArray[np.int64], ...]:
    """First and past-the-last key tile that each tile of `m` packed rows sees (of one KV head).

    A tile that holds rows of two heads is taken to hold all query rows.
    """
    rows = problem.group * problem.seqlen
    first, last = problem.spans()
    tile0, end = [], []
    for row0 in range(0, rows, m):
        begin, count = query_rows(row0, min(m, rows - row0), problem.seqlen)
        low, high = first[begin : begin + count], last[begin : begin + count]
        some = low < high
        tile0.append(int(low[some].min()) // n if some.any() else 0)
        end.append(ceil_div(int(high[some].max()), n) if some.any() else 0)
    return np.array(tile0, dtype=np.int64), np.array(end, dtype=np.int64)


def visited_tiles(problem: Attention, schedule: Schedule) -> int:
    """(tile of packed rows, key tile) pairs of one KV head; splits cut them and add none."""
    first, end = row_tile_spans(problem, *schedule.tile[:2])
    return int((end - first).sum())


def keys_of_tiles(problem: Attention, schedule: Schedule) -> int:
    """Key rows that the blocks of one KV head load."""
    n = schedule.tile[1]
    first, end = row_tile_spans(problem, *schedule.tile[:2])
    return int((np.minimum(end * n, problem.seqlen_k) - first * n).sum())


def row_tile(problem: Attention, most: int) -> int:
    """Rows of a block: all packed rows, padded to the smallest instruction, or `most`."""
    return min(most, round_up(problem.group * problem.seqlen, LEAST_ROWS))


@inline
def query_span(row0, rows, p):
    """First query row and number of query rows that `rows` packed rows from `row0` on are."""
    begin = row0 % p.seqlen
    if begin + rows > p.seqlen:
        return 0, p.seqlen
    return begin, rows


def query_rows(row0: int, rows: int, seqlen: int) -> tuple[int, int]:
    """`query_span` for whole problems."""
    begin = row0 % seqlen
    return (0, seqlen) if begin + rows > seqlen else (begin, rows)


@inline
def split_span(block, p):
    """(KV head, split, first packed row, rows, first key tile, past-the-last one) of a block."""
    row_tiles = (p.rows + p.tile_m - 1) // p.tile_m
    part = block % p.splits
    kv = block // p.splits // row_tiles
    row0 = block // p.splits % row_tiles * p.tile_m
    rows = min(p.tile_m, p.rows - row0)
    begin, count = query_span(row0, rows, p)
    first, end = key_tiles(begin, count, p)
    first = max(first, part * p.chunk)
    return kv, part, row0, rows, first, max(first, min(end, (part + 1) * p.chunk))


@inline
def store_split(out, n, step, kv, part, row0, rows, columns, p):
    """What a block stores at its end: rows of O in a grid, else of its split, with their lse."""
    if p.grid:
        at = p.o + (kv * p.q_rows + row0) * p.o_row_bytes
        q_rows = min(p.tile_m, p.q_rows - row0)
        return store(out, n, RESULT, WINDOW, step, at, q_rows, p.o_row_bytes, p.o_row_bytes)
    top = (kv * p.splits + part) * p.rows + row0
    size = columns * STATISTIC_BYTES
    n = store(out, n, RESULT, 0, step, p.o + top * size, rows, size, size)
    size = rows * STATISTIC_BYTES
    return store(out, n, LSE, 0, step, p.lse + top * STATISTIC_BYTES, 1, size, size)


@numeric
def settle(tensors, matrix, row0, m, total, acc, p):
    """Writes the rows of a split: divided, in fp32 with their log-sum-exps; in a grid rounded."""
    for r in range(m.size):
        seen = total[r] > 0
        for d in range(acc.shape[1]):
            value = acc[r, d] / total[r] if seen else 0.0
            tensors[RESULT][matrix, row0 + r, d] = stored(value, p) if p.grid else value
        if not p.grid:
            tensors[LSE][matrix, row0 + r] = m[r] + np.log(total[r]) if seen else -np.inf
