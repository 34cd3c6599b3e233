"""What the decoding kernels share: query rows packed by KV head, splits of the keys, their sizes.

The query rows of all heads that share a KV head lie one after the other in memory and are one
matrix: packed row r is query row r % seqlen of the r // seqlen-th of those heads (grouped-query
attention, arXiv 2305.13245). A block then reads each key once for the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.jit import inline
from iosim.kernels.attention import STATISTIC_BYTES, Tensors
from iosim.memory.layout import Matrix, matrix
from iosim.problem import Attention, Schedule, tiles
from iosim.units import SECTOR_BYTES, ceil_div, dtype_bytes, round_up

LEAST_ROWS = 16  # rows of the smallest matrix instruction: fewer are padded
MOST_SPLITS = 128
ENOUGH = 0.85  # of the best wave efficiency


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


def key_chunk(problem: Attention, schedule: Schedule) -> int:
    """Key tiles of one split: whole tiles, shared out evenly, the last splits perhaps empty."""
    return ceil_div(tiles(problem.seqlen_k, schedule.tile[1]), max(1, schedule.splits))


def default_splits(blocks: int, cores: int, key_tiles: int) -> int:
    """The fewest splits whose last wave is nearly as full as the fullest that is possible.

    1 where the blocks nearly fill the cores by themselves. FlashAttention's rule
    (`num_splits_heuristic`): waves = blocks · splits / cores, efficiency = waves / ⌈waves⌉, at
    least 85 % of the best; a split that leaves the longest chunk as long as one fewer is no choice.
    """
    if blocks >= 0.8 * cores:
        return 1
    most = min(MOST_SPLITS, cores, key_tiles)
    possible = [
        splits
        for splits in range(1, most + 1)
        if splits == 1 or ceil_div(key_tiles, splits) != ceil_div(key_tiles, splits - 1)
    ]
    best = max(wave_efficiency(blocks * splits, cores) for splits in possible)
    return next(s for s in possible if wave_efficiency(blocks * s, cores) >= ENOUGH * best)


def wave_efficiency(blocks: int, cores: int) -> float:
    """How full the waves of `blocks` are, one block to a core: 1 where the last one is full too."""
    return blocks / cores / ceil_div(blocks, cores)


def require_splits(schedule: Schedule, chip: Chip) -> int:
    """The splits of a schedule. Raises RequestError for more than one on a chip that runs grids."""
    splits = max(1, schedule.splits)
    if chip.grid is not None and splits > 1:
        raise RequestError(
            f"{chip.name} runs the steps of a grid one after the other: {splits} splits gain "
            "nothing there; leave --splits out"
        )
    return splits


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


def statistic_sectors(problem: Attention, schedule: Schedule) -> int:
    """Bytes of the sectors that the blocks write of the partial log-sum-exps of all splits."""
    rows = problem.group * problem.seqlen
    m, splits = schedule.tile[0], max(1, schedule.splits)
    matrices = np.arange(problem.batch * problem.kv_heads * splits, dtype=np.int64)[:, None]
    row0 = np.arange(0, rows, m, dtype=np.int64)[None, :]
    start = (matrices * rows + row0) * STATISTIC_BYTES
    length = np.minimum(m, rows - row0) * STATISTIC_BYTES
    touched = (start + length - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1
    return int(touched.sum()) * SECTOR_BYTES


def row_tile(problem: Attention, most: int) -> int:
    """Rows of a block: all packed rows, padded to the smallest instruction, or `most`."""
    return min(most, round_up(problem.group * problem.seqlen, LEAST_ROWS))


def partial_sizes(problem: Attention, schedule: Schedule, columns: int) -> tuple[int, int]:
    """Bytes of the fp32 partial outputs and log-sum-exps of all splits."""
    rows = problem.batch * problem.heads * problem.seqlen * max(1, schedule.splits)
    return rows * columns * STATISTIC_BYTES, rows * STATISTIC_BYTES


def kv_tile_bytes(problem: Attention, schedule: Schedule, chip: Chip) -> int:
    """Bytes of a tile of K and one of V with their scales."""
    tensors, n = Tensors.of(problem, chip), schedule.tile[1]
    scale_bytes = tensors.scale.rows * n * STATISTIC_BYTES if problem.scaled else 0
    return 2 * (n * tensors.k.row_bytes + scale_bytes)


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
