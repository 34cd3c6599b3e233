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
from iosim.emit import load, vector
from iosim.errors import RequestError
from iosim.jit import inline
from iosim.kernels.masks import seen
from iosim.kernels.rounding import FORMATS
from iosim.launch import Footprint, Operand, blocks_per_core, why_not
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.problem import Attention, Problem, Schedule
from iosim.traffic import Work
from iosim.units import ceil_div, dtype_bytes, round_up

STATISTIC_BYTES = 4  # row maxima, row sums, log-sum-exp are fp32 on every chip
VECTOR_REGISTERS = 64  # of a TPU core, each sublanes × lanes of 32 bits
DEQUANT_OPS = 2  # vector operations per element of K and V that has a scale: conversion, product
SOFTMAX_OPS = 5  # vector operations per score: scale, maximum, subtraction, sum, conversion
REGISTER_UNIT = 8  # registers of a thread come in units of this
OTHER_REGISTERS = 40  # addresses, statistics, the loop: as Triton 3.6's numbers suggest
FEWEST_OTHERS = 32  # of them where registers are short: assumed, 37 is the least of those numbers
MASK_OPS = 2  # more where a mask may hide keys: comparison, selection

_FIELDS = (
    "heads", "group", "seqlen", "seqlen_k", "head_dim", "tile_m", "tile_n",
    "causal", "offset", "window", "softmax_ops", "head_first", "grid", "bypass",
    "itemsize", "q_rows", "k_rows", "row_bytes", "k_row_bytes",
    "q", "k", "v", "o", "lse", "k_scale", "v_scale", "scale_rows", "scale_row_bytes",
    "local", "spill_bytes",
    "digits", "least_exponent",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Q, K, V, O in memory as the chip lays them out, and the scales of K and of V.

    `scale` is a row of fp32 numbers per KV head, one for each key; it is empty without scales.
    """

    q: Matrix
    k: Matrix
    scale: Matrix
    itemsize: int

    @classmethod
    def of(cls, problem: Attention, chip: Chip) -> Tensors:
        """The layout of `problem` on `chip`; K and V have the same, Q and O too."""
        size, kv_size = dtype_bytes(problem.dtype), dtype_bytes(problem.kv_dtype)
        heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
        scales = kv_heads if problem.scaled else 0
        return cls(
            q=matrix(chip, heads, problem.seqlen, problem.head_dim, size),
            k=matrix(chip, kv_heads, problem.seqlen_k, problem.head_dim, kv_size),
            scale=matrix(chip, scales, 1, problem.seqlen_k, STATISTIC_BYTES),
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

    def scale_operands(self, problem: Attention, where: Sequence[int]) -> tuple[Operand, ...]:
        """The scales of K and of V at the addresses `where`; of size 0 where there are none."""
        _, keys = seen(problem)
        needed = self.scale.count * keys * STATISTIC_BYTES
        return tuple(
            Operand(
                name=name,
                role="in",
                address=at,
                size_bytes=self.scale.size_bytes,
                unique_bytes=needed,
            )
            for name, at in zip(("K_scale", "V_scale"), where, strict=False)
        )


def operand(name: str, role: str, address: int, size_bytes: int) -> Operand:
    """An operand all of which the problem needs."""
    unique = 0 if role == "scratch" else size_bytes
    return Operand(
        name=name, role=role, address=address, size_bytes=size_bytes, unique_bytes=unique
    )


def require_attention(problem: Problem, *, scales: bool = False) -> Attention:
    """`problem` as an Attention. Raises RequestError for another kind.

    `scales` says whether the kernel reads K and V of a dtype of their own; else that is refused.
    """
    if not isinstance(problem, Attention):
        raise RequestError(f"an attention kernel needs an attention problem, not {problem}")
    if problem.scaled and not scales:
        raise RequestError(
            f"this kernel reads K and V in the dtype of Q ({problem.dtype}), not {problem.kv_dtype}"
        )
    return problem


def parameters(
    problem: Attention,
    schedule: Schedule,
    chip: Chip,
    values: Mapping[str, float],
    fields: Sequence[str] = (),
) -> Any:
    """The record that an attention block program reads its sizes from.

    `values` adds addresses and what else is this kernel's own; `fields` are whole numbers that only
    this kernel has.
    """
    names = [(name, np.int64) for name in (*_FIELDS, *fields)]
    record = np.zeros(1, dtype=[*names, ("scale", np.float64), ("largest", np.float64)])
    for name, value in {**_common(problem, schedule, chip), **values}.items():
        record[name] = value
    return record.view(np.recarray)[0]


def _common(problem: Attention, schedule: Schedule, chip: Chip) -> dict[str, float]:
    tensors = Tensors.of(problem, chip)
    form = FORMATS[problem.dtype]
    return {
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
        "k_row_bytes": tensors.k.row_bytes,
        "scale_rows": tensors.scale.rows if problem.scaled else 0,
        "scale_row_bytes": tensors.scale.row_bytes,
        "digits": form.digits,
        "least_exponent": form.least,
        "largest": -form.largest if form.saturates else form.largest,
        "scale": 1 / math.sqrt(problem.head_dim),
    }


def forward_memory(
    problem: Attention, chip: Chip, block: Footprint, lse_bytes: int
) -> tuple[tuple[Operand, ...], dict[str, int]]:
    """Q, K, V, O, lse, the scales of K and V, local memory of blocks of this footprint.

    Also the values of `parameters` that say where they lie. What a launch does not have (a grid no
    lse and no local memory) is of size 0 there.
    """
    tensors = Tensors.of(problem, chip)
    scale_bytes = tensors.scale.size_bytes
    where = addresses(*tensors.sizes, lse_bytes, scale_bytes, scale_bytes, block.local_bytes)
    names = ("q", "k", "v", "o", "lse", "k_scale", "v_scale", "local")
    values = dict(zip(names, where, strict=True))
    values["lse"] = where[4] if lse_bytes else 0
    values["spill_bytes"] = block.local_bytes
    operands = (
        *tensors.operands(problem, where),
        operand("lse", "out", where[4], lse_bytes),
        *tensors.scale_operands(problem, where[5:]),
        local_operand(block, where[7], chip),
    )
    return operands, values


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


def tile_work(
    problem: Attention,
    schedule: Schedule,
    tiles_run: int,
    *,
    value_dim: int = 0,
    tensors: int = 2,
    output_ops: int = 1,
) -> Work:
    """Flops and exps of the unmasked pairs, and of `tiles_run` whole tiles that are executed.

    Both products, the softmax, `output_ops` operations per element of O (1: its rescaling), and the
    widening of `tensors` tiles of keys where they have scales. `value_dim`: columns of a value,
    where they are not head_dim.
    """
    m, n = schedule.tile[:2]
    width = value_dim or problem.head_dim
    scores, outputs = tiles_run * m * n, tiles_run * m * width
    widened = tensors * tiles_run * n * problem.head_dim * DEQUANT_OPS if problem.scaled else 0
    return Work(
        flops=problem.matrix_flops(),
        exps=problem.exps,
        issued_flops=2 * scores * (problem.head_dim + width),
        issued_exps=scores,
        issued_vector_ops=scores * mask_ops(problem) + outputs * output_ops + widened,
    )


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


def registers_of(
    values: int, schedule: Schedule, chip: Chip, fewest: int | None = None
) -> dict[str, int]:
    """Registers and spilled registers per thread of a block that holds `values` 32-bit values.

    An estimate: on the attention rows of the counters flash2 is 5 % off in the mean and 12 % at
    worst, flash1 12 % and 23 %. A thread may have `Schedule.registers`, else what the chip allows
    to a block of so many threads.

    A compiler that is short of registers first does without what it can have again, so that only
    the `fewest` values spill that must live at the same time (else: all of `values`). So no row of
    the counters whose compiler reports no spill is said to spill. FlashAttention-2's own binary
    spills 6 and 14 registers per step where this finds room for all: what is found is a least.
    `Schedule.spills` takes a compiler's own number.
    """
    assert chip.limits is not None
    threads = threads_of(schedule, chip)
    share = chip.limits.registers_per_core // threads // REGISTER_UNIT * REGISTER_UNIT
    most = schedule.registers or min(chip.limits.registers_per_thread, share)
    living = ceil_div(values if fewest is None else fewest, threads) + FEWEST_OTHERS
    spilled = max(0, living - most) if schedule.spills is None else schedule.spills
    return {
        "threads": threads,
        "registers": schedule.registers or min(ceil_div(values, threads) + OTHER_REGISTERS, most),
        "spilled_registers": spilled,
    }


def local_operand(footprint: Footprint, address: int, chip: Chip) -> Operand:
    """The local memory of all blocks that are resident at a time; of size 0 where none spills."""
    size = 0
    if footprint.local_bytes and chip.limits is not None:
        resident = blocks_per_core(footprint, chip.limits)
        size = footprint.local_bytes * resident * chip.cores.count
    return operand("local", "scratch", address, size)


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


@inline
def load_scale(out, n, tensor, flags, step, base, kv, key0, p):
    """The scales of a tile of keys or values that is stored with scales; else nothing."""
    if p.scale_rows == 0:
        return n
    at = base + kv * p.scale_rows * p.scale_row_bytes + key0 * STATISTIC_BYTES
    width = min(p.tile_n, p.scale_row_bytes // STATISTIC_BYTES - key0) * STATISTIC_BYTES
    return load(out, n, tensor, flags, step, at, p.scale_rows, width, p.scale_row_bytes)


@inline
def dequantize(out, n, step, keys, columns, p):
    """What it costs to turn a tile of keys or values into the dtype of the products."""
    if p.scale_rows == 0:
        return n
    return vector(out, n, step, keys, columns, DEQUANT_OPS)
