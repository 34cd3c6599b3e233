"""What the attention kernels share: parameters, tensors in memory, footprints.

Not an algorithm: those stand one per file beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.masks import seen
from iosim.launch import Footprint, Operand, why_not
from iosim.memory.layout import Matrix, matrix
from iosim.problem import Attention, Problem, Schedule
from iosim.units import ceil_div, dtype_bytes, round_up

STATISTIC_BYTES = 4  # row maxima, row sums, log-sum-exp are fp32 on every chip
VECTOR_REGISTERS = 64  # of a TPU core, each sublanes × lanes of 32 bits
SOFTMAX_OPS = 5  # vector operations per score: scale, maximum, subtraction, sum, conversion
MASK_OPS = 2  # more where a mask may hide keys: comparison, selection

PARAMS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "heads", "group", "seqlen", "seqlen_k", "head_dim", "tile_m", "tile_n",
            "causal", "offset", "window", "softmax_ops", "head_first", "grid", "bypass",
            "itemsize", "q_rows", "k_rows", "row_bytes",
            "score_rows", "score_row_bytes", "softmax_rows", "passes",
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

    def operands(self, problem: Attention, where: Sequence[int]) -> tuple[Operand, ...]:
        """Q, K, V read and O written, at the addresses `where`."""
        rows, keys = seen(problem)
        q = self.q.size_bytes - self.q.count * (problem.seqlen - rows) * self.q.row_bytes
        k = self.k.size_bytes - self.k.count * (problem.seqlen_k - keys) * self.k.row_bytes
        unique = (("Q", "in", q), ("K", "in", k), ("V", "in", k), ("O", "out", self.q.size_bytes))
        return tuple(
            Operand(name=name, role=role, address=at, size_bytes=size, unique_bytes=needed)
            for (name, role, needed), at, size in zip(unique, where, self.sizes, strict=False)
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
        "offset": problem.diagonal,
        "window": problem.window,
        "softmax_ops": mask_ops(problem),
        "head_first": int(schedule.order == "head"),
        "grid": int(chip.grid is not None),
        "bypass": int(schedule.stages > 1),
        "itemsize": tensors.itemsize,
        "q_rows": tensors.q.rows,
        "k_rows": tensors.k.rows,
        "row_bytes": tensors.q.row_bytes,
        "scale": 1 / math.sqrt(problem.head_dim),
    }
    for name, value in {**common, **values}.items():
        record[name] = value
    return record[0]


def require_tile(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[int, int, int]:
    """(query rows, key rows, key rows of one inner step) of a schedule; the last only for grids.

    A TPU's windows are whole register tiles. Raises RequestError for a tile that cannot be.
    """
    if len(schedule.tile) < 2:
        raise RequestError("attention needs a tile of query rows × key rows, such as 128x64")
    m, n, inner = (*schedule.tile, schedule.tile[1])[:3]
    if chip.grid is not None:
        rows, lanes = matrix(chip, 1, 1, 1, dtype_bytes(problem.dtype)).rows, chip.grid.lanes
        if m % rows or n % lanes or inner % lanes or n % min(inner, n):
            raise RequestError(
                f"{chip.name} needs a tile of multiples of {rows} × {lanes} × {lanes} whose last "
                f"number divides the second, not {'x'.join(map(str, schedule.tile))}"
            )
    return m, n, min(inner, n)


def mask_ops(problem: Attention) -> int:
    """Vector operations per score of the softmax, those of the mask included."""
    return SOFTMAX_OPS + MASK_OPS * (problem.causal or problem.window > 0)


def from_shared(tile_m: int, dtype: str, chip: Chip) -> bool:
    """Whether products read their left operand from shared memory, not from registers.

    Warp-group products do, the ones that need a least number of rows.
    """
    least = chip.rate("matrix", dtype).min_rows
    return 1 < least <= tile_m


def threads_of(schedule: Schedule, chip: Chip) -> int:
    """Threads of a block on a GPU; 4 warps where the schedule does not say."""
    assert chip.limits is not None
    return (schedule.warps or 4) * chip.limits.threads_per_warp


def tile_registers(values: int, threads: int, chip: Chip) -> int:
    """Registers per thread of a kernel that holds `values` 32-bit values of its tiles in them.

    40 more hold addresses, statistics and the loop, as a look at Triton 3.6's numbers suggests. An
    estimate: on the attention rows of the counters flash2 is 5 % off in the mean and 12 % at worst,
    flash1 12 % and 23 %. `Schedule.registers` takes a compiler's own number.
    """
    assert chip.limits is not None
    return min(chip.limits.registers_per_thread, ceil_div(values, threads) + 40)


def spilled_bytes(values: int, chip: Chip) -> int:
    """VMEM for the fp32 values of a grid step that do not stay in vector registers.

    Up to half of the 64 registers of sublanes × lanes they stay, as the compiler's own listings
    show (libtpu 0.0.42.1); beyond that it spills about all of them.
    """
    assert chip.grid is not None
    stay = VECTOR_REGISTERS // 2 * chip.grid.sublanes * chip.grid.lanes
    return values * STATISTIC_BYTES if values > stay else 0


def window_choices(problem: Attention, chip: Chip) -> list[Schedule]:
    """Tiles of a TPU, the one wanted most first, none longer than the problem."""
    assert chip.grid is not None
    lanes = chip.grid.lanes
    most_m, most_n = round_up(problem.seqlen, lanes), round_up(problem.seqlen_k, lanes)
    sides = ((512, 512), (256, 512), (256, 256), (128, 128))
    return [Schedule(tile=(min(m, most_m), min(n, most_n)), stages=2) for m, n in sides]


def first_fit(
    choices: Sequence[Schedule], footprints: Callable[[Schedule], Sequence[Footprint]], chip: Chip
) -> Schedule:
    """The first of `choices` all of whose blocks fit `chip`; the last where none does."""
    fitting = (
        schedule
        for schedule in choices
        if all(why_not(footprint, chip) is None for footprint in footprints(schedule))
    )
    return next(fitting, choices[-1])
