"""Writers of tile operations for block programs: each puts one record and returns the next index.

Called inside jitted block programs only. `block_program` compiles a program; it is called as
`emit(block, first, last, params, out, tensors)`: it writes the operations of steps [first, last)
into `out` (and what stands before step 0 and after the last step) and returns how many it wrote
and whether the block is done. With `tensors` it also computes; with None Numba prunes that branch.
"""

from __future__ import annotations

from iosim.jit import inline, numeric
from iosim.jit import program as block_program
from iosim.ops import ASYNC, BARRIER, EXP, LOAD, MATRIX, STORE, VECTOR

__all__ = [
    "async_matrix",
    "barrier",
    "block_program",
    "exps",
    "inline",
    "load",
    "matrix",
    "numeric",
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
