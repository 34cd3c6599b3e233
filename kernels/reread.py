"""Reread: the same bytes again and again, which shows what each cache holds and how it is shared.

    for each core (parallel):
        private: its own part of the buffer, `reps` times  |  shared: the whole buffer, once
            load the next 4096 elements;  add them up
        store the 4096 sums

Shared: core p of P starts at p / P of the buffer and wraps round at its end. The buffer is cut to a
multiple of P blocks. GPUs only.

The loop is not software-pipelined (its loads are no asynchronous copies), so that it has one stage:
every load waits for the addition before it. Hardware may run a few loads ahead: one stage is the
least that it must do.

Per element a step adds, converts to fp32, and takes the 64-bit remainder by which reads wrap round.
What that comes to was measured, not counted: 11 operations make the cycles of the rows reread of
the counters come out, of those that hit the L2 (shared) and of those that miss it (private) alike.
"""

from __future__ import annotations

import numpy as np

from iosim.chip import Chip
from iosim.emit import block_program, load, store, vector
from iosim.errors import RequestError
from iosim.kernels.streams import (
    block_elements,
    footprint,
    operand,
    parameters,
    require_stream,
)
from iosim.launch import ClosedForm, Kernel, Launch
from iosim.memory.layout import addresses
from iosim.problem import Problem, Schedule, Stream
from iosim.traffic import Work

X, Y = range(2)
SUM_BYTES = 4  # sums are fp32
OPS = 11  # per element; measured, see above
REGISTERS = {"private": 40, "shared": 42}  # Triton 3.6, rows reread of the counters


@block_program
def reread(block, first, last, p, out, tensors):
    """Steps [first, last) of a block; tensors x [elements] and y [blocks, elements of a step]."""
    steps = p.reps * p.length // p.block
    n = 0
    if tensors is not None:
        sums = np.zeros(p.block)
    size = p.block * p.itemsize
    for step in range(first, min(last, steps)):
        start = (block * p.shift + step * p.block % p.length) % p.elements
        n = load(out, n, X, 0, step, p.x + start * p.itemsize, 1, size, size)
        n = vector(out, n, step, 1, p.block, OPS)
        if tensors is not None:
            for i in range(p.block):
                sums[i] += tensors[0][start + i]
    if last < steps:
        return n, False
    size = p.block * SUM_BYTES
    n = store(out, n, Y, 0, steps - 1, p.y + block * size, 1, size, size)
    if tensors is not None:
        for i in range(p.block):
            tensors[1][block, i] = sums[i]
    return n, True


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """Steps of 4096 elements, 8 warps."""
    return Schedule(tile=(4096,), stages=1, warps=8)


def sizes(problem: Stream, schedule: Schedule, chip: Chip) -> dict[str, int]:
    """The values of PARAMS that say who reads what. Raises RequestError for too short a buffer."""
    cores = chip.cores.count
    block = block_elements(problem, schedule, chip)
    elements = problem.elements // (cores * block) * cores * block
    if elements == 0:
        raise RequestError(
            f"reread needs at least {cores} cores × {block} = {cores * block} elements, "
            f"not {problem.elements}"
        )
    part = elements // cores
    if problem.mode == "private":
        return {"elements": elements, "shift": part, "length": part, "reps": problem.reps}
    return {"elements": elements, "shift": part, "length": elements, "reps": 1}


def launches(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[Launch, ...]:
    """One launch: a block per core."""
    stream = require_stream(problem)
    block, cores = block_elements(stream, schedule, chip), chip.cores.count
    values = sizes(stream, schedule, chip)
    itemsize = stream.bytes // stream.elements
    size, written = values["elements"] * itemsize, cores * block * SUM_BYTES
    where = addresses(size, written)
    params = parameters(stream, block, chip, {**values, "x": where[0], "y": where[1]})
    steps = values["reps"] * values["length"] // block
    return (
        Launch(
            name="reread",
            program=reread,
            params=params,
            blocks=cores,
            steps=steps,
            ops_per_step=2,
            ops_at_ends=1,
            operands=(
                operand("X", "in", where[0], size),
                operand("Y", "out", where[1], written),
            ),
            footprint=footprint(
                schedule, chip, shared_bytes=block * itemsize, registers=REGISTERS[stream.mode]
            ),
            work=Work(issued_vector_ops=cores * steps * block * OPS),
            dtype=stream.dtype,
            stages=schedule.stages,
        ),
    )


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Bytes that leave the cores; bytes that arrive, where L1 holds all or nothing of them.

    A core sweeps its part in the same order again and again: with LRU nothing of it is left if the
    part is greater than L1 by one line of every set.
    """
    stream = require_stream(problem)
    values = sizes(stream, schedule, chip)
    written = chip.cores.count * block_elements(stream, schedule, chip) * SUM_BYTES
    forms = [
        ClosedForm(
            quantity="l1_write_bytes",
            formula="cores · elements of a step · 4",
            value=written,
            source="every core stores its sums once",
        )
    ]
    l1, itemsize = chip.levels["l1"], stream.bytes // stream.elements
    too_much = l1.capacity_bytes + l1.capacity_bytes // l1.ways
    if values["reps"] == 1 or values["length"] * itemsize >= too_much:
        forms.append(
            ClosedForm(
                quantity="l1_fill_bytes",
                formula="cores · elements that a core reads · bytes",
                value=chip.cores.count * values["reps"] * values["length"] * itemsize,
                source="Mattson et al. 1970: reuse distance above the capacity of an LRU cache",
            )
        )
    return tuple(forms)


KERNEL = Kernel(
    name="reread",
    summary="Reads that come back: every core its own part, or all cores the whole buffer",
    problem=Stream,
    loops="parallel over cores; inside, over repetitions and blocks of the buffer: load, add",
    machines=("gpu",),
    parameters={
        "mode": "private: every core its own part; shared: every core the whole buffer",
        "reps": "how often a core reads its part (private)",
        "tile": "elements of a step, a power of two",
    },
    default_schedule=default_schedule,
    launches=launches,
    closed_forms=closed_forms,
    sources=("Mattson et al., Evaluation techniques for storage hierarchies, 1970",),
    sketch=(Stream(elements=132 * 64 * 2, reps=2), Schedule(tile=(64,), stages=1, warps=4)),
)
