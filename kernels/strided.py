"""Strided sums: every stride-th element is read, which shows in what grain memory answers.

    for each block of elements (parallel):
        load them, `stride` apart;  store their sum

The sum is one element of the buffer's dtype. Loads go through L1: a sector that several elements
share arrives once. GPUs only: a window of a TPU has no stride between elements.
"""

from __future__ import annotations

from iosim.chip import Chip
from iosim.emit import block_program, load, store, vector
from iosim.kernels.streams import (
    block_elements,
    footprint,
    operand,
    parameters,
    require_stream,
    whole_sectors,
)
from iosim.launch import ClosedForm, Kernel, Launch
from iosim.memory.layout import addresses
from iosim.ops import ELEMENTWISE
from iosim.problem import Problem, Schedule, Stream, tiles
from iosim.traffic import Work
from iosim.units import SECTOR_BYTES

X, Y = range(2)
REGISTERS, REGISTERS_DENSE = 28, 16  # Triton 3.6, rows strided of the counters; dense: stride 1
PARTIAL_BYTES = 4  # shared memory: the fp32 sum of each warp


@block_program
def strided(block, first, last, p, out, tensors):
    """The one step of a block; tensors x [elements · stride] and y [blocks]."""
    start = block * p.block
    count = min(p.block, p.elements - start)
    pitch = p.stride * p.itemsize
    n = load(out, 0, X, ELEMENTWISE, 0, p.x + start * pitch, count, p.itemsize, pitch)
    n = vector(out, n, 0, 1, p.block, 1)
    n = store(out, n, Y, 0, 0, p.y + block * p.itemsize, 1, p.itemsize, p.itemsize)
    if tensors is not None:
        total = 0.0
        for i in range(start, start + count):
            total += tensors[0][i * p.stride]
        tensors[1][block] = total
    return n, True


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """1024 elements and 4 warps a block."""
    return Schedule(tile=(1024,), stages=1, warps=4)


def touched_bytes(problem: Stream) -> int:
    """Whole sectors that hold an element: one for each where they lie a sector or more apart."""
    itemsize = problem.bytes // problem.elements
    pitch = problem.stride * itemsize
    if pitch >= SECTOR_BYTES:
        return problem.elements * SECTOR_BYTES
    return whole_sectors((problem.elements - 1) * pitch + itemsize)


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per 1024 elements."""
    stream = require_stream(problem)
    block = block_elements(stream, schedule, chip)
    blocks = tiles(stream.elements, block)
    size = stream.bytes * stream.stride
    written = blocks * (stream.bytes // stream.elements)
    where = addresses(size, written)
    dense = stream.stride == 1
    return (
        Launch(
            name="strided",
            program=strided,
            params=parameters(stream, block, chip, {"x": where[0], "y": where[1]}),
            blocks=blocks,
            steps=1,
            ops_per_step=2,
            ops_at_ends=1,
            operands=(
                operand("X", "in", where[0], size, min(size, touched_bytes(stream))),
                operand("Y", "out", where[1], written),
            ),
            footprint=footprint(
                schedule,
                chip,
                shared_bytes=schedule.warps * PARTIAL_BYTES,
                registers=REGISTERS_DENSE if dense else REGISTERS,
            ),
            work=Work(issued_vector_ops=blocks * block),
            dtype=stream.dtype,
            stages=schedule.stages,
        ),
    )


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Sectors that arrive: each that holds an element once; sectors that leave: one a block."""
    stream = require_stream(problem)
    blocks = tiles(stream.elements, block_elements(stream, schedule, chip))
    source = "Nsight Compute documentation, memory tables: a sector is the least that moves"
    return (
        ClosedForm(
            quantity="l1_fill_bytes",
            formula=f"elements · min(stride · bytes, {SECTOR_BYTES}), in sectors",
            value=touched_bytes(stream),
            source=source,
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"blocks · {SECTOR_BYTES}",
            value=blocks * SECTOR_BYTES,
            source=source,
        ),
    )


KERNEL = Kernel(
    name="strided",
    summary="Sums of every stride-th element: what one lone element costs at each level",
    problem=Stream,
    loops="parallel over blocks of elements: load with a stride, sum, store one element",
    machines=("gpu",),
    parameters={
        "stride": "elements between two that are read",
        "tile": "elements of a block, a power of two",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("Nsight Compute documentation, memory tables",),
    sketch=(Stream(elements=512, stride=4), Schedule(tile=(64,), stages=1, warps=4)),
)
