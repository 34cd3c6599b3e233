"""Fill y = 1: writes only, which shows how much a cache keeps dirty before it writes back.

    for each block of the buffer (parallel):
        store it

As `copy` without its reads. On a TPU the flat buffer is a matrix as wide as a window, and a block
is one grid step.
"""

from __future__ import annotations

from iosim.chip import Chip
from iosim.emit import block_program
from iosim.kernels.streams import (
    box_of,
    move_forms,
    move_launch,
    require_stream,
    store_block,
    window_schedule,
)
from iosim.launch import ClosedForm, Kernel, Launch
from iosim.problem import Problem, Schedule, Stream

Y = 0
REGISTERS = 16  # Triton 3.6, rows fill of the counters
VALUE = 1.0


@block_program
def fill(block, first, last, p, out, tensors):
    """The one step of a block; the tensor y is [rows, columns], on a GPU one row."""
    n = store_block(out, 0, Y, p.y, block, p)
    if tensors is not None:
        start, count, _, _ = box_of(block, p)
        for i in range(start, start + count):
            tensors[0][i // p.columns, i % p.columns] = VALUE
    return n, True


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per window of the buffer."""
    stream = require_stream(problem)
    return (move_launch(stream, schedule, chip, "fill", fill, {"Y": "out"}, REGISTERS),)


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Every byte written once; more where a masked store goes out in pieces."""
    stream = require_stream(problem)
    return move_forms(stream, schedule, chip, reads=False)


KERNEL = Kernel(
    name="fill",
    summary="Fill of a buffer: writes every byte once and reads none",
    problem=Stream,
    loops="parallel over blocks of the buffer: store",
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
