"""Which keys a row of queries sees, tile by tile: for the block programs and for closed forms.

`visible_keys` is the mask of one row; everything else follows from it. The first half works on a
whole problem at once, the second inside block programs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iosim.jit import inline
from iosim.problem import Attention, Schedule


def seen(problem: Attention) -> tuple[int, int]:
    """Query rows that see a key, and keys that a row sees: no others have to be read."""
    first, end = key_spans(problem, 1, 1)
    some = first < end
    if not some.any():
        return 0, 0
    return int(some.sum()), int(end[some].max() - first[some].min())


def key_spans(problem: Attention, m: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and past-the-last key tile that each query tile visits: `key_tiles` of them all."""
    low = np.arange(0, problem.seqlen, m, dtype=np.int64)
    high = np.minimum(low + m, problem.seqlen) - 1
    offset, window, keys = problem.diagonal, problem.window, problem.seqlen_k
    last = np.full_like(low, keys)
    first = np.zeros_like(low)
    if problem.causal or window:
        reach = 0 if problem.causal else window - 1  # keys that a row sees after the diagonal
        low = np.maximum(low, -offset - reach)
        if window:
            high = np.minimum(high, keys + window - 2 - offset)
            first = np.maximum(first, low + (offset - window + 1))
        last = np.minimum(last, high + (offset + reach + 1))
    seen = low <= high
    return np.where(seen, first // n, 0), np.where(seen, -(-last // n), 0)


def query_spans(problem: Attention, m: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and past-the-last query tile that sees each key tile: `query_tiles` of them all."""
    key0 = np.arange(0, problem.seqlen_k, n, dtype=np.int64)
    low = np.zeros_like(key0)
    high = np.full_like(key0, problem.seqlen - 1)
    offset, window = problem.diagonal, problem.window
    if problem.causal or window:
        reach = 0 if problem.causal else window - 1
        low = np.maximum(low, key0 - offset - reach)
    if window:
        last_key = np.minimum(key0 + n, problem.seqlen_k) - 1
        high = np.minimum(high, last_key - offset + window - 1)
    seen = low <= high
    return np.where(seen, low // m, 0), np.where(seen, high // m + 1, 0)


def visited(problem: Attention, schedule: Schedule) -> int:
    """(query tile, key tile) pairs that one head visits."""
    first, end = key_spans(problem, *schedule.tile[:2])
    return int((end - first).sum())


def keys_loaded(problem: Attention, schedule: Schedule) -> int:
    """Key rows that one head loads: those of the visited tiles, the last one perhaps short."""
    n = schedule.tile[1]
    first, end = key_spans(problem, *schedule.tile[:2])
    return int((np.minimum(end * n, problem.seqlen_k) - first * n).sum())


def rows_fetched(
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    matrix: NDArray[np.int64],
    rows: tuple[int, int],
    steps: int,
    cores: int,
) -> int:
    """Rows of the key windows that the blocks of a grid fetch: those that the step before had not.

    Block i sees the tiles [first, end) of `matrix` and takes `steps` steps: it begins at its first
    tile, visits the others, and goes back to the first where it skips steps at its end. `rows` are
    those of a tile and of a whole matrix. Each of the cores begins with no window.
    """
    n, most = rows
    skips = end < steps
    last = np.where(skips, first, end - 1)
    top = np.minimum((first + 1) * n, most)  # where the first window ends
    fresh = np.ones(first.size, dtype=np.bool_)
    fresh[1:] = (first[1:] != last[:-1]) | (matrix[1:] != matrix[:-1])
    shares = np.array_split(np.arange(first.size), cores)
    fresh[[share[0] for share in shares if share.size]] = True
    fetches = fresh.astype(np.int64) + (skips & (end - first > 1))
    others = np.maximum(np.minimum(end * n, most) - top, 0)
    return int((fetches * (top - first * n) + others).sum())


@inline
def visible_keys(row, p):
    """First and past-the-last key that a row sees; equal where it is fully masked."""
    first = 0
    last = p.seqlen_k
    centre = row + p.offset
    if p.window > 0:
        first = max(0, centre - p.window + 1)
        if not p.causal:
            last = min(last, centre + p.window)
    if p.causal:
        last = min(last, centre + 1)
    if last <= first:
        return 0, 0
    return first, last


@inline
def key_tiles(row0, rows, p):
    """First and past-the-last key tile that any of `rows` rows from `row0` on sees."""
    low_row = row0
    high_row = row0 + rows - 1
    if p.causal:
        low_row = max(low_row, -p.offset)
    elif p.window > 0:
        low_row = max(low_row, 1 - p.window - p.offset)
    if p.window > 0:
        high_row = min(high_row, p.seqlen_k + p.window - 2 - p.offset)
    if low_row > high_row:
        return 0, 0
    first, _ = visible_keys(low_row, p)
    _, last = visible_keys(high_row, p)
    return first // p.tile_n, (last + p.tile_n - 1) // p.tile_n


@inline
def query_tiles(key0, keys, p):
    """First and past-the-last query tile of which a row sees any of `keys` keys from `key0` on."""
    low = 0
    high = p.seqlen - 1
    if p.causal:
        low = max(low, key0 - p.offset)
    elif p.window > 0:
        low = max(low, key0 - p.offset - p.window + 1)
    if p.window > 0:
        high = min(high, key0 + keys - 1 - p.offset + p.window - 1)
    if low > high:
        return 0, 0
    return low // p.tile_m, high // p.tile_m + 1


@inline
def block_of(block, p):
    """(head, query tile) of a block: head_first launches one tile of every head before the next."""
    tiles = (p.seqlen + p.tile_m - 1) // p.tile_m
    if p.head_first:
        return block % p.heads, block // p.heads
    return block // tiles, block % tiles
