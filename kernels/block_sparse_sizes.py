"""What a mask of blocks lets be visited, read and skipped: lists of key tiles, and their bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from iosim.chip import Chip
from iosim.kernels.attention import Tensors
from iosim.kernels.masks import key_spans
from iosim.kernels.streams import Numbers, run_bytes
from iosim.problem import Schedule, tiles
from iosim.problem_variants import BlockSparse

INDEX_BYTES = 4  # int32


class KeyLists(NamedTuple):
    """Which key tiles each query tile visits: compressed sparse rows.

    Query tile i visits `indices[pointers[i] : pointers[i + 1]]`, in ascending order. `rest[i]` is
    the tile at which the steps of a grid point once that list has come to its end: its last one,
    for an empty list that of the nearest query tile before, else 0.
    """

    pointers: Numbers
    indices: Numbers
    rest: Numbers

    @property
    def lengths(self) -> Numbers:
        """Key tiles of each query tile."""
        return np.diff(self.pointers)

    @property
    def longest(self) -> int:
        """Key tiles of the query tile that visits most."""
        return int(self.lengths.max())

    @property
    def size_bytes(self) -> int:
        """Bytes of pointers and indices in memory, one list for all heads."""
        return (self.pointers.size + self.indices.size) * INDEX_BYTES

    @property
    def table(self) -> Numbers:
        """Pointers, indices and rest, one after the other."""
        return np.concatenate([self.pointers, self.indices, self.rest])


def key_lists(problem: BlockSparse, schedule: Schedule) -> KeyLists:
    """The key tiles in which a row of the query tile sees a key, by blocks and mask.

    The tiles must divide the blocks of the mask.
    """
    m, n = schedule.tile[:2]
    first, end = key_spans(problem, m, n)
    tile = np.arange(tiles(problem.seqlen_k, n))
    row_block = np.arange(first.size) * m // problem.mask_block
    visits = problem.block_mask()[row_block][:, tile * n // problem.mask_block]
    visits &= (first[:, None] <= tile) & (tile < end[:, None])
    pointers = np.concatenate([[0], np.cumsum(visits.sum(axis=1))]).astype(np.int64)
    indices = np.nonzero(visits)[1].astype(np.int64)
    before = np.concatenate([[0], indices])  # before[i]: the index that stands before place i
    return KeyLists(pointers, indices, before[pointers[1:]])


def keys_listed(problem: BlockSparse, lists: KeyLists, n: int) -> int:
    """Key rows of all tiles that one head visits, the last tile perhaps short."""
    return int(np.minimum(n, problem.seqlen_k - lists.indices * n).sum())


def seen(problem: BlockSparse) -> tuple[int, int]:
    """Query rows that see a key, and keys that a row sees: no others have to be read."""
    rows = int(np.count_nonzero(problem.keys_of_rows()))
    low, high = problem.spans()
    some = np.flatnonzero(low < high)  # consecutive rows, whose spans only move to the right
    key, side = np.arange(problem.seqlen_k), problem.mask_block
    begin = np.searchsorted(high[some], key, side="right") + some[:1].sum()
    end = np.searchsorted(low[some], key, side="right") + some[:1].sum()
    above = np.pad(np.cumsum(problem.block_mask(), axis=0), ((1, 0), (0, 0)))
    blocks = above[-(-end // side), key // side] - above[begin // side, key // side]
    return rows, int(np.count_nonzero((begin < end) & (blocks > 0)))


def list_bytes(lists: KeyLists, lanes: int) -> int:
    """Bytes that one head loads of the lists, in sectors.

    Both pointers of a tile, then `lanes` indices at a time.
    """
    places = np.arange(lists.lengths.size) * INDEX_BYTES
    total = run_bytes(places, np.full_like(places, 2 * INDEX_BYTES))
    for begin, end in zip(lists.pointers[:-1].tolist(), lists.pointers[1:].tolist(), strict=True):
        start = np.arange(begin, end, lanes)
        size = np.minimum(lanes, end - start) * INDEX_BYTES
        total += run_bytes((lists.pointers.size + start) * INDEX_BYTES, size)
    return total


def window_rows(problem: BlockSparse, schedule: Schedule, chip: Chip) -> int:
    """Rows of the K windows that a grid fetches: those whose index is not that of the step before.

    A block walks down its list and stays at the last tile of it, or at the `rest` of an empty one.
    Each core begins with no window.
    """
    n = schedule.tile[1]
    lists = key_lists(problem, schedule)
    heads, queries = problem.batch * problem.heads, lists.lengths.size
    most = Tensors.of(problem, chip).k.rows

    def rows(tile: Numbers) -> Numbers:
        return np.minimum(n, most - tile * n)

    first = lists.rest.copy()
    some = lists.lengths > 0
    first[some] = lists.indices[lists.pointers[:-1][some]]
    others = int(rows(lists.indices).sum() - rows(first[some]).sum())
    block = np.arange(heads * queries)
    by_head = schedule.order == "head"
    query = block // heads if by_head else block % queries
    kv = (block % heads if by_head else block // queries) // problem.group
    fresh = np.ones(block.size, dtype=np.bool_)
    fresh[1:] = (first[query[1:]] != lists.rest[query[:-1]]) | (kv[1:] != kv[:-1])
    fresh[[share[0] for share in np.array_split(block, chip.cores_used) if share.size]] = True
    return heads * others + int(rows(first[query])[fresh].sum())
