"""What the kernels on rows share: how rows are cut into blocks, where they are kept, parameters.

Not an algorithm: those stand one per file beside this one. A block owns `tile[0]` rows. It either
keeps them on chip and reads them once, or streams them twice in chunks of `tile[1]` columns: once
for the statistics of the row, once for the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.jit import inline, numeric
from iosim.kernels.attention import STATISTIC_BYTES, first_fit, spilled_bytes
from iosim.kernels.rounding import FORMATS
from iosim.kernels.streams import tile_sectors
from iosim.launch import Footprint
from iosim.memory.layout import Matrix, matrix
from iosim.ops import L1_BYPASS, WINDOW
from iosim.problem import Problem, Rows, Schedule, tiles
from iosim.units import SECTOR_BYTES, ceil_div, dtype_bytes, round_up

ONE_PASS = "one-pass"
DTYPES = ("fp32", "fp16", "bf16")
WARP_ROW = 2048  # the longest row that one warp takes (PyTorch, PersistentSoftmax.cuh)
WARP_ROWS = 4  # rows of such a block
BLOCK_WARPS = 32  # a block that takes one longer row
#: values of a row in registers of a thread: at most, and other registers beside them; for rows that
#: a warp has to itself (2048 columns and fewer) and for rows of a whole block (16384 and fewer)
WARP_REGISTERS = (64, 16)
BLOCK_REGISTERS = (16, 28)
VECTOR_BYTES = 16  # what one thread loads at once
WINDOW_ROWS = 512  # rows of a TPU's window that are asked for first

_FIELDS = (
    "rows", "cols", "tile_m", "tile_n", "chunks", "reads", "flags", "once", "itemsize",
    "padded_rows", "row_bytes", "x", "y",
    "digits", "least_exponent",
)  # fmt: skip


@inline
def rows_of(block, p):
    """(first row, rows of the problem, rows of the box with its padding) of a block."""
    row0 = block * p.tile_m
    return row0, min(p.tile_m, p.rows - row0), min(p.tile_m, p.padded_rows - row0)


@inline
def chunk_of(step, p):
    """(first column, columns, bytes before it in a row, bytes of it) of the chunk of a step."""
    col0 = step % p.chunks * p.tile_n
    left = col0 * p.itemsize
    return col0, min(p.tile_n, p.cols - col0), left, min(p.tile_n * p.itemsize, p.row_bytes - left)


@numeric
def fetch_chunk(tensor, row0, rows, col0, cols):
    """Copies a box of the matrix onto the chip."""
    tile = np.empty((rows, cols))
    for r in range(rows):
        for c in range(cols):
            tile[r, c] = tensor[0, row0 + r, col0 + c]
    return tile


def require_rows(problem: Problem) -> Rows:
    """`problem` as Rows. Raises RequestError for another kind, or a dtype that is not computed."""
    if not isinstance(problem, Rows):
        raise RequestError(f"a kernel on rows needs rows × columns, not {problem}")
    if problem.dtype not in DTYPES:
        raise RequestError(f"rows must be of {', '.join(DTYPES)}, not {problem.dtype}")
    return problem


def layout(problem: Rows, chip: Chip) -> Matrix:
    """The matrix in memory, padded to register tiles on a TPU."""
    return matrix(chip, 1, problem.rows, problem.cols, dtype_bytes(problem.dtype))


def require_tile(problem: Rows, schedule: Schedule, chip: Chip) -> tuple[int, int]:
    """(rows of a block, columns of a chunk): all columns where the rows stay on chip.

    A TPU's windows are whole register tiles. Raises RequestError for a tile that cannot be.
    """
    if len(schedule.tile) != 2:
        raise RequestError("rows need a tile of rows × columns, such as 4x1024")
    m, n = schedule.tile
    if chip.grid is not None:
        least, lanes = packed_rows(problem, chip), chip.grid.lanes
        if m % least or (n % lanes and n < problem.cols):
            raise RequestError(
                f"{chip.name} needs a tile of multiples of {least} rows × {lanes} columns, "
                f"not {m}x{n}"
            )
    if schedule.variant == ONE_PASS or n >= problem.cols:
        n = layout(problem, chip).row_bytes // dtype_bytes(problem.dtype)
    return m, n


def packed_rows(problem: Rows, chip: Chip) -> int:
    """Rows that a TPU's window is a multiple of: 8 of 32-bit types, 16 of 16-bit ones."""
    return matrix(chip, 1, 1, 1, dtype_bytes(problem.dtype)).rows


