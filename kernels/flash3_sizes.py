"""FlashAttention-3: how its grid is cut, how large a block is, what it moves by arithmetic.

What the library does is that of the paper's version: github.com/Dao-AILab/flash-attention, folder
hopper, commits 7f67966c (first release, 11 July 2024: tiles, warps, stages, registers, work tiles
dealt out), 74b0761f (14 July: causal ones off a counter) and dfe1a59e (22 July: clusters only for
an even number of query tiles); and 7a802796 (January 2025: the heaviest work tile first).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import (
    REGISTER_UNIT,
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    require_attention,
    require_tile,
    tile_work,
)
from iosim.kernels.masks import key_spans, keys_loaded, visited
from iosim.launch import ClosedForm, Footprint
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import dtype_bytes, round_up

PAPER = "arXiv 2407.08608"
GROUP_WARPS = 4  # warps of a warp group (PTX ISA, wgmma)
PRODUCER_REGISTERS = {2: 24, 3: 32}  # that the producer keeps, by consumer groups (7f67966c)
BARRIER_BYTES = 8  # one mbarrier (PTX ISA)
BUFFER_BYTES = 128  # buffers of TMA loads are aligned to this
MOST_CLUSTER = 8  # blocks of a portable cluster (CUDA C++ Programming Guide)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a problem is cut on a chip.

    `consumers` warp groups have `rows` query rows each; `query_tiles` of a head are rounded up to
    whole clusters; `blocks` of the persistent grid share all work tiles.
    """

    consumers: int
    rows: int
    cluster: int
    query_tiles: int
    work_tiles: int
    blocks: int

    def spill_bytes(self, block: Footprint) -> int:
        """What the consumers of a block spill at a step; the producer has nothing to spill."""
        return block.local_bytes * self.consumers // (self.consumers + 1)


def masked(problem: Attention) -> bool:
    """Whether query tiles differ in the keys that they see."""
    return problem.causal or problem.window > 0


def require_chip(problem: Attention, chip: Chip) -> int:
    """Query rows of one warp-group product. Raises RequestError where the chip has none."""
    rows = 1 if chip.grid is not None else chip.rate("matrix", problem.dtype).min_rows
    if rows == 1:
        raise RequestError(
            f"{chip.name} has no warp-group products of {problem.dtype} (a matrix rate with "
            "min_rows), on which flash3 rests; take flash2"
        )
    if dtype_bytes(problem.dtype) > 2:
        raise RequestError(
            f"flash3 takes 16- and 8-bit dtypes, not {problem.dtype}: a warp-group product cannot "
            "read V of it as it lies in memory; take flash2"
        )
    return rows


