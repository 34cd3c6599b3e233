"""Paged decoding: pages and tiles, where the pool lies, what is moved by arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import STATISTIC_BYTES, require_attention
from iosim.kernels.combine import combine_bytes
from iosim.kernels.flash_decode_sizes import drained_form, footprint
from iosim.kernels.masks import seen
from iosim.kernels.packed import Packed, keys_of_tiles, row_tile_spans
from iosim.kernels.split_kv import Memory, Read, key_chunk, split_memory, written_form
from iosim.kernels.streams import run_bytes
from iosim.launch import ClosedForm
from iosim.memory.layout import Matrix, matrix
from iosim.problem import Attention, Problem, Schedule
from iosim.problem_variants import PagedDecode
from iosim.units import ceil_div, dtype_bytes

PAPER = "arXiv 2309.06180"
INDEX_BYTES = 4  # a page number is an int32
MOST_PIECES = 24  # pages of a tile: windows of one grid step


def require_pages(problem: Problem) -> PagedDecode:
    """`problem` as a PagedDecode. Raises RequestError for another kind."""
    if not isinstance(problem, PagedDecode):
        raise RequestError(f"paged-decode needs a problem with pages (PagedDecode), not {problem}")
    return problem


def pieces_of(problem: PagedDecode, n: int) -> int:
    """Pages that a tile of `n` keys is read from. Raises RequestError where they do not match."""
    size = problem.page_size
    if n % size and size % n:
        raise RequestError(
            f"key tiles of {n} and pages of {size} do not match: one must divide the other"
        )
    return max(1, n // size)


def tile_for_pages(problem: PagedDecode, schedule: Schedule, chip: Chip) -> Schedule:
    """`schedule` with the greatest key tile up to its own that pages fit."""
    m, n = schedule.tile[:2]
    least = chip.grid.lanes if chip.grid is not None else 1
    fitting = [
        side
        for side in range(n, 0, -1)
        if side % least == 0
        and not (side % problem.page_size and problem.page_size % side)
        and (chip.grid is None or side // problem.page_size <= MOST_PIECES)
    ]
    return dataclasses.replace(schedule, tile=(m, fitting[0] if fitting else n))


def pool_of(problem: PagedDecode, chip: Chip) -> Matrix:
    """K (and V) in memory: tokens × heads in a page on a GPU, the pages of a head on a TPU."""
    size, pages = dtype_bytes(problem.kv_dtype), problem.batch * problem.pages
    if chip.grid is None:
        rows = problem.page_size * problem.kv_heads
        return matrix(chip, pages, rows, problem.head_dim, size)
    return matrix(chip, problem.kv_heads * pages, problem.page_size, problem.head_dim, size)


def require_form(problem: PagedDecode, schedule: Schedule, chip: Chip) -> None:
    """Raises RequestError for what a grid of windows cannot do: scales, many pages in a tile."""
    pieces = pieces_of(problem, schedule.tile[1])
    if chip.grid is not None and (problem.scaled or pieces > MOST_PIECES):
        what = "scales" if problem.scaled else f"{pieces} pages in a tile"
        raise RequestError(
            f"paged-decode on {chip.name} has no form for {what}; "
            f"take K and V in {problem.dtype} and at most {MOST_PIECES} pages per tile"
        )


def memory(problem: PagedDecode, schedule: Schedule, chip: Chip) -> Memory:
    """Q, the pools of K and V, what is stored, scales, page table, local memory; O apart.

    The table is no operand of a grid.
    """
    require_form(problem, schedule, chip)
    packed, pool = Packed.of(problem, chip), pool_of(problem, chip)
    rows, keys = seen(problem)
    pages, heads = problem.batch * problem.pages, problem.batch * problem.kv_heads
    q_needed = packed.count * problem.group * rows * packed.q.row_bytes
    k = (pool.size_bytes, heads * keys * pool.row_bytes)
    scale_bytes = pages * problem.page_size * problem.kv_heads * STATISTIC_BYTES * problem.scaled
    scale = (scale_bytes, heads * keys * STATISTIC_BYTES)
    numbers = problem.batch * ceil_div(keys, problem.page_size) * INDEX_BYTES
    table = (pages * INDEX_BYTES if chip.grid is None else 0, numbers)
    lies = split_memory(
        problem,
        schedule,
        chip,
        footprint(problem, schedule, chip),
        (packed.q, problem.head_dim),
        [Read("q", "Q", packed.q.size_bytes, q_needed), Read("k", "K", *k), Read("v", "V", *k)],
        [
            Read("k_scale", "K_scale", *scale),
            Read("v_scale", "V_scale", *scale),
            Read("table", "pages", *table),
        ],
    )
    own = {"k_rows": pool.rows, "scale_rows": int(problem.scaled)}
    return dataclasses.replace(lies, values={**lies.values, **own})


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and the bytes that arrive at the cores and leave them over all launches."""
    paged = require_pages(require_attention(problem, scales=True))
    flops = ClosedForm(
        quantity="flops",
        formula="4 · unmasked pairs · d · heads",
        value=paged.matrix_flops(),
        source=f"{PAPER}: as attention without pages",
    )
    if chip.grid is not None:
        return (flops, drained_form(paged, schedule, chip))
    packed = Packed.of(paged, chip)
    splits, row = max(1, schedule.splits), packed.q.row_bytes
    loaded, _ = combine_bytes(paged, splits, paged.head_dim, row)
    keys = 2 * keys_of_tiles(paged, schedule) * pool_of(paged, chip).row_bytes
    fill = ClosedForm(
        quantity="l1_fill_bytes",
        formula="splits · Q + KV heads · 2 · keys of visited tiles · d · bytes + page numbers, in "
        "sectors; then splits · heads · N · (d + 1) · 4",
        value=packed.count * (splits * packed.rows * row + keys)
        + table_bytes(paged, schedule)
        + loaded,
        source=f"{PAPER}: every page once per block, and its number",
    )
    local_bytes = footprint(paged, schedule, chip).local_bytes
    write = written_form(paged, schedule, (packed.q, paged.head_dim), local_bytes, "d")
    return (flops, write) if paged.scaled else (flops, fill, write)


def table_bytes(problem: Attention, schedule: Schedule) -> int:
    """Bytes of the sectors that all blocks load of the page table."""
    paged = require_pages(problem)
    n, chunk, splits = schedule.tile[1], key_chunk(paged, schedule), max(1, schedule.splits)
    first, end = row_tile_spans(paged, *schedule.tile[:2])
    part = np.arange(splits, dtype=np.int64)[:, None]
    tile0 = np.maximum(first[None, :], part * chunk)
    tile_end = np.minimum(end[None, :], (part + 1) * chunk)
    low = tile0 * n // paged.page_size
    high = -(-np.minimum(tile_end * n, paged.seqlen_k) // paged.page_size)
    some = tile_end > tile0  # other blocks have no key of their own
    first_page = np.arange(paged.batch, dtype=np.int64)[:, None] * paged.pages + low[some]
    loaded = run_bytes(first_page * INDEX_BYTES, (high - low)[some] * INDEX_BYTES)
    return loaded * paged.kv_heads
