"""The backward pass: where its tensors lie, how large its blocks are, what they execute and move.

The loops stand in flash2_bwd.py and flash1_bwd.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.kernels.attention import (
    MASK_OPS,
    STATISTIC_BYTES,
    Tensors,
    first_fit,
    from_shared,
    registers_of,
    require_attention,
    require_tile,
    spilled_bytes,
    threads_of,
    window_choices,
)
from iosim.kernels.masks import seen, visited
from iosim.launch import REGISTER_BYTES, Footprint, Operand, why_not
from iosim.memory.layout import Matrix, addresses, matrix
from iosim.problem import Attention, Problem, Schedule, tiles
from iosim.traffic import Work
from iosim.units import ceil_div, dtype_bytes, round_up

ATOMICS, TWO_PASS, REREAD = "atomics", "two-pass", "reread-dq"
VARIANTS = (ATOMICS, TWO_PASS, REREAD)
SCORE_OPS = 6  # per pair: scale, less lse, P to dtype; dP less delta, times P, dS to dtype
RESULT_OPS = 3  # per element of a key tile: scale dK, dK and dV to dtype
ROW_OPS = 2  # per element of a query tile: product and sum of delta; scale dQ, dQ to dtype
REREAD_OPS = 2 * ROW_OPS  # both of them at every visit
STREAM_REGISTERS = 16  # of a thread of delta and convert, beside the elements that it holds
FIELDS = (
    "do", "dq", "dk", "dv", "delta", "dq_accum", "row_sum", "row_max",
    "stat_rows", "stat_row_bytes", "atomics",
)  # fmt: skip
_NAMES = ("Q", "K", "V", "O", "dO", "lse", "l", "m", "dQ", "dK", "dV", "delta", "dQ_accum")


def variant_of(schedule: Schedule, chip: Chip) -> str:
    """The variant of a schedule, or the chip's own. Raises RequestError where the chip has none."""
    chosen = schedule.variant or (TWO_PASS if chip.grid is not None else ATOMICS)
    if chip.grid is not None and chosen != TWO_PASS:
        raise RequestError(
            f"{chip.name} has no variant {chosen}: windows of a grid are not added to; "
            f"it has {TWO_PASS}"
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Every tensor of a backward pass where it lies, by name; `statistic` is lse's and delta's."""

    operands: dict[str, Operand]
    statistic: Matrix
    local: int

    def values(self) -> dict[str, int]:
        """Addresses for `parameters`, by the names in lower case, and the layout of statistics."""
        where = {name.lower(): operand.address for name, operand in self.operands.items()}
        return {
            **{name: at for name, at in where.items() if name not in ("l", "m")},
            "row_sum": where["l"],
            "row_max": where["m"],
            "local": self.local,
            "stat_rows": self.statistic.rows,
            "stat_row_bytes": self.statistic.row_bytes,
        }


def memory(problem: Attention, chip: Chip, variant: str) -> Memory:
    """The tensors of a variant; what it does not have is of size 0.

    lse, l, m and delta are a number per row in fp32: on a TPU a row of lanes each, as Pallas keeps
    them. The accumulator of dQ is fp32. Rows that see no key need not be read.
    """
    tensors = Tensors.of(problem, chip)
    q, k = tensors.q, tensors.k
    row = matrix(chip, q.count, problem.seqlen, 1, STATISTIC_BYTES)
    accumulator = q.count * problem.seqlen * problem.head_dim * STATISTIC_BYTES
    again, added = variant == REREAD, variant == ATOMICS
    none = 0
    sizes = (
        *(q.size_bytes, k.size_bytes, k.size_bytes, q.size_bytes, q.size_bytes),
        *((none, row.size_bytes, row.size_bytes) if again else (row.size_bytes, none, none)),
        *(q.size_bytes, k.size_bytes, k.size_bytes),
        *(none if again else row.size_bytes, accumulator if added else none),
    )
    rows, keys = seen(problem)
    hidden = {
        **dict.fromkeys(("Q", "O", "dO"), q.count * (problem.seqlen - rows) * q.row_bytes),
        **dict.fromkeys("KV", k.count * (problem.seqlen_k - keys) * k.row_bytes),
        **dict.fromkeys(("lse", "l", "m"), row.count * (problem.seqlen - rows) * row.row_bytes),
    }
    where = addresses(*sizes, 0)
    operands = {}
    for name, at, size in zip(_NAMES, where, sizes, strict=False):
        role = "in" if name in hidden else "scratch" if name in ("delta", "dQ_accum") else "out"
        needed = 0 if role == "scratch" else max(0, size - hidden.get(name, 0))
        operands[name] = Operand(
            name=name, role=role, address=at, size_bytes=size, unique_bytes=needed
        )
    return Memory(operands=operands, statistic=row, local=where[-1])


def default_schedule(problem: Problem, chip: Chip) -> Schedule:
    """FlashAttention-2's own on a GPU, 512 × 512 windows on a TPU; smaller where that is needed.

    128 × 128 up to 64 columns, 64 × 128 up to 128, else 64 × 64; 8 warps, Q double-buffered where
    that fits (flash_bwd_launch_template.h).
    """
    attention = require_attention(problem)
    if chip.grid is not None:
        choices = window_choices(attention, chip)
    else:
        d = attention.head_dim
        best = [(128, 128)] if d <= 64 else [(64, 128)] if d <= 128 else []
        choices = [
            Schedule(tile=tile, stages=stages, warps=8)
            for tile in (*best, (64, 64), (64, 32), (32, 32), (16, 16))
            for stages in (2, 1)
        ]
    variant = variant_of(Schedule(), chip)
    choices = [
        Schedule(tile=c.tile, stages=c.stages, warps=c.warps, variant=variant) for c in choices
    ]
    return first_fit(choices, lambda schedule: footprints(attention, schedule, chip), chip)


def footprints(problem: Attention, schedule: Schedule, chip: Chip) -> list[Footprint]:
    """Of all launches of a variant, in their order."""
    variant = variant_of(schedule, chip)
    if variant == REREAD:
        return [reread_footprint(problem, schedule, chip)]
    last = convert_footprint if variant == ATOMICS else dq_footprint
    return [
        delta_footprint(problem, schedule, chip),
        dkdv_footprint(problem, schedule, chip),
        last(problem, schedule, chip),
    ]


def delta_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """A block of delta: tiles of O and dO pass through once.

    Registers: both as they are stored, and 16 more; Nsight Compute shows 8 and 19 on two rows.
    """
    m, _, _ = require_tile(problem, schedule, chip)
    moved = 2 * m * Tensors.of(problem, chip).q.row_bytes
    if chip.grid is not None:
        statistic = m * chip.grid.lanes * STATISTIC_BYTES
        return Footprint(window_bytes=chip.grid.window_buffers * (moved + statistic))
    return Footprint(**_passing(moved, schedule, chip))


def convert_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """A block of convert: fp32 dQ in registers, turned round in shared memory as it is written."""
    m, _, _ = require_tile(problem, schedule, chip)
    held = m * problem.head_dim * STATISTIC_BYTES
    shared = m * Tensors.of(problem, chip).q.row_bytes
    return Footprint(shared_bytes=shared, **_passing(held, schedule, chip))


def _passing(held_bytes: int, schedule: Schedule, chip: Chip) -> dict[str, int]:
    assert chip.limits is not None
    threads = threads_of(schedule, chip)
    registers = ceil_div(held_bytes, threads * REGISTER_BYTES) + STREAM_REGISTERS
    return {"threads": threads, "registers": min(registers, chip.limits.registers_per_thread)}


def dkdv_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """A block that owns a key tile: dK and dV in registers, S and dP beside them.

    Shared memory of "atomics" as FlashAttention's kernel_traits.h adds it up: dO, `stages` tiles of
    Q, K, V, P and dS. V moves to the registers, and P and dS to its place, where a single-buffered
    block fits the chip no other way. Of "two-pass" what Triton 3.6 takes: see `streamed_bytes`.

    VMEM: two of each window (Q, dO, lse, delta, K, V, dK, dV), fp32 dK and dV, and two fp32 score
    tiles where the vector registers do not hold them: assumed as flash2's is, not measured.
    """
    m, n, _ = require_tile(problem, schedule, chip)
    row = Tensors.of(problem, chip).q.row_bytes
    d = problem.head_dim
    if chip.grid is not None:
        statistics = 2 * m * chip.grid.lanes * STATISTIC_BYTES
        return Footprint(
            window_bytes=chip.grid.window_buffers * (2 * m * row + statistics + 4 * n * row),
            scratch_bytes=2 * n * round_up(d, chip.grid.lanes) * STATISTIC_BYTES,
            temporary_bytes=spilled_bytes(2 * m * n, chip),
        )
    values = 2 * n * d + max(2 * m * n, m * d)
    if variant_of(schedule, chip) == TWO_PASS:
        shared = streamed_bytes(problem, schedule, chip, (n, m)) + _statistics(m, schedule)
    else:
        shared = _columns_bytes(problem, schedule, chip, v_in_registers=False)
        if schedule.stages <= 1 and why_not(Footprint(shared_bytes=shared), chip):
            smaller = _columns_bytes(problem, schedule, chip, v_in_registers=True)
            if not why_not(Footprint(shared_bytes=smaller), chip):
                shared, values = smaller, values + n * row // REGISTER_BYTES
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared, **registers_of(values, schedule, chip)
    )


def _columns_bytes(
    problem: Attention, schedule: Schedule, chip: Chip, *, v_in_registers: bool
) -> int:
    m, n = schedule.tile[:2]
    row = Tensors.of(problem, chip).q.row_bytes
    rows, pair = (1 + max(1, schedule.stages)) * m * row, 2 * m * n * dtype_bytes(problem.dtype)
    keys = max(2 * n * row, n * row + pair) if v_in_registers else 2 * n * row + pair
    return rows + keys


def _statistics(m: int, schedule: Schedule) -> int:
    """lse and delta of the query tiles that are loaded ahead."""
    return max(0, schedule.stages - 1) * 2 * m * STATISTIC_BYTES


def streamed_bytes(
    problem: Attention, schedule: Schedule, chip: Chip, heights: tuple[int, int]
) -> int:
    """Shared memory of a block that keeps two tiles of one height and streams two of another.

    kept + stages × streamed, exactly what Triton 3.6 takes for such loops where the products are
    those of warp groups. Elsewhere it streams one stage fewer and may pass P or dS through shared
    memory, for which a tile is counted: exact or that much too high.
    """
    kept, streamed = heights
    row = Tensors.of(problem, chip).q.row_bytes
    stages = max(1, schedule.stages)
    if from_shared(kept, problem.dtype, chip):
        return 2 * (kept + stages * streamed) * row
    through = kept * streamed * dtype_bytes(problem.dtype)
    return 2 * (kept + max(1, stages - 1) * streamed) * row + through


def dq_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """A block of "two-pass" that owns a query tile: Q, dO and dQ stay, K and V are streamed.

    VMEM: two of each window (Q, dO, lse, delta, dQ, K, V), fp32 dQ, score tiles as in dkdv.
    """
    m, n, _ = require_tile(problem, schedule, chip)
    row, d = Tensors.of(problem, chip).q.row_bytes, problem.head_dim
    if chip.grid is not None:
        statistics = 2 * m * chip.grid.lanes * STATISTIC_BYTES
        return Footprint(
            window_bytes=chip.grid.window_buffers * (3 * m * row + statistics + 2 * n * row),
            scratch_bytes=m * round_up(d, chip.grid.lanes) * STATISTIC_BYTES,
            temporary_bytes=spilled_bytes(2 * m * n, chip),
        )
    shared = streamed_bytes(problem, schedule, chip, (m, n))
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared,
        **registers_of(m * d + 2 * m * n, schedule, chip),
    )


def reread_footprint(problem: Attention, schedule: Schedule, chip: Chip) -> Footprint:
    """A block of "reread-dq": Q, O, dO and dQ (stages times), K, V, P and dS in shared memory.

    Assumed by the list of what algorithm 4 keeps on chip; no such kernel has been measured here.
    """
    m, n, _ = require_tile(problem, schedule, chip)
    row, d = Tensors.of(problem, chip).q.row_bytes, problem.head_dim
    pair = 2 * m * n * dtype_bytes(problem.dtype)
    shared = 4 * max(1, schedule.stages) * m * row + 2 * n * row + pair
    values = 2 * n * d + max(2 * m * n, m * d)
    return Footprint(
        shared_bytes=schedule.shared_bytes or shared, **registers_of(values, schedule, chip)
    )


def score_ops(problem: Attention) -> int:
    """Vector operations per pair, those of the mask included."""
    return SCORE_OPS + MASK_OPS * (problem.causal or problem.window > 0)


def works(problem: Attention, schedule: Schedule, chip: Chip) -> tuple[Work, ...]:
    """Of all launches in order: asked are 5 products and an exponential per unmasked pair.

    "two-pass" computes S and dP (and the exponentials) twice, which makes 7.
    """
    m, n = schedule.tile[:2]
    d, heads = problem.head_dim, problem.batch * problem.heads
    kv_heads = heads // problem.group
    pairs = visited(problem, schedule) * heads * m * n
    vector, product = pairs * score_ops(problem), 2 * pairs * d
    rows = Work(issued_vector_ops=heads * tiles(problem.seqlen, m) * m * d * ROW_OPS)
    results = kv_heads * tiles(problem.seqlen_k, n) * n * d * RESULT_OPS
    variant = variant_of(schedule, chip)
    split = variant == TWO_PASS
    again = REREAD_OPS * pairs // n * d if variant == REREAD else 0
    columns = Work(
        flops=problem.matrix_flops(products=4 if split else 5),
        exps=problem.exps,
        issued_flops=(4 if split else 5) * product,
        issued_exps=pairs,
        issued_vector_ops=vector + results + again,
    )
    if variant == REREAD:
        return (columns,)
    if not split:
        return rows, columns, rows
    return (
        rows,
        columns,
        Work(
            flops=problem.matrix_flops(products=1),
            issued_flops=3 * product,
            issued_exps=pairs,
            issued_vector_ops=vector + rows.issued_vector_ops,
        ),
    )
