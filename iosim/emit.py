"""Writers of tile operations for block programs: each puts one record and returns the next index.

Called inside jitted block programs only. `block_program` compiles a program; it is called as
`emit(block, first, last, params, out, tensors)`: it writes the operations of steps [first, last)
into `out` (and what stands before step 0 and after the last step) and returns how many it wrote
and whether the block is done. With `tensors` it also computes; with None Numba prunes that branch.
"""

from __future__ import annotations

from iosim.jit import inline, numeric
from iosim.jit import program as block_program
from iosim.ops import (
    ASYNC,
    ATOMIC,
    BARRIER,
    EXP,
    L1_BYPASS,
    LOAD,
    LOCAL,
    MATRIX,
    MULTICAST,
    STORE,
    VECTOR,
)

__all__ = [
    "async_matrix",
    "atomic",
    "barrier",
    "block_program",
    "exps",
    "inline",
    "load",
    "matrix",
    "move",
    "multicast",
    "numeric",
    "spill",
    "store",
    "vector",
]


@inline
def move(out, i, kind, tensor, flags, step, slot, address, rows, row_bytes, pitch_bytes):
    """A box of `rows` runs of `row_bytes`, `pitch_bytes` apart; `slot` names its window."""
    op = out[i]
    op.kind = kind
    op.tensor = tensor
    op.flags = flags
    op.step = step
    op.waits = step if kind != LOAD else -1
    op.slot = slot
    op.address = address
    op.rows = rows
    op.row_bytes = row_bytes
    op.pitch_bytes = pitch_bytes
    op.useful_bytes = rows * row_bytes
    op.source_line = 0
    return i + 1


@inline
def load(out, i, tensor, flags, step, address, rows, row_bytes, pitch_bytes):
    """A load of a box; its window is the operand's own."""
    return move(out, i, LOAD, tensor, flags, step, tensor, address, rows, row_bytes, pitch_bytes)


@inline
def store(out, i, tensor, flags, step, address, rows, row_bytes, pitch_bytes):
    """A store of a box, once everything that the block loaded before has arrived."""
    return move(out, i, STORE, tensor, flags, step, tensor, address, rows, row_bytes, pitch_bytes)


@inline
def atomic(out, i, tensor, flags, step, address, rows, row_bytes, pitch_bytes):
    """An addition to every element of a box, done in L2, of which nothing comes back."""
    return move(out, i, ATOMIC, tensor, flags, step, tensor, address, rows, row_bytes, pitch_bytes)


@inline
def multicast(out, i, tensor, step, address, rows, row_bytes, cores):
    """One core's share of a load that every one of the `cores` of its cluster receives."""
    flags = L1_BYPASS | MULTICAST
    return move(out, i, LOAD, tensor, flags, step, cores, address, rows, row_bytes, row_bytes)


@inline
def spill(out, i, tensor, step, address, size_bytes):
    """What does not stay in registers from step to step: loaded again and stored once more."""
    if size_bytes <= 0:
        return i
    if step > 0:
        i = move(out, i, LOAD, tensor, LOCAL, step, tensor, address, 1, size_bytes, size_bytes)
    return move(out, i, STORE, tensor, LOCAL, step, tensor, address, 1, size_bytes, size_bytes)


@inline
def compute(out, i, kind, step, m, n, k):
    """Work of one unit on what the loads of `step` and before brought."""
    op = out[i]
    op.kind = kind
    op.tensor = 0
    op.flags = 0
    op.step = step
    op.waits = step
    op.slot = 0
    op.address = 0
    op.rows = 0
    op.row_bytes = 0
    op.pitch_bytes = 0
    op.useful_bytes = 0
    op.m = m
    op.n = n
    op.k = k
    op.source_line = 0
    return i + 1


@inline
def matrix(out, i, step, m, n, k):
    """An m×n×k matrix product."""
    return compute(out, i, MATRIX, step, m, n, k)


@inline
def async_matrix(out, i, step, m, n, k):
    """A product that the program does not wait for: what follows it is issued at once."""
    after = compute(out, i, MATRIX, step, m, n, k)
    out[i].flags = ASYNC
    return after


@inline
def exps(out, i, step, m, n):
    """m×n exponentials."""
    return compute(out, i, EXP, step, m, n, 1)


@inline
def vector(out, i, step, m, n, k):
    """`k` elementwise operations on m×n elements."""
    return compute(out, i, VECTOR, step, m, n, k)


@inline
def barrier(out, i, step):
    """All that stands before is done before what comes after starts."""
    return compute(out, i, BARRIER, step, 0, 0, 0)