def reads_of(schedule: Schedule) -> int:
    """How often a block reads its rows."""
    return 1 if schedule.variant == ONE_PASS else 2


def row_cut(cols: int) -> tuple[int, int]:
    """(rows, warps) of a GPU's block, as PyTorch cuts the rows of a softmax.

    Four rows with a warp for each up to 2048 columns, then one row for 32 warps.
    """
    return (WARP_ROWS, WARP_ROWS) if cols <= WARP_ROW else (1, BLOCK_WARPS)


def kept(rows: int, cols: int, warps: int, itemsize: int, chip: Chip) -> Footprint:
    """What a GPU's block takes to keep rows × cols elements on chip.

    In registers, as fp32, while a thread has few enough of them; else in shared memory, as they
    are stored. Beside the values Nsight Compute shows 16 registers for a warp's row of 1024 and
    2048 columns, 26 to 29 for a block's row of 4096 and 8192.
    """
    assert chip.limits is not None
    threads = warps * chip.limits.threads_per_warp
    most, others = WARP_REGISTERS if rows >= warps else BLOCK_REGISTERS
    values = ceil_div(rows * cols, threads)
    if values <= most:
        return Footprint(registers=values + others, threads=threads)
    return Footprint(shared_bytes=rows * cols * itemsize, registers=32, threads=threads)


def gpu_footprint(problem: Rows, schedule: Schedule, chip: Chip) -> Footprint:
    """Rows or chunks as `kept` keeps them; chunks in flight (stages > 1) in shared memory."""
    assert chip.limits is not None
    m, n = require_tile(problem, schedule, chip)
    warps, itemsize = schedule.warps or row_cut(problem.cols)[1], dtype_bytes(problem.dtype)
    block = kept(m, n, warps, itemsize, chip)
    shared = block.shared_bytes
    if schedule.variant != ONE_PASS and schedule.stages > 1:
        shared = schedule.stages * m * n * itemsize
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        registers=schedule.registers or block.registers,
        threads=block.threads,
    )


def window_footprint(
    problem: Rows, schedule: Schedule, chip: Chip, column_bytes: int, row_bytes: int
) -> Footprint:
    """VMEM of a grid step: two of each window, two fp32 statistics of a row, an fp32 tile.

    Windows of x and y, and of `column_bytes` for every column and `row_bytes` for every row more.
    The statistics stay from chunk to chunk where rows are streamed.
    """
    assert chip.grid is not None
    m, n = require_tile(problem, schedule, chip)
    m = min(m, layout(problem, chip).rows)
    width = round_up(n, chip.grid.lanes)
    window = 2 * m * width * dtype_bytes(problem.dtype) + width * column_bytes + m * row_bytes
    streamed = schedule.variant != ONE_PASS
    return Footprint(
        window_bytes=chip.grid.window_buffers * window,
        scratch_bytes=2 * m * chip.grid.lanes * STATISTIC_BYTES * streamed,
        temporary_bytes=spilled_bytes(m * width, chip),
    )


