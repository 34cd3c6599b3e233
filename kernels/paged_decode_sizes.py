"""Paged decoding: pages and tiles, where the pool lies, what is moved by arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import STATISTIC_BYTES, local_operand, operand, require_attention
from iosim.kernels.combine import combine_bytes, scratch
from iosim.kernels.flash_decode_sizes import Memory, drained_form, footprint
from iosim.kernels.masks import seen
from iosim.kernels.packed import (
    Packed,
    key_chunk,
    keys_of_tiles,
    partial_sizes,
    row_tile_spans,
    statistic_sectors,
    visited_tiles,
)
from iosim.launch import ClosedForm, Operand
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.problem import Attention, Problem, Schedule
from iosim.problem_variants import PagedDecode
from iosim.units import SECTOR_BYTES, ceil_div, dtype_bytes

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
    """Q, the pools of K and V, partial outputs, scales, local memory, page table; O apart."""
    require_form(problem, schedule, chip)
    block = footprint(problem, schedule, chip)
    part, lse = partial_sizes(problem, schedule, problem.head_dim) if chip.grid is None else (0, 0)
    sizes = read_sizes(problem, chip)
    q, k, scale, table = (sizes[name] for name in ("Q", "K", "K_scale", "pages"))
    where = addresses(q, k, k, part, lse, scale, scale, block.local_bytes, table, q)
    result = operand("O", "out", where[9], q)
    partial = result if chip.grid else scratch("O_part", where[3], part)
    needed = needed_bytes(problem, chip)

    def read(name: str, at: int) -> Operand:
        size = sizes[name]
        unique = needed[name] if size else 0
        return Operand(name=name, role="in", address=at, size_bytes=size, unique_bytes=unique)

    operands = (
        *(read(name, at) for name, at in zip("QKV", where, strict=False)),
        partial,
        scratch("lse_part", where[4], lse),
        read("K_scale", where[5]),
        read("V_scale", where[6]),
        local_operand(block, where[7], chip),
        read("pages", where[8]),
    )
    names = ("q", "k", "v", "o", "lse", "k_scale", "v_scale", "local", "table")
    values = dict(zip(names, where, strict=False))
    values["o"] = partial.address
    values["spill_bytes"] = block.local_bytes
    values["k_rows"] = pool_of(problem, chip).rows
    values["scale_rows"] = int(problem.scaled)
    return Memory(operands=operands, result=result, values=values)


def read_sizes(problem: PagedDecode, chip: Chip) -> dict[str, int]:
    """Bytes of each operand that is read; the table is no operand of a grid."""
    pages = problem.batch * problem.pages
    pool = pool_of(problem, chip).size_bytes
    scale = pages * problem.page_size * problem.kv_heads * STATISTIC_BYTES * problem.scaled
    table = pages * INDEX_BYTES if chip.grid is None else 0
    q = Packed.of(problem, chip).q.size_bytes
    return {"Q": q, "K": pool, "V": pool, "K_scale": scale, "V_scale": scale, "pages": table}


def needed_bytes(problem: PagedDecode, chip: Chip) -> dict[str, int]:
    """Bytes of each operand that have to be read once: rows that see keys, keys that are seen."""
    rows, keys = seen(problem)
    packed = Packed.of(problem, chip)
    heads = problem.batch * problem.kv_heads
    k = heads * keys * pool_of(problem, chip).row_bytes
    scale = heads * keys * STATISTIC_BYTES
    return {
        "Q": packed.count * problem.group * rows * packed.q.row_bytes,
        "K": k,
        "V": k,
        "K_scale": scale,
        "V_scale": scale,
        "pages": problem.batch * ceil_div(keys, problem.page_size) * INDEX_BYTES,
    }


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
    loaded, written = combine_bytes(paged, splits, paged.head_dim, row)
    keys = 2 * keys_of_tiles(paged, schedule) * pool_of(paged, chip).row_bytes
    parts, _ = partial_sizes(paged, schedule, paged.head_dim)
    spilled = footprint(paged, schedule, chip).local_bytes * visited_tiles(paged, schedule)
    fill = ClosedForm(
        quantity="l1_fill_bytes",
        formula="splits · Q + KV heads · 2 · keys of visited tiles · d · bytes + page numbers, in "
        "sectors; then splits · heads · N · (d + 1) · 4",
        value=packed.count * (splits * packed.rows * row + keys)
        + table_sectors(paged, schedule)
        + loaded,
        source=f"{PAPER}: every page once per block, and its number",
    )
    write = ClosedForm(
        quantity="l1_write_bytes",
        formula="splits · heads · N · (d + 1) · 4, in sectors; then heads · N · d · bytes",
        value=parts + statistic_sectors(paged, schedule) + packed.count * spilled + written,
        source="Flash-Decoding, 2023: partial outputs in fp32, then O",
    )
    return (flops, write) if paged.scaled else (flops, fill, write)


def table_sectors(problem: Attention, schedule: Schedule) -> int:
    """Bytes of the sectors that all blocks load of the page table."""
    paged = require_pages(problem)
    n, chunk, splits = schedule.tile[1], key_chunk(paged, schedule), max(1, schedule.splits)
    first, end = row_tile_spans(paged, *schedule.tile[:2])
    part = np.arange(splits, dtype=np.int64)[:, None]
    tile0 = np.maximum(first[None, :], part * chunk)
    tile_end = np.minimum(end[None, :], (part + 1) * chunk)
    low = tile0 * n // paged.page_size
    high = -(-np.minimum(tile_end * n, paged.seqlen_k) // paged.page_size)
    total = 0
    for sequence in range(paged.batch):
        start = (sequence * paged.pages + low) * INDEX_BYTES // SECTOR_BYTES
        last = ((sequence * paged.pages + high) * INDEX_BYTES - 1) // SECTOR_BYTES
        total += int(np.where(tile_end > tile0, last - start + 1, 0).sum())
    return total * paged.kv_heads * SECTOR_BYTES
