"""What the attention kernels share: parameters, tensors in memory, masks by tile, registers.

Not an algorithm: those stand one per file beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.jit import inline
from iosim.launch import Operand
from iosim.memory.layout import Matrix, matrix
from iosim.problem import Attention, Problem, Schedule
from iosim.units import ceil_div, dtype_bytes

STATISTIC_BYTES = 4  # row maxima, row sums, log-sum-exp are fp32 on every chip

PARAMS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "heads", "group", "seqlen", "seqlen_k", "head_dim", "tile_m", "tile_n",
            "causal", "diagonal", "window", "head_first", "grid", "bypass",
            "q_rows", "k_rows", "row_bytes",
            "score_row_bytes", "score_rows", "probability_row_bytes",
            "q", "k", "v", "o", "lse", "row_sum", "row_max", "scores", "probabilities",
        )
    ]
    + [("scale", np.float64)]
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Q, K, V, O in memory as the chip lays them out."""

    q: Matrix
    k: Matrix
    itemsize: int

    @classmethod
    def of(cls, problem: Attention, chip: Chip) -> Tensors:
        """The layout of `problem` on `chip`; K and V have the same, Q and O too."""
        size = dtype_bytes(problem.dtype)
        heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
        return cls(
            q=matrix(chip, heads, problem.seqlen, problem.head_dim, size),
            k=matrix(chip, kv_heads, problem.seqlen_k, problem.head_dim, size),
            itemsize=size,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of Q, K, V, O."""
        return self.q.size_bytes, self.k.size_bytes, self.k.size_bytes, self.q.size_bytes

    def operands(self, where: Sequence[int]) -> tuple[Operand, ...]:
        """Q, K, V read and O written, at the addresses `where`."""
        roles = (("Q", "in"), ("K", "in"), ("V", "in"), ("O", "out"))
        return tuple(
            operand(name, role, address, size)
            for (name, role), address, size in zip(roles, where, self.sizes, strict=False)
        )


def operand(name: str, role: str, address: int, size_bytes: int) -> Operand:
    """An operand all of which the problem needs."""
    unique = 0 if role == "scratch" else size_bytes
    return Operand(
        name=name, role=role, address=address, size_bytes=size_bytes, unique_bytes=unique
    )


def require_attention(problem: Problem) -> Attention:
    """`problem` as an Attention. Raises RequestError for another kind."""
    if not isinstance(problem, Attention):
        raise RequestError(f"an attention kernel needs an attention problem, not {problem}")
    return problem


def parameters(
    problem: Attention, schedule: Schedule, chip: Chip, values: Mapping[str, float]
) -> Any:
    """The record of PARAMS that an attention block program reads; `values` adds addresses."""
    tensors = Tensors.of(problem, chip)
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    common = {
        "heads": problem.batch * problem.heads,
        "group": problem.group,
        "seqlen": problem.seqlen,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "tile_m": schedule.tile[0],
        "tile_n": schedule.tile[1],
        "causal": int(problem.causal),
        "diagonal": problem.diagonal,
        "window": problem.window,
        "head_first": int(schedule.order == "head"),
        "grid": int(chip.grid is not None),
        "bypass": int(schedule.stages > 1),
        "q_rows": tensors.q.rows,
        "k_rows": tensors.k.rows,
        "row_bytes": tensors.q.row_bytes,
        "scale": 1 / math.sqrt(problem.head_dim),
    }
    for name, value in {**common, **values}.items():
        record[name] = value
    return record[0]


def score_registers(tile_m: int, tile_n: int, head_dim: int, threads: int) -> int:
    """Registers per thread of a flash kernel: fp32 accumulator, scores, 16-bit probabilities.

    40 more hold addresses, statistics and the loop; within 12 % of what Triton 3.6 reports on a
    GPU with warp-group products. An estimate: `Schedule.registers` takes a compiler's own number.
    """
    accumulator = tile_m * head_dim
    scores = tile_m * tile_n
    return min(255, ceil_div(accumulator + scores + scores // 2, threads) + 40)


@inline
def visible_keys(row, p):
    """First and past-the-last key that a row sees; equal where it is fully masked."""
    first = 0
    last = p.seqlen_k
    centre = row + p.diagonal
    if p.window > 0:
        first = max(0, centre - p.window + 1)
        if not p.causal:
            last = min(last, centre + p.window)
    if p.causal:
        last = min(last, centre + 1)
    if last <= first:
        return 0, 0
    return first, last


@inline
def key_tiles(row0, rows, p):
    """First and past-the-last key tile that any of `rows` rows from `row0` on sees."""
    low_row = row0
    high_row = row0 + rows - 1
    if p.causal:
        low_row = max(low_row, -p.diagonal)
    elif p.window > 0:
        low_row = max(low_row, 1 - p.window - p.diagonal)
    if p.window > 0:
        high_row = min(high_row, p.seqlen_k + p.window - 2 - p.diagonal)
    if low_row > high_row:
        return 0, 0
    first, _ = visible_keys(low_row, p)
    _, last = visible_keys(high_row, p)
    return first // p.tile_n, (last + p.tile_n - 1) // p.tile_n


@inline
def block_of(block, p):
    """(head, query tile) of a block: head_first launches one tile of every head before the next."""
    tiles = (p.seqlen + p.tile_m - 1) // p.tile_m
    if p.head_first:
        return block % p.heads, block // p.heads
    return block // tiles, block % tiles
