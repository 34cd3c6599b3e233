"""What the launches of decoding share: splits of the keys, partial outputs, what combines them.

Not an algorithm: those stand one per file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import (
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    local_operand,
    operand,
)
from iosim.kernels.combine import combine_bytes, combine_launch
from iosim.kernels.packed import LSE, RESULT, Packed, row_tile, visited_tiles
from iosim.kernels.streams import run_bytes
from iosim.launch import BlockProgram, ClosedForm, Footprint, Launch, Operand
from iosim.memory.layout import Matrix, addresses
from iosim.problem import Attention, Schedule, tiles
from iosim.traffic import Work
from iosim.units import ceil_div, round_up

FIELDS = ("rows", "splits", "chunk", "o_row_bytes")  # of the record, beside those of attention
MOST_SPLITS = 128
ENOUGH = 0.85  # of the best wave efficiency


class Read(NamedTuple):
    """An operand that a split launch reads: what its address is called in the record, and sizes."""

    value: str
    name: str
    size_bytes: int
    unique_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The operands of the splits, O (where a second launch writes it), and their addresses."""

    operands: tuple[Operand, ...]
    result: Operand
    values: Mapping[str, int]


def key_chunk(problem: Attention, schedule: Schedule) -> int:
    """Key tiles of one split: whole tiles, shared out evenly, the last splits perhaps empty."""
    return ceil_div(tiles(problem.seqlen_k, schedule.tile[1]), max(1, schedule.splits))


def default_splits(blocks: int, cores: int, key_tiles: int) -> int:
    """The fewest splits whose last wave is nearly as full as the fullest that is possible.

    1 where the blocks nearly fill the cores by themselves. FlashAttention's rule
    (`num_splits_heuristic`): waves = blocks · splits / cores, efficiency = waves / ⌈waves⌉, at
    least 85 % of the best; a split that leaves the longest chunk as long as one fewer is no choice.
    """
    if blocks >= 0.8 * cores:
        return 1
    most = min(MOST_SPLITS, cores, key_tiles)
    possible = [
        splits
        for splits in range(1, most + 1)
        if splits == 1 or ceil_div(key_tiles, splits) != ceil_div(key_tiles, splits - 1)
    ]
    best = max(wave_efficiency(blocks * splits, cores) for splits in possible)
    return next(s for s in possible if wave_efficiency(blocks * s, cores) >= ENOUGH * best)


def wave_efficiency(blocks: int, cores: int) -> float:
    """How full the waves of `blocks` are, one block to a core: 1 where the last one is full too."""
    return blocks / cores / ceil_div(blocks, cores)


def split_schedule(
    problem: Attention,
    chip: Chip,
    choices: Sequence[Schedule],
    footprint: Callable[[Schedule], Footprint],
) -> Schedule:
    """The first of `choices` that fits, with as many splits as fill the cores.

    On a TPU up to 128 packed rows × windows of 512 keys, without splits.
    """
    if chip.grid is not None:
        lanes = chip.grid.lanes
        rows, most = row_tile(problem, lanes), round_up(problem.seqlen_k, lanes)
        choices = [Schedule(tile=(rows, min(n, most)), stages=2) for n in (512, 256, lanes)]
    chosen = first_fit(choices, lambda schedule: [footprint(schedule)], chip)
    if chip.grid is not None:
        return chosen
    m, n = chosen.tile[:2]
    packed = Packed.of(problem, chip)
    blocks = packed.count * tiles(packed.rows, m)
    splits = default_splits(blocks, chip.cores_used, tiles(problem.seqlen_k, n))
    return replace(chosen, splits=splits)


def require_splits(schedule: Schedule, chip: Chip) -> int:
    """The splits of a schedule. Raises RequestError for more than one on a chip that runs grids."""
    splits = max(1, schedule.splits)
    if chip.grid is not None and splits > 1:
        raise RequestError(
            f"{chip.name} runs the steps of a grid one after the other: {splits} splits gain "
            "nothing there; leave --splits out"
        )
    return splits


def partial_sizes(problem: Attention, schedule: Schedule, columns: int) -> tuple[int, int]:
    """Bytes of the fp32 partial outputs and log-sum-exps of all splits."""
    rows = problem.batch * problem.heads * problem.seqlen * max(1, schedule.splits)
    return rows * columns * STATISTIC_BYTES, rows * STATISTIC_BYTES


def kv_tile_bytes(problem: Attention, schedule: Schedule, chip: Chip) -> int:
    """Bytes of a tile of K and one of V with their scales."""
    tensors, n = Tensors.of(problem, chip), schedule.tile[1]
    scale_bytes = tensors.scale.rows * n * STATISTIC_BYTES if problem.scaled else 0
    return 2 * (n * tensors.k.row_bytes + scale_bytes)


