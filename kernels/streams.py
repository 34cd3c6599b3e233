"""What the kernels beside attention share: blocks of a flat buffer, footprints, sectors of boxes.

Not an algorithm: those stand one per file beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.emit import inline, store
from iosim.errors import RequestError
from iosim.launch import BlockProgram, ClosedForm, Footprint, Launch, Operand
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.ops import ELEMENTWISE, WINDOW
from iosim.problem import Problem, Schedule, Stream, tiles
from iosim.traffic import Work
from iosim.units import SECTOR_BYTES, ceil_div, dtype_bytes, round_up

Numbers = NDArray[np.int64]
LENGTH_FACTOR = 16  # a compiler knows that a length is aligned where it divides by this
RUN_BYTES = 16  # what one thread stores: at once where aligned, else element by element

PARAMS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "elements", "block", "itemsize", "x", "y",
            "grid", "padded", "columns", "pieces",
            "stride", "shift", "length", "reps",
        )
    ]
)  # fmt: skip


@inline
def box_of(block, p):
    """(first element, elements, rows, bytes of a row) of a block: one row of a GPU's buffer."""
    start = block * p.block
    moved = min(p.block, p.padded - start)
    rows = moved // p.columns if p.grid else 1
    return start, min(p.block, p.elements - start), rows, moved // rows * p.itemsize


@inline
def store_block(out, n, tensor, base, block, p):
    """The store of a block of the buffer at `base`, in pieces where a GPU's mask is unaligned."""
    start, count, rows, row_bytes = box_of(block, p)
    at = base + start * p.itemsize
    if p.pieces == 1:
        flags = WINDOW if p.grid else 0
        return store(out, n, tensor, flags, 0, at, rows, row_bytes, row_bytes)
    for piece in range(min(p.pieces, count)):
        rows = (count - 1 - piece) // p.pieces + 1
        where = at + piece * p.itemsize
        n = store(out, n, tensor, ELEMENTWISE, 0, where, rows, p.itemsize, RUN_BYTES)
    return n


def require_stream(problem: Problem) -> Stream:
    """`problem` as a Stream. Raises RequestError for another kind."""
    if not isinstance(problem, Stream):
        raise RequestError(f"a stream kernel needs a stream problem, not {problem}")
    return problem


def register_tile(chip: Chip, itemsize: int) -> tuple[int, int]:
    """Rows and columns that the last two dimensions of a window are multiples of (1 on a GPU)."""
    least = matrix(chip, 1, 1, 1, itemsize)
    return least.rows, least.row_bytes // itemsize


def window_schedule(problem: Problem, chip: Chip) -> Schedule:
    """Copy and fill: 4096 elements and 8 warps on a GPU, windows of 512 × 1024 on a TPU."""
    stream = require_stream(problem)
    if chip.grid is None:
        return Schedule(tile=(4096,), stages=1, warps=8)
    rows, _ = register_tile(chip, dtype_bytes(stream.dtype))
    return Schedule(
        tile=(min(512, round_up(ceil_div(stream.elements, 1024), rows)), 1024), stages=2
    )


def block_elements(problem: Stream, schedule: Schedule, chip: Chip) -> int:
    """Elements of one block: the product of `schedule.tile`.

    A GPU's block is a power of two from 32 on (the kernels index with `arange`), so that blocks
    begin at sectors; a TPU's window is rows × columns of whole register tiles. Raises RequestError.
    """
    size = math.prod(schedule.tile)
    if chip.grid is None:
        if size < SECTOR_BYTES or size & (size - 1):
            raise RequestError(
                f"a block must hold a power of two of elements from {SECTOR_BYTES} on, not {size}"
            )
        return size
    rows, lanes = register_tile(chip, dtype_bytes(problem.dtype))
    if len(schedule.tile) != 2 or schedule.tile[0] % rows or schedule.tile[1] % lanes:
        text = "x".join(map(str, schedule.tile))
        raise RequestError(f"a window needs multiples of {rows} rows × {lanes} columns, not {text}")
    return size


def buffer(problem: Stream, schedule: Schedule, chip: Chip) -> Matrix:
    """The buffer in memory: flat on a GPU; padded rows of the width of a window on a TPU."""
    size = dtype_bytes(problem.dtype)
    if chip.grid is None:
        return matrix(chip, 1, 1, problem.elements, size)
    columns = schedule.tile[-1]
    return matrix(chip, 1, ceil_div(problem.elements, columns), columns, size)


def store_pieces(problem: Stream, chip: Chip) -> int:
    """Stores that the masked store of a block becomes on a GPU: 1 where the length is aligned.

    Where the compiler cannot prove that (the length is no multiple of 16), a thread stores its run
    of 16 bytes element by element: 8 stores of 2-byte elements, each of which touches every sector
    of the block. On the chip some of them merge on their way: 5.95 times the bytes were measured
    (`copy-odd` of the counters), so that writes towards L2 come out a third too high here.
    """
    if chip.grid is not None or problem.elements % LENGTH_FACTOR == 0:
        return 1
    return RUN_BYTES // dtype_bytes(problem.dtype)