def cut(problem: Attention, schedule: Schedule, chip: Chip) -> Cut:
    """How `schedule` cuts `problem`. Raises RequestError for what the kernel cannot be."""
    rows = require_chip(problem, chip)
    m, _, _ = require_tile(problem, schedule, chip)
    consumers, rest = divmod(m, rows)
    if rest or consumers not in PRODUCER_REGISTERS:
        sides = " or ".join(str(rows * count) for count in PRODUCER_REGISTERS)
        raise RequestError(
            f"a query tile of flash3 has {sides} rows (2 or 3 warp groups of {rows}), not {m}"
        )
    warps = GROUP_WARPS * (consumers + 1)
    if schedule.warps not in (0, warps):
        raise RequestError(
            f"flash3 has {warps} warps for {m} query rows (a producer group and {consumers} "
            f"consumers), not {schedule.warps}"
        )
    cluster = _cluster(problem, schedule, chip)
    query_tiles = round_up(tiles(problem.seqlen, m), cluster)
    work_tiles = problem.batch * problem.heads * query_tiles
    return Cut(
        consumers=consumers,
        rows=rows,
        cluster=cluster,
        query_tiles=query_tiles,
        work_tiles=work_tiles,
        blocks=min(chip.cores.count // cluster * cluster, work_tiles),
    )


def _cluster(problem: Attention, schedule: Schedule, chip: Chip) -> int:
    cluster = schedule.cluster or 1
    if cluster > 1 and masked(problem):
        raise RequestError(
            "blocks of a cluster share K and V tiles, so that all must walk over the same ones: "
            f"no cluster of {cluster} under a causal or windowed mask"
        )
    if cluster > min(MOST_CLUSTER, chip.cores.count):
        most = min(MOST_CLUSTER, chip.cores.count)
        raise RequestError(f"a cluster has at most {most} blocks on {chip.name}, not {cluster}")
    return cluster


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """Tiles, stages and clusters of the library's first release, for the next larger head_dim.

    192 × 128 for head_dim 64, 128 × 176 (masked: 128 × 128) for 128, 128 × 80 for 256, two stages;
    clusters of 2 without a mask from head_dim 128 on where the number of query tiles is even. In
    fp8 the library has longer key tiles; here it takes the same. Shorter ones where those do not
    fit. Warps follow from the tile (0).
    """
    attention = require_attention(problem)
    require_chip(attention, chip)
    if attention.head_dim <= 64:
        m, n = 192, 128
    elif attention.head_dim <= 128:
        m, n = 128, 128 if masked(attention) else 176
    else:
        m, n = 128, 80
    even = tiles(attention.seqlen, m) % 2 == 0
    shared = attention.head_dim > 64 and not masked(attention) and even
    choices = [
        Schedule(tile=(m, keys), stages=stages, cluster=2 if shared else 1)
        for keys in (n, 64, 32, 16)
        for stages in (2, 1)
    ]
    return first_fit(choices, lambda schedule: [footprint(attention, schedule, chip)], chip)


def footprint(problem: Problem, schedule: Schedule, chip: Chip) -> Footprint:
    """Shared memory Q + stages · (K + V) and barriers; registers as a block of this size starts.

    O leaves through the buffers of V or Q. An mbarrier for Q and for O, two for each buffer of K
    and V. A block starts with an even share of all registers and passes those of the producer on
    to the consumers (setmaxnreg: 240 and 24 with two of them, 160 and 32 with three). A consumer
    holds fp32 O and scores of the next tile and the probabilities of this one, for its rows, and
    (assumed) as much for addresses and statistics as a producer, who has nothing else.
    """
    attention = require_attention(problem)
    form = cut(attention, schedule, chip)
    assert chip.limits is not None
    m, n = schedule.tile[:2]
    tensors = Tensors.of(attention, chip)
    stages = max(1, schedule.stages)
    group_threads = GROUP_WARPS * chip.limits.threads_per_warp
    threads = group_threads * (form.consumers + 1)
    registers = chip.limits.registers_per_core
    launched = _whole_units(registers // threads)
    producer = PRODUCER_REGISTERS[form.consumers]
    share = (registers - producer * group_threads) // (form.consumers * group_threads)
    most = min(_whole_units(share), chip.limits.registers_per_thread)
    words = attention.head_dim + n + n * tensors.itemsize // STATISTIC_BYTES
    needed = -(-form.rows * words // group_threads) + producer
    barriers = round_up(BARRIER_BYTES * (2 + 4 * stages), BUFFER_BYTES)
    moved = m * tensors.q.row_bytes + 2 * stages * n * tensors.k.row_bytes
    spilled = max(0, needed - most) if schedule.spills is None else schedule.spills
    return Footprint(
        shared_bytes=schedule.shared_bytes or moved + barriers,
        registers=schedule.registers or launched,
        threads=threads,
        spilled_registers=spilled,
    )


def _whole_units(registers: int) -> int:
    return registers // REGISTER_UNIT * REGISTER_UNIT


def deal(problem: Attention, schedule: Schedule, form: Cut) -> tuple[NDArray[np.int64], int]:
    """[blocks, rounds]: the work tiles of each block in turn, -1 beyond the last; most steps.

    Without a mask block b has b, b + blocks, b + 2 · blocks … Under a mask work tiles differ in
    length, and each in turn goes to the block that is the first to be free if all key tiles take
    equally long: what a counter of work tiles gives where blocks are equally fast.
    """
    steps = _steps(problem, schedule, form)
    if not masked(problem):
        rounds = np.full((tiles(form.work_tiles, form.blocks), form.blocks), -1, dtype=np.int64)
        rounds.ravel()[: form.work_tiles] = np.arange(form.work_tiles)
        return np.ascontiguousarray(rounds.T), len(rounds) * int(steps[0])
    free = [(0, block) for block in range(form.blocks)]
    turns: list[list[int]] = [[] for _ in free]
    for index, length in enumerate(steps.tolist()):
        busy, block = free[0]
        turns[block].append(index)
        heapq.heapreplace(free, (busy + length, block))
    table = np.full((form.blocks, max(map(len, turns))), -1, dtype=np.int64)
    for block, mine in enumerate(turns):
        table[block, : len(mine)] = mine
    return table, max(busy for busy, _ in free)


def _steps(problem: Attention, schedule: Schedule, form: Cut) -> NDArray[np.int64]:
    """Steps of each work tile: one for a key tile that it visits, one where it sees no key."""
    index = np.arange(form.work_tiles)
    place, rank = index // form.cluster, index % form.cluster
    heads, groups = problem.batch * problem.heads, form.query_tiles // form.cluster
    place = place // heads if schedule.order == "head" else place % groups
    if masked(problem):
        place = groups - 1 - place
    steps = np.full(form.query_tiles, tiles(problem.seqlen_k, schedule.tile[1]))
    first, end = key_spans(problem, *schedule.tile[:2])
    steps[: first.size] = np.maximum(end - first, 1)
    mine: NDArray[np.int64] = steps[place * form.cluster + rank]
    return mine


def tiles_run(problem: Attention, schedule: Schedule, form: Cut) -> int:
    """(query tile, key tile) pairs that all heads execute, those of padding tiles included."""
    padding = form.query_tiles - tiles(problem.seqlen, schedule.tile[0])
    pairs = visited(problem, schedule) + padding * tiles(problem.seqlen_k, schedule.tile[1])
    return problem.batch * problem.heads * pairs


def work(problem: Problem, schedule: Schedule, chip: Chip) -> Work:
    """Flops and exps of the unmasked pairs, and of the whole tiles that are executed."""
    attention = require_attention(problem)
    run = tiles_run(attention, schedule, cut(attention, schedule, chip))
    return tile_work(attention, schedule, run)


def rows_loaded(problem: Attention, schedule: Schedule) -> int:
    """Query rows that one head loads: those of tiles that see a key."""
    m = schedule.tile[0]
    first, end = key_spans(problem, *schedule.tile[:2])
    low = np.arange(0, problem.seqlen, m)
    return int(np.minimum(m, problem.seqlen - low)[end > first].sum())


def closed_forms(problem: Problem, schedule: Schedule, chip: Chip) -> tuple[ClosedForm, ...]:
    """Flops, and bytes at the cores and at L2, from tile counts alone."""
    attention = require_attention(problem)
    form = cut(attention, schedule, chip)
    tensors, m = Tensors.of(attention, chip), schedule.tile[0]
    heads, row_bytes = attention.batch * attention.heads, tensors.q.row_bytes
    padding = form.query_tiles - tiles(attention.seqlen, m)
    keys = keys_loaded(attention, schedule) + padding * attention.seqlen_k
    q_bytes = heads * rows_loaded(attention, schedule) * row_bytes
    kv_bytes = heads * 2 * keys * tensors.k.row_bytes
    local = form.spill_bytes(footprint(attention, schedule, chip))
    spilled = " + visited tiles · consuming threads · spilled registers · 4" if local else ""
    written = heads * attention.seqlen * (row_bytes + STATISTIC_BYTES)
    written += tiles_run(attention, schedule, form) * local
    return (
        ClosedForm(
            quantity="flops",
            formula="4 · unmasked pairs · d · heads",
            value=attention.matrix_flops(),
            source=f"{PAPER}, section 4.1",
        ),
        ClosedForm(
            quantity="l1_fill_bytes",
            formula="heads · (rows that see keys + 2 · key rows of visited tiles) · d · bytes",
            value=q_bytes + kv_bytes,
            source=f"{PAPER}, algorithm 1: Q once, K and V once per query tile",
        ),
        ClosedForm(
            quantity="l1_write_bytes",
            formula=f"heads · (N · (d · bytes + 4){spilled})",
            value=written,
            source=f"{PAPER}, algorithm 1: O and the log-sum-exp once",
        ),
        ClosedForm(
            quantity="l2_from_l1_bytes",
            formula="fills of Q + fills of K and V / cluster + writes",
            value=q_bytes + kv_bytes // form.cluster + written,
            source="PTX ISA, multicast::cluster: all blocks of a cluster receive one load",
        ),
    )