def window_rows(problem: Rows, chip: Chip) -> list[int]:
    """Rows of a TPU's window, the number wanted most first, none beyond the problem."""
    least = packed_rows(problem, chip)
    rows = min(WINDOW_ROWS, round_up(problem.rows, least))
    found = [rows]
    while rows > least:
        rows = round_up(rows // 2, least)
        found.append(rows)
    return found


def choose(
    problem: Rows,
    chip: Chip,
    streamed: Schedule,
    footprint: Callable[[Problem, Schedule, Chip], Footprint],
) -> Schedule:
    """One pass where rows fit on chip, else `streamed`; on a TPU the largest windows that fit.

    `footprint` is the kernel's own.
    """
    if chip.grid is None:
        rows, warps = row_cut(problem.cols)
        tile = (rows, problem.cols)
        choices = [Schedule(tile=tile, stages=1, warps=warps, variant=ONE_PASS), streamed]
    else:
        whole = round_up(problem.cols, chip.grid.lanes)
        heights = window_rows(problem, chip)
        variants = ((ONE_PASS, whole), *((streamed.variant, n) for n in (2048, 512, 128)))
        choices = [
            Schedule(tile=(m, min(n, whole)), stages=2, variant=variant)
            for variant, n in variants
            for m in heights
        ]
    return first_fit(choices, lambda schedule: [footprint(problem, schedule, chip)], chip)


def steps_of(problem: Rows, schedule: Schedule, chip: Chip) -> int:
    """Steps of a block: one for every chunk of every read."""
    _, n = require_tile(problem, schedule, chip)
    return reads_of(schedule) * tiles(problem.cols, n)


def cells_of(problem: Rows, schedule: Schedule) -> int:
    """Elements that the blocks work on, rows beyond the last one included."""
    m = schedule.tile[0]
    return tiles(problem.rows, m) * m * problem.cols


def parameters(
    problem: Rows,
    schedule: Schedule,
    chip: Chip,
    values: Mapping[str, int],
    fields: Sequence[str] = (),
) -> Any:
    """The record that a block program on rows reads its sizes from.

    `values` adds addresses and what else is this kernel's own; `fields` are whole numbers that only
    this kernel has.
    """
    m, n = require_tile(problem, schedule, chip)
    lies, form = layout(problem, chip), FORMATS[problem.dtype]
    asynchronous = schedule.variant != ONE_PASS and schedule.stages > 1
    window = WINDOW if chip.grid is not None else 0
    common = {
        "rows": problem.rows,
        "cols": problem.cols,
        "tile_m": m,
        "tile_n": n,
        "chunks": tiles(problem.cols, n),
        "reads": reads_of(schedule),
        "flags": window or (L1_BYPASS if asynchronous else 0),
        "once": window,
        "itemsize": dtype_bytes(problem.dtype),
        "padded_rows": lies.rows,
        "row_bytes": lies.row_bytes,
        "digits": form.digits,
        "least_exponent": form.least,
        "largest": -form.largest if form.saturates else form.largest,
    }
    names = [(name, np.int64) for name in (*_FIELDS, *fields)]
    record = np.zeros(1, dtype=[*names, ("largest", np.float64)])
    for name, value in {**common, **values}.items():
        record[name] = value
    return record.view(np.recarray)[0]


def box_bytes(problem: Rows, schedule: Schedule, chip: Chip) -> int:
    """Bytes of all chunks of a GPU's matrix once, each in whole sectors."""
    m, n = require_tile(problem, schedule, chip)
    itemsize = dtype_bytes(problem.dtype)
    pitch = problem.cols * itemsize
    return tile_sectors(problem.rows, pitch, m, n * itemsize) * SECTOR_BYTES


def begins_at_sectors(problem: Rows, schedule: Schedule) -> bool:
    """Whether no two blocks of a GPU share a sector."""
    size = schedule.tile[0] * problem.cols * dtype_bytes(problem.dtype)
    return size % SECTOR_BYTES == 0 or schedule.tile[0] >= problem.rows


def window_reads(problem: Rows, schedule: Schedule, chip: Chip) -> int:
    """How often a grid fetches its matrix: a window that holds whole rows stays for both reads."""
    _, n = require_tile(problem, schedule, chip)
    return reads_of(schedule) if n < problem.cols else 1