def move_launch(
    stream: Stream,
    schedule: Schedule,
    chip: Chip,
    name: str,
    program: BlockProgram,
    roles: Mapping[str, str],
    registers: int,
) -> Launch:
    """A launch with a block per window of the buffer and operands X, Y of the given roles."""
    block = block_elements(stream, schedule, chip)
    lies = buffer(stream, schedule, chip)
    where = dict(zip(roles, addresses(*[lies.size_bytes] * len(roles)), strict=True))
    itemsize = dtype_bytes(stream.dtype)
    values = {
        **{key.lower(): address for key, address in where.items()},
        "padded": lies.size_bytes // itemsize,
        "columns": lies.row_bytes // itemsize,
    }
    return Launch(
        name=name,
        program=program,
        params=parameters(stream, block, chip, values),
        blocks=tiles(stream.elements, block),
        steps=1,
        ops_per_step=1,
        ops_at_ends=store_pieces(stream, chip) + len(roles) - 2,
        operands=tuple(operand(key, roles[key], where[key], lies.size_bytes) for key in roles),
        footprint=footprint(
            schedule,
            chip,
            shared_bytes=0,
            registers=registers,
            window_bytes=len(roles) * block * itemsize,
        ),
        work=Work(),
        dtype=stream.dtype,
        stages=schedule.stages,
    )


def store_sectors(problem: Stream, block: int, pieces: int) -> int:
    """Sectors of a GPU's stores of a whole buffer, each piece of each block by itself."""
    size = dtype_bytes(problem.dtype)
    full, rest = divmod(problem.elements, block)
    sectors = full * pieces * (block * size // SECTOR_BYTES)
    for piece in range(min(pieces, rest)):
        last = piece + (rest - 1 - piece) // pieces * pieces
        sectors += (last * size + size - 1) // SECTOR_BYTES + 1
    return sectors


def whole_sectors(size_bytes: int) -> int:
    """`size_bytes` rounded up to sectors."""
    return round_up(size_bytes, SECTOR_BYTES)


def run_bytes(start: Numbers, size: Numbers) -> int:
    """Bytes of the sectors that runs of `size` bytes from `start` touch, counted for each run."""
    first, last = start // SECTOR_BYTES, (start + size - 1) // SECTOR_BYTES
    return int((last - first + 1).sum()) * SECTOR_BYTES


def tile_sectors(rows: int, pitch_bytes: int, tile_rows: int, tile_bytes: int) -> int:
    """Sectors of all boxes of tile_rows × tile_bytes that a row-major matrix is cut into.

    A sector counts once for each box that touches it; the matrix begins at a sector.
    """
    if pitch_bytes % SECTOR_BYTES == 0 and tile_bytes % SECTOR_BYTES == 0:
        return rows * pitch_bytes // SECTOR_BYTES
    starts = np.arange(rows, dtype=np.int64) * pitch_bytes
    same_box = np.arange(1, rows) % tile_rows != 0
    sectors = 0
    for left in range(0, pitch_bytes, tile_bytes):
        right = min(left + tile_bytes, pitch_bytes)
        first = (starts + left) // SECTOR_BYTES
        last = (starts + right - 1) // SECTOR_BYTES
        shared = (last[:-1] == first[1:]) & same_box
        sectors += int((last - first + 1).sum() - shared.sum())
    return sectors


def move_forms(
    problem: Stream, schedule: Schedule, chip: Chip, *, reads: bool
) -> tuple[ClosedForm, ...]:
    """Bytes of a kernel that writes a buffer once and, if `reads`, reads one of the same size."""
    if chip.grid is not None:
        read = written = buffer(problem, schedule, chip).size_bytes
        names, formula, pieces = ("vmem_fill_bytes", "vmem_drain_bytes"), "padded elements", 1
    else:
        pieces = store_pieces(problem, chip)
        read = whole_sectors(problem.bytes)
        written = store_sectors(problem, math.prod(schedule.tile), pieces) * SECTOR_BYTES
        names, formula = ("l1_fill_bytes", "l1_write_bytes"), "elements"
    source = "McCalpin, STREAM: a copy counts each byte read and each byte written once"
    times = f"{pieces} · " if pieces > 1 else ""
    forms = (
        ClosedForm(
            quantity=names[0],
            formula=f"{formula} · bytes",
            value=read,
            source=source,
        ),
        ClosedForm(
            quantity=names[1],
            formula=f"{times}{formula} · bytes",
            value=written,
            source=f"{source}; a thread stores its run in pieces" if times else source,
        ),
    )
    return forms if reads else forms[1:]


def footprint(
    schedule: Schedule, chip: Chip, *, shared_bytes: int, registers: int, window_bytes: int = 0
) -> Footprint:
    """What a block takes: shared memory and registers on a GPU, buffers of each window on a TPU.

    `registers` is what Triton 3.6 reports for the kernel; the schedule's own number wins.
    """
    if chip.grid is not None:
        return Footprint(window_bytes=chip.grid.window_buffers * window_bytes)
    assert chip.limits is not None
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared_bytes,
        registers=schedule.registers or registers,
        threads=schedule.warps * chip.limits.threads_per_warp,
    )


def operand(name: str, role: str, address: int, size_bytes: int, unique_bytes: int = 0) -> Operand:
    """An operand of which `unique_bytes` (default: all) have to be moved."""
    return Operand(
        name=name,
        role=role,
        address=address,
        size_bytes=size_bytes,
        unique_bytes=unique_bytes or size_bytes,
    )


def parameters(problem: Stream, block: int, chip: Chip, values: Mapping[str, int]) -> Any:
    """The record of PARAMS that a stream's block program reads; `values` adds its own."""
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    common = {
        "elements": problem.elements,
        "block": block,
        "itemsize": dtype_bytes(problem.dtype),
        "grid": int(chip.grid is not None),
        "pieces": store_pieces(problem, chip),
        "stride": problem.stride,
        "reps": problem.reps,
    }
    for name, value in {**common, **values}.items():
        record[name] = value
    return record[0]