def split_memory(
    problem: Attention,
    schedule: Schedule,
    chip: Chip,
    block: Footprint,
    o: tuple[Matrix, int],
    first: Sequence[Read],
    then: Sequence[Read],
) -> Memory:
    """Operands `first`, partial outputs and log-sum-exps, operands `then`, local memory; O apart.

    `o` is how O lies, and its columns. A chip that runs grids has no partial ones: O itself stands
    in their place.
    """
    lies, columns = o
    part, lse = partial_sizes(problem, schedule, columns) if chip.grid is None else (0, 0)
    sizes = [*(r.size_bytes for r in first), part, lse, *(r.size_bytes for r in then)]
    where = addresses(*sizes, block.local_bytes, lies.size_bytes)
    result = operand("O", "out", where[-1], lies.size_bytes)
    partial = result if chip.grid else operand("O_part", "scratch", where[len(first)], part)
    after = len(first) + 2
    operands = (
        *map(_operand, first, where),
        partial,
        operand("lse_part", "scratch", where[after - 1], lse),
        *map(_operand, then, where[after:]),
        local_operand(block, where[-2], chip),
    )
    values = {read.value: at for read, at in zip(first, where, strict=False)}
    values |= {read.value: at for read, at in zip(then, where[after:], strict=False)}
    values |= {"o": partial.address, "lse": where[after - 1], "local": where[-2]}
    packed = Packed.of(problem, chip)
    values |= {
        "spill_bytes": block.local_bytes,
        "rows": packed.rows,
        "q_rows": packed.q.rows,
        "splits": max(1, schedule.splits),
        "chunk": key_chunk(problem, schedule),
        "o_row_bytes": lies.row_bytes,
    }
    return Memory(operands=operands, result=result, values=values)


def _operand(read: Read, address: int) -> Operand:
    return Operand(
        name=read.name,
        role="in",
        address=address,
        size_bytes=read.size_bytes,
        unique_bytes=read.unique_bytes if read.size_bytes else 0,
    )


def split_launches(
    problem: Attention,
    schedule: Schedule,
    chip: Chip,
    *,
    program: BlockProgram,
    params: Any,
    lies: Memory,
    o: tuple[Matrix, int],
    footprint: Footprint,
    work: Work,
    most_ops: tuple[int, int],
) -> tuple[Launch, ...]:
    """The splits, and on a GPU the launch that combines them.

    `o` as for `split_memory`; `most_ops` of a step, and at both ends of a block.
    """
    splits, packed, m = require_splits(schedule, chip), Packed.of(problem, chip), schedule.tile[0]
    first = Launch(
        name="split",
        program=program,
        params=params,
        blocks=packed.count * tiles(packed.rows, m) * splits,
        steps=key_chunk(problem, schedule),
        ops_per_step=most_ops[0],
        ops_at_ends=most_ops[1],
        operands=lies.operands,
        footprint=footprint,
        work=work,
        dtype=problem.dtype,
        stages=max(1, schedule.stages),
        matrix_rows=m,
    )
    if chip.grid is not None:
        return (first,)
    merged = (lies.operands[RESULT], lies.operands[LSE], lies.result)
    return (first, combine_launch(problem, chip, splits, *o, merged))


def stored_statistic_bytes(problem: Attention, schedule: Schedule) -> int:
    """Bytes of the sectors that the blocks write of the partial log-sum-exps of all splits."""
    rows = problem.group * problem.seqlen
    m, splits = schedule.tile[0], max(1, schedule.splits)
    matrices = np.arange(problem.batch * problem.kv_heads * splits, dtype=np.int64)[:, None]
    row0 = np.arange(0, rows, m, dtype=np.int64)[None, :]
    length = np.minimum(m, rows - row0) * STATISTIC_BYTES
    return run_bytes((matrices * rows + row0) * STATISTIC_BYTES, length)


def written_form(
    problem: Attention, schedule: Schedule, o: tuple[Matrix, int], local_bytes: int, names: str
) -> ClosedForm:
    """What both launches of a GPU write; `names` is what the columns of O are called."""
    lies, columns = o
    parts, _ = partial_sizes(problem, schedule, columns)
    _, merged = combine_bytes(problem, max(1, schedule.splits), columns, lies.row_bytes)
    spilled = problem.batch * problem.kv_heads * local_bytes * visited_tiles(problem, schedule)
    return ClosedForm(
        quantity="l1_write_bytes",
        formula=f"splits · heads · N · ({names} + 1) · 4, in sectors; then heads · N · {names} · "
        "bytes",
        value=parts + stored_statistic_bytes(problem, schedule) + spilled + merged,
        source="Flash-Decoding, 2023: partial outputs in fp32, then O",
    )
