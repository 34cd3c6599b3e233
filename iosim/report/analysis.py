"""The tables of `analyze`: kernels side by side, and each of them by operand and launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iosim.chip import Chip
from iosim.launch import ClosedForm, Footprint, blocks_per_core, occupancy
from iosim.problem import Attention
from iosim.report.tables import Cell, Table, cells
from iosim.report.words import LEVELS, NOTHING, percent, ratio, resource, seconds, tile_text
from iosim.result import LaunchResult, Result
from iosim.traffic import FIELDS
from iosim.units import format_bytes, format_capacity, format_count

EMPTY = Cell(NOTHING, "faint")
#: what crosses the edge of a core, inwards and outwards
CORE_FIELDS = {
    "gpu": ("l1_fill_bytes", "l1_write_bytes"),
    "tpu": ("vmem_fill_bytes", "vmem_drain_bytes"),
}


def own_writes(result: Result, cache: str) -> int:
    """Bytes that this run wrote or will write to HBM: written, and left dirty in the cache.

    With a cold cache, without what was dirty before the kernel started; with a warm one what is
    left replaces what was there, so that only the written bytes count.
    """
    traffic = result.traffic
    level = result.chip.levels.get("l2")
    if level is None or cache == "warm":
        return traffic.dram_write_bytes
    moved = traffic.dram_write_bytes + traffic.dirty_left_bytes
    return max(0, moved - level.dirty_before_bytes)


def over_compulsory(result: Result, cache: str) -> str:
    """HBM bytes of a run as a multiple of those that no kernel can avoid."""
    moved = result.traffic.dram_read_bytes + own_writes(result, cache)
    return ratio(moved, sum(result.compulsory))


def chip_line(chip: Chip, clock_hz: float) -> str:
    """A chip in one line."""
    cores, hbm = chip.cores, chip.dram
    sustained = hbm.sustained_bytes_per_s
    reached = f" ({format_bytes(sustained)}/s sustained)" if sustained else ""
    names = f"{cores.name}{'s' if chip.cores_used > 1 else ''}"
    return (
        f"{chip.title} ({chip.name}): {chip.cores_used} {names} at {clock_hz / 1e9:.4g} GHz, "
        f"HBM {format_bytes(hbm.bandwidth_bytes_per_s)}/s{reached}"
    )


def side_by_side(results: Sequence[Result], cache: str) -> Table:
    """One column per kernel: what fits, what moves, what is computed, what limits."""
    rows: list[tuple[Cell, ...]] = []

    def add(label: str, make: Callable[[Result], Cell | str], tone: str = "plain") -> None:
        made = [make(result) for result in results]
        row = cells(Cell(label, tone), *made)
        if any(cell.text != NOTHING for cell in row[1:]):
            rows.append(row)

    _add_fit(add, results)
    caches = f", {cache} caches" if "l2" in results[0].chip.levels else ""
    sections: tuple[tuple[str, Callable[[], None]], ...] = (
        (f"traffic{caches}", lambda: _add_traffic(add, results[0].chip, cache)),
        ("work", lambda: _add_work(add)),
        ("floor: no run at this clock can be faster", lambda: _add_floor(add, results)),
    )
    for heading, fill in sections:
        rows.append((Cell(heading, "strong"),))
        before = len(rows)
        fill()
        if len(rows) == before:
            rows.pop()
    return Table(
        title="",
        heads=("", *(result.kernel for result in results)),
        rows=tuple(rows),
        align="l" + "r" * len(results),
    )


Add = Callable[..., None]


def _add_fit(add: Add, results: Sequence[Result]) -> None:
    chip = results[0].chip
    memory = "VMEM of a step" if chip.grid else "shared memory of a block"
    add("fits", lambda r: Cell("yes", "good") if r.fits else Cell("no", "bad"))
    add("tile", lambda r: tile_text(r.schedule.tile))
    add("variant", lambda r: r.schedule.variant or EMPTY)
    add("order of blocks", _order)
    if chip.limits:
        add("stages, warps", lambda r: f"{r.schedule.stages}, {r.schedule.warps or _warps(r)}")
    add(memory, lambda r: f"{format_capacity(r.footprint_bytes)}")
    add("  of", lambda r: format_capacity(block_limit(r.chip)), "faint")
    if chip.limits:
        add("registers × threads", _registers)
    add("blocks", lambda r: f"{sum(launch.blocks for launch in r.planned):,}")
    if chip.limits:
        add(f"  per {chip.cores.name}, limited by", _resident)


def _order(result: Result) -> Cell | str:
    return result.schedule.order if isinstance(result.problem, Attention) else EMPTY


def block_limit(chip: Chip) -> int:
    """On-chip memory that one block (GPU) or grid step (TPU) may use."""
    if chip.grid:
        return chip.grid.scoped_limit_bytes
    assert chip.limits is not None
    return chip.limits.shared_per_block_bytes


def _registers(result: Result) -> str:
    launch = _longest(result).launch if result.launches else result.planned[0]
    block = launch.footprint
    spilled = f" + {block.spilled_registers} spilled" if block.spilled_registers else ""
    return f"{block.registers}{spilled} × {block.threads}"


def _warps(result: Result) -> int:
    """Warps of a block where the schedule leaves them to the kernel."""
    assert result.chip.limits is not None
    return result.planned[0].footprint.threads // result.chip.limits.threads_per_warp


def _resident(result: Result) -> Cell | str:
    limits = result.chip.limits
    if limits is None or not result.fits:
        return EMPTY
    return resident(_longest(result), result.chip)


def resident(run: LaunchResult, chip: Chip) -> str:
    """Blocks per core of a launch and the resource that allows no more: `2, registers`."""
    return resident_text(run.launch.footprint, chip)


def resident_text(footprint: Footprint, chip: Chip) -> str:
    """The same of a footprint on a GPU."""
    assert chip.limits is not None
    allowed = occupancy(footprint, chip.limits)
    count = blocks_per_core(footprint, chip.limits)
    return f"{count}, {min(allowed, key=lambda name: allowed[name])}"


def _longest(result: Result) -> LaunchResult:
    return max(result.launches, key=lambda run: run.floor_s)


def _add_traffic(add: Add, chip: Chip, cache: str) -> None:
    for name in FIELDS[chip.machine]:
        if name.startswith("cmem") and "cmem" not in chip.levels:
            continue
        add(LEVELS[name], lambda r, n=name: _bytes(r, n))
        add("  least to greatest of the seeds", lambda r, n=name: _band(r, n), "faint")
        if name == "dram_read_bytes":
            add("  × compulsory", lambda r: _compulsory_read(r), "faint")
        elif name == ("dirty_left_bytes" if "l2" in chip.levels else "dram_write_bytes"):
            what = ", written and left" if "l2" in chip.levels and cache == "cold" else ", written"
            add(f"  × compulsory{what}", lambda r: _compulsory_write(r, cache), "faint")


def _bytes(result: Result, name: str) -> Cell | str:
    return format_bytes(getattr(result.traffic, name)) if result.launches else EMPTY


def _band(result: Result, name: str) -> Cell:
    low, high = result.band.get(name, (0, 0))
    if low == high:
        return EMPTY
    return Cell(f"{format_bytes(low)} to {format_bytes(high)}", "faint")


def _compulsory_read(result: Result) -> Cell:
    if not result.launches:
        return EMPTY
    return Cell(ratio(result.traffic.dram_read_bytes, result.compulsory[0]), "faint")


def _compulsory_write(result: Result, cache: str) -> Cell:
    if not result.launches:
        return EMPTY
    return Cell(ratio(own_writes(result, cache), result.compulsory[1]), "faint")


def _add_work(add: Add) -> None:
    add("flops", lambda r: _count(r.work.flops))
    add("  in whole tiles", lambda r: _issued(r.work.issued_flops, r.work.flops), "faint")
    add("exps", lambda r: _count(r.work.exps))
    add("  in whole tiles", lambda r: _issued(r.work.issued_exps, r.work.exps), "faint")
    add("flop per HBM byte", _intensity)
    add("  ridge of the chip", _ridge, "faint")


def _count(value: int) -> Cell | str:
    return format_count(value) if value else EMPTY


def _issued(issued: int, asked: int) -> Cell:
    return Cell(ratio(issued, asked), "faint") if issued != asked else EMPTY


def _intensity(result: Result) -> Cell | str:
    moved = result.traffic.dram_read_bytes + result.traffic.dram_write_bytes
    if not (result.launches and moved and result.work.flops):
        return EMPTY
    return f"{result.work.flops / moved:,.0f}"


def _ridge(result: Result) -> Cell:
    have = {peak.dtype for peak in result.chip.peaks}
    if not (result.launches and result.work.flops and result.problem.dtype in have):
        return EMPTY
    return Cell(f"{result.chip.ridge_flops_per_byte(result.problem.dtype):,.0f}", "faint")


def _add_floor(add: Add, results: Sequence[Result]) -> None:
    add("time", lambda r: Cell(seconds(r.floor_s), "strong") if r.launches else EMPTY)
    add("limited by", lambda r: Cell(resource(r.limiter), "strong"))
    names = dict.fromkeys(n for r in results for run in r.launches for n in run.floor_times_s)
    for name in names:
        add(f"  {resource(name)} needs", lambda r, n=name: _needs(r, n), "faint")
    if names:
        add("predicted cycles and time", lambda r: Cell("not yet", "faint"))


def _needs(result: Result, name: str) -> Cell:
    if not result.floor_s:
        return EMPTY
    needed = sum(run.floor_times_s.get(name, 0.0) for run in result.launches)
    return Cell(percent(needed / result.floor_s), "faint")


def operand_table(result: Result) -> Table:
    """One row per operand: what it moved at each level, and how often it was read again."""
    gpu = result.chip.machine == "gpu"
    fill, drain = CORE_FIELDS[result.chip.machine]
    fields = ("dram_read_bytes", "dram_write_bytes", fill, drain)
    roles = {o.name: o.role for launch in result.planned for o in launch.operands}
    rows = []
    for name, row in result.operands.items():
        moved = [getattr(row, field) for field in fields]
        texts = [format_bytes(value) if value else NOTHING for value in (row.unique_bytes, *moved)]
        again = [ratio(value, row.unique_bytes) if value else NOTHING for value in moved[:3:2]]
        fetched = [] if gpu else [f"{row.fetches:,}" if row.fetches else NOTHING]
        rows.append(cells(f"{name} {roles.get(name, '')}", *texts, *again, *fetched))
    heads = [LEVELS[field].replace(" ", "\n") for field in fields]
    heads += ["HBM read\n× unique", f"{LEVELS[fill].split()[0]} fill\n× unique"]
    heads += [] if gpu else ["windows\nfetched"]
    return Table(
        title=f"{result.kernel} by operand",
        heads=("operand", "unique", *heads),
        rows=tuple(rows),
        align="l" + "r" * (len(heads) + 1),
    )


def launch_table(result: Result) -> Table | None:
    """One row per launch; None where there is only one."""
    if len(result.launches) < 2:
        return None
    rows = []
    for run in result.launches:
        limits, print_ = result.chip.limits, run.launch.footprint
        limiter = max(run.floor_times_s, key=lambda key: run.floor_times_s[key])
        rows.append(
            cells(
                run.launch.name,
                f"{run.launch.blocks:,}",
                *([resident(run, result.chip)] if limits else []),
                format_capacity(print_.shared_bytes if limits else print_.vmem_bytes),
                format_bytes(run.traffic.dram_read_bytes),
                format_bytes(run.traffic.dram_write_bytes),
                seconds(run.floor_s),
                resource(limiter),
            )
        )
    core = [f"per {result.chip.cores.name}"] if result.chip.limits else []
    heads = ("launch", "blocks", *core, "on chip", "HBM read", "HBM write", "floor", "limit")
    return Table(
        title=f"{result.kernel} by launch",
        heads=heads,
        rows=tuple(rows),
        align=f"lr{'l' * len(core)}rrrrl",
    )


def forms_table(result: Result) -> Table | None:
    """Closed forms beside the counts; None where the kernel has none here."""
    if not (result.closed_forms and result.launches):
        return None
    rows = []
    for form in result.closed_forms:
        counted = counted_of(result, form)
        said = f"{counted:,}" if counted is not None else "not counted"
        rows.append(
            cells(
                form.quantity, f"{form.value:,}", said, verdict(form.value, counted), form.formula
            )
        )
    return Table(
        title=f"{result.kernel}: closed forms beside the counts",
        heads=("quantity", "by hand", "counted", "", "formula"),
        rows=tuple(rows),
        align="lrrll",
        wraps=(4,),
    )


def counted_of(result: Result, form: ClosedForm) -> int | None:
    """The count that a closed form speaks of; None where nothing counts it."""
    for record in (result.traffic, result.work):
        value = getattr(record, form.quantity, None)
        if value is not None:
            return int(value)
    return None


def verdict(by_hand: int, counted: int | None) -> Cell:
    """Whether a count is what pencil and paper say."""
    if counted is None:
        return EMPTY
    if counted == by_hand:
        return Cell("agree", "good")
    share = abs(counted - by_hand) / max(by_hand, 1)
    tone = "plain" if share < 0.005 else "bad"
    return Cell(f"differ by {percent(share)}", tone)
