"""Runs the grid of a launch on a chip with software-managed memory (TPU).

Grid steps run in order. An input window is fetched when its block differs from that of the step
before; an output window is written back when the next step writes another one, and at the end.
Nothing adds in memory: what is added to is fetched like an input and written back like an output.
Cores of one program take contiguous shares of the blocks, each with windows of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.engine.counts import Counts
from iosim.jit import jit
from iosim.launch import Launch, require_fit
from iosim.ops import ATOMIC, LOAD, OP_DTYPE, STORE, WINDOW
from iosim.traffic import OperandTraffic, Traffic

READ, WRITTEN, FETCHES = range(3)  # columns of the tally
ADDRESS, PENDING_BYTES, PENDING_TENSOR = range(3)  # columns of a window
_SLOTS = 64
_TENSORS = 64
_CHUNK_OPS = 4096


@jit
def replay_windows(ops, count, windows, tally):
    """Moves the windows of `count` operations; `windows` keeps what each slot holds."""
    for i in range(count):
        op = ops[i]
        if op.kind != LOAD and op.kind != STORE and op.kind != ATOMIC:
            continue
        size = np.int64(op.rows) * op.row_bytes
        reads, writes = op.kind != STORE, op.kind != LOAD
        if not op.flags & WINDOW:
            tally[op.tensor, READ] += size * reads
            tally[op.tensor, WRITTEN] += size * writes
            continue
        window = windows[op.slot]
        if window[ADDRESS] == op.address:
            continue
        if window[PENDING_BYTES] > 0:
            tally[window[PENDING_TENSOR], WRITTEN] += window[PENDING_BYTES]
            window[PENDING_BYTES] = 0
        window[ADDRESS] = op.address
        tally[op.tensor, READ] += size * reads
        tally[op.tensor, FETCHES] += reads
        if writes:
            window[PENDING_BYTES] = size
            window[PENDING_TENSOR] = op.tensor


def run_grid(launch: Launch, chip: Chip, on_chip: frozenset[str] = frozenset()) -> Counts:
    """Runs one launch; operands named in `on_chip` live in CMEM instead of HBM.

    Raises DoesNotFitError where the windows do not fit the scoped VMEM limit.
    """
    require_fit(launch, chip)
    tally = np.zeros((_TENSORS, 3), dtype=np.int64)
    for share in np.array_split(np.arange(launch.blocks), chip.cores_used):
        _run_share(launch, share, tally)
    operands = {
        operand.name: OperandTraffic(
            dram_read_bytes=0 if operand.name in on_chip else int(row[READ]),
            dram_write_bytes=0 if operand.name in on_chip else int(row[WRITTEN]),
            vmem_fill_bytes=int(row[READ]),
            vmem_drain_bytes=int(row[WRITTEN]),
            fetches=int(row[FETCHES]),
            unique_bytes=operand.unique_bytes,
        )
        for operand, row in zip(launch.operands, tally, strict=False)
        if operand.size_bytes
    }
    total = sum(operands.values(), OperandTraffic())
    traffic = Traffic(
        dram_read_bytes=total.dram_read_bytes,
        dram_write_bytes=total.dram_write_bytes,
        cmem_read_bytes=total.vmem_fill_bytes - total.dram_read_bytes,
        cmem_write_bytes=total.vmem_drain_bytes - total.dram_write_bytes,
        vmem_fill_bytes=total.vmem_fill_bytes,
        vmem_drain_bytes=total.vmem_drain_bytes,
    )
    return Counts(traffic=traffic, operands=operands, makespan_cycles=None)


def _run_share(launch: Launch, blocks: NDArray[np.int64], tally: NDArray[np.int64]) -> None:
    """One core: its blocks in order, then the last output windows."""
    chunk = max(1, min(launch.steps, _CHUNK_OPS // launch.ops_per_step))
    ops = np.zeros(chunk * launch.ops_per_step + launch.ops_at_ends, dtype=OP_DTYPE)
    windows = np.full((_SLOTS, 3), -1, dtype=np.int64)
    for block in blocks.tolist():
        first, done = 0, False
        while not done:
            count, done = launch.program(block, first, first + chunk, launch.params, ops, None)
            replay_windows(ops, count, windows, tally)
            first += chunk
    for _, size, tensor in windows[windows[:, PENDING_BYTES] > 0].tolist():
        tally[tensor, WRITTEN] += size
