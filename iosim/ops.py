"""Tile operations: the narrow waist between those who describe a kernel and those who read it.

One operation is one 64-byte record of `OP_DTYPE`. A block (a CTA on a GPU, a run of grid steps on
a TPU) is a list of them in program order. Addresses and lengths are bytes, so that a reader derives
lines, sectors and padding by itself.

| field | meaning |
|---|---|
| kind | LOAD, STORE, ATOMIC, MATRIX, EXP, VECTOR, BARRIER |
| tensor | index of the operand in the launch (memory operations) |
| flags | L1_BYPASS, WINDOW, FULL_SECTORS, ELEMENTWISE, LOCAL, MULTICAST; ASYNC for products |
| step | pipeline step: a load is issued once the step `stages` - 1 before it has ended |
| waits | the operation starts once all earlier loads of steps ≤ `waits` have arrived; -1: nothing |
| slot | WINDOW: which double-buffered window of the block; MULTICAST: how many cores receive it;
  compute: the warp group that does it |
| address, rows, row_bytes, pitch_bytes | the box: `rows` runs of `row_bytes`, `pitch_bytes` apart |
| useful_bytes | bytes of it that the algorithm asked for (the rest is padding or stride) |
| m, n, k | MATRIX: an m×n×k product; EXP, VECTOR: m×n elements, k operations on each |
| source_line | line of a captured kernel; 0 where there is none |
"""

from __future__ import annotations

import numpy as np

LOAD, STORE, ATOMIC, MATRIX, EXP, VECTOR, BARRIER = range(7)
KIND_NAMES = ("load", "store", "atomic", "matrix", "exp", "vector", "barrier")

L1_BYPASS = 1  # cp.async.cg, TMA: goes past L1
WINDOW = 2  # a block of a grid: fetched or written back only when its address changes
FULL_SECTORS = 4  # a store that is known to cover whole sectors
ELEMENTWISE = 8  # pitch is a stride between elements, not between rows of a tile
ASYNC = 16  # MATRIX: the program goes on while it runs; a step that ends in one ends as it begins
LOCAL = 32  # memory of threads (spilled registers): each resident block has its own, see launch.py
MULTICAST = 64  # one request to L2, `slot` cores of a cluster receive the box

OP_DTYPE = np.dtype(
    [
        ("kind", np.uint8),
        ("tensor", np.uint8),
        ("flags", np.uint16),
        ("step", np.int32),
        ("waits", np.int32),
        ("slot", np.int32),
        ("address", np.int64),
        ("pitch_bytes", np.int64),
        ("row_bytes", np.int32),
        ("rows", np.int32),
        ("useful_bytes", np.int64),
        ("m", np.int32),
        ("n", np.int32),
        ("k", np.int32),
        ("source_line", np.int32),
    ]
)
assert OP_DTYPE.itemsize == 64
