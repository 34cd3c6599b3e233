"""Copy y = x: the plainest kernel there is, and the measure of what memory sustains.

    for each block of the buffer (parallel):
        load it;  store it

As `copy` of STREAM (McCalpin) in the form of a Triton kernel with a mask. On a TPU the flat buffer
is a matrix as wide as a window, and a block is one grid step.
"""

from __future__ import annotations

from iosim.chip import Chip
from iosim.emit import block_program, load
from iosim.kernels.streams import (
    box_of,
    move_forms,
    move_launch,
    require_stream,
    store_block,
    store_pieces,
    window_schedule,
)
from iosim.launch import ClosedForm, Kernel, Launch
from iosim.ops import WINDOW
from iosim.problem import Problem, Schedule, Stream

X, Y = range(2)
REGISTERS, REGISTERS_IN_PIECES = 18, 64  # Triton 3.6, rows copy and copy-odd of the counters


@block_program
def copy(block, first, last, p, out, tensors):
    """The one step of a block; tensors x and y are [rows, columns], on a GPU one row."""
    start, count, rows, row_bytes = box_of(block, p)
    at = p.x + start * p.itemsize
    n = load(out, 0, X, WINDOW if p.grid else 0, 0, at, rows, row_bytes, row_bytes)
    n = store_block(out, n, Y, p.y, block, p)
    if tensors is not None:
        x, y = tensors[0], tensors[1]
        for i in range(start, start + count):
            y[i // p.columns, i % p.columns] = x[i // p.columns, i % p.columns]
    return n, True


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per window of the buffer."""
    stream = require_stream(problem)
    registers = REGISTERS if store_pieces(stream, chip) == 1 else REGISTERS_IN_PIECES
    operands = {"X": "in", "Y": "out"}
    return (move_launch(stream, schedule, chip, "copy", copy, operands, registers),)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Every byte once each way; more where a masked store goes out in pieces."""
    stream = require_stream(problem)
    return move_forms(stream, schedule, chip, reads=True)


KERNEL = Kernel(
    name="copy",
    summary="Copy of a buffer: reads and writes every byte once",
    problem=Stream,
    loops="parallel over blocks of the buffer: load, store",
    machines=("gpu", "tpu"),
    parameters={
        "tile": "elements of a block, a power of two (TPU: rows × columns of a window)",
        "elements": "a length that is no multiple of 16 multiplies a GPU's stores",
    },
    default_schedule=window_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("McCalpin, STREAM",),
    sketch=(Stream(elements=512), Schedule(tile=(64,), stages=1, warps=4)),
)
