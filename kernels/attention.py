"""What the attention kernels share: parameters, tensors in memory, masks by tile, footprints.

Not an algorithm: those stand one per file beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.jit import inline
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


def seen(problem: Attention) -> tuple[int, int]:
    """Query rows that see a key, and keys that a row sees: no others have to be read."""
    first, end = key_spans(problem, 1, 1)
    some = first < end
    if not some.any():
        return 0, 0
    return int(some.sum()), int(end[some].max() - first[some].min())


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


def key_spans(problem: Attention, m: int, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and past-the-last key tile that each query tile visits: `key_tiles` of them all."""
    low = np.arange(0, problem.seqlen, m, dtype=np.int64)
    high = np.minimum(low + m, problem.seqlen) - 1
    offset, window, keys = problem.diagonal, problem.window, problem.seqlen_k
    last = np.full_like(low, keys)
    first = np.zeros_like(low)
    if problem.causal or window:
        reach = 0 if problem.causal else window - 1  # keys that a row sees after the diagonal
        low = np.maximum(low, -offset - reach)
        if window:
            high = np.minimum(high, keys + window - 2 - offset)
            first = np.maximum(first, low + (offset - window + 1))
        last = np.minimum(last, high + (offset + reach + 1))
    seen = low <= high
    return np.where(seen, first // n, 0), np.where(seen, -(-last // n), 0)


def visited(problem: Attention, schedule: Schedule) -> int:
    """(query tile, key tile) pairs that one head visits."""
    first, end = key_spans(problem, *schedule.tile[:2])
    return int((end - first).sum())


def keys_loaded(problem: Attention, schedule: Schedule) -> int:
    """Key rows that one head loads: those of the visited tiles, the last one perhaps short."""
    n = schedule.tile[1]
    first, end = key_spans(problem, *schedule.tile[:2])
    return int((np.minimum(end * n, problem.seqlen_k) - first * n).sum())


@inline
def visible_keys(row, p):
    """First and past-the-last key that a row sees; equal where it is fully masked."""
    first = 0
    last = p.seqlen_k
    centre = row + p.offset
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
        low_row = max(low_row, -p.offset)
    elif p.window > 0:
        low_row = max(low_row, 1 - p.window - p.offset)
    if p.window > 0:
        high_row = min(high_row, p.seqlen_k + p.window - 2 - p.offset)
    if low_row > high_row:
        return 0, 0
    first, _ = visible_keys(low_row, p)
    _, last = visible_keys(high_row, p)
    return first // p.tile_n, (last + p.tile_n - 1) // p.tile_n


@inline
def query_tiles(key0, keys, p):
    """First and past-the-last query tile of which a row sees any of `keys` keys from `key0` on."""
    low = 0
    high = p.seqlen - 1
    if p.causal:
        low = max(low, key0 - p.offset)
    elif p.window > 0:
        low = max(low, key0 - p.offset - p.window + 1)
    if p.window > 0:
        high = min(high, key0 + keys - 1 - p.offset + p.window - 1)
    if low > high:
        return 0, 0
    return low // p.tile_m, high // p.tile_m + 1


@inline
def block_of(block, p):
    """(head, query tile) of a block: head_first launches one tile of every head before the next."""
    tiles = (p.seqlen + p.tile_m - 1) // p.tile_m
    if p.head_first:
        return block % p.heads, block // p.heads
    return block // tiles, block % tiles
