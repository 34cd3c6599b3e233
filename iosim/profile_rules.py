"""The rules that hold between the values of one chip, and which of them it breaks."""

from __future__ import annotations

from collections.abc import Iterator

from iosim.chip import Chip, Level, Peak, Rate

Broken = tuple[str, object, str]  # field, its value (None: missing), the rule

_LEVELS = {"gpu": ("shared", "l1", "l2", "hbm"), "tpu": ("vmem", "hbm")}
_CACHE_ONLY = (
    "line_bytes",
    "sector_bytes",
    "ways",
    "far_latency_cycles",
    "home_run_bytes",
    "dirty_max_bytes",
    "dirty_before_bytes",
)
_PEAK_TOLERANCE = 0.01  # published peaks are rounded to three or four digits
_SECTORS_PER_LINE = 4  # the memory model keeps a mask of four bits for a line


def broken_rules(chip: Chip) -> Iterator[Broken]:
    """Every rule that `chip` breaks; the first is the one to tell."""
    yield from _cores(chip)
    yield from _on_chip_limits(chip)
    yield from _rates(chip)
    for i, peak in enumerate(chip.peaks):
        yield from _peak(chip, i, peak)
    yield from _missing_rates(chip)
    for name in _LEVELS[chip.machine]:
        if name not in chip.levels:
            need = ", ".join(_LEVELS[chip.machine])
            yield "levels", tuple(chip.levels), f"a {chip.machine} needs the levels {need}"
    for name, level in chip.levels.items():
        where = f"levels.{name}"
        yield from _level(where, level, max(chip.cores.clock_hz, chip.cores.peak_clock_hz))
        yield from (_cache if level.managed == "hardware" else _scratchpad)(where, level)


def _cores(chip: Chip) -> Iterator[Broken]:
    cores = chip.cores
    if cores.per_device > cores.count:
        rule = f"must not exceed cores.count = {cores.count}"
        yield "cores.per_device", cores.per_device, rule
    if not 0.5 <= cores.clock_hz / cores.peak_clock_hz <= 2:
        rule = f"must be in Hz, within a factor of 2 of peak_clock_hz = {cores.peak_clock_hz:.4g}"
        yield "cores.clock_hz", cores.clock_hz, rule
    if cores.resident_speed_spread >= 1:
        yield "cores.resident_speed_spread", cores.resident_speed_spread, "must be a share, below 1"


def _on_chip_limits(chip: Chip) -> Iterator[Broken]:
    limits, grid, vmem = chip.limits, chip.grid, chip.levels.get("vmem")
    if limits:
        room = limits.shared_per_core_bytes - limits.shared_reserved_per_block_bytes
        if limits.shared_per_block_bytes > room:
            rule = f"must not exceed shared_per_core_bytes less the reserved bytes = {room}"
            yield "limits.shared_per_block_bytes", limits.shared_per_block_bytes, rule
        if limits.warps_per_block > limits.warps_per_core:
            rule = f"must not exceed warps_per_core = {limits.warps_per_core}"
            yield "limits.warps_per_block", limits.warps_per_block, rule
    if grid and vmem and grid.scoped_limit_bytes > vmem.capacity_bytes:
        rule = f"must not exceed levels.vmem.capacity_bytes = {vmem.capacity_bytes}"
        yield "grid.scoped_limit_bytes", grid.scoped_limit_bytes, rule


def _rates(chip: Chip) -> Iterator[Broken]:
    for i, rate in enumerate(chip.rates):
        if rate.unit == "matrix" and not rate.dtype:
            yield f"rates.{i}.dtype", rate.dtype, "must name a dtype, as unit is matrix"
        if _key(rate) in map(_key, chip.rates[:i]):
            yield f"rates.{i}", _key(rate), "unit, path, dtype and min_rows stand there twice"


def _missing_rates(chip: Chip) -> Iterator[Broken]:
    have = {rate.unit for rate in chip.rates}
    for unit in ("matrix", "exp", "vector"):
        if unit not in have:
            yield "rates.unit", tuple(sorted(have)), f"at least one must be {unit}"
    peaks = {peak.dtype for peak in chip.peaks}
    for i, rate in enumerate(chip.rates):
        if rate.unit == "matrix" and rate.dtype not in peaks:
            yield f"rates.{i}.dtype", rate.dtype, "has a matrix rate but no peak, [[peaks]]"


def _key(rate: Rate) -> tuple[str, str, str, int]:
    return rate.unit, rate.path, rate.dtype, rate.min_rows


def _peak(chip: Chip, i: int, peak: Peak) -> Iterator[Broken]:
    where = f"peaks.{i}"
    if not peak.dtype:
        yield f"{where}.dtype", peak.dtype, "must name a dtype"
    if peak.dtype in (p.dtype for p in chip.peaks[:i]):
        yield f"{where}.dtype", peak.dtype, "has a peak already"
    rates = [
        r.per_core_per_clock
        for r in chip.rates
        if (r.unit, r.dtype, r.path) == ("matrix", peak.dtype, peak.path)
    ]
    if not rates:
        rule = f"needs a matrix rate of dtype {peak.dtype} and path {peak.path}"
        yield f"{where}.path", peak.path, rule
        return
    dense = chip.cores.count * max(rates) * chip.cores.peak_clock_hz
    if abs(dense - peak.flops_per_s) > _PEAK_TOLERANCE * dense:
        sparse = abs(2 * dense - peak.flops_per_s) <= 2 * _PEAK_TOLERANCE * dense
        hint = "; this is twice that, a sparsity figure" if sparse else ""
        rule = f"dense peak must be cores × rate × peak_clock_hz = {dense:.4g} within 1 %{hint}"
        yield f"{where}.flops_per_s", peak.flops_per_s, rule


def _level(where: str, level: Level, clock_hz: float) -> Iterator[Broken]:
    per_clock, per_s = level.bandwidth_bytes_per_clock, level.bandwidth_bytes_per_s
    hbm = level.name == "hbm"
    if not per_s and (hbm or not per_clock):
        rule = "the roofline needs it" if hbm else "needs it, or bandwidth_bytes_per_clock"
        yield f"{where}.bandwidth_bytes_per_s", None, rule
    if per_s and per_clock:
        rule = "must not stand beside bandwidth_bytes_per_s"
        yield f"{where}.bandwidth_bytes_per_clock", per_clock, rule
    nominal = per_s or per_clock * clock_hz
    if level.sustained_bytes_per_s > nominal:
        rule = f"must not exceed the nominal bandwidth = {nominal:.4g}"
        yield f"{where}.sustained_bytes_per_s", level.sustained_bytes_per_s, rule
    if hbm and level.scope != "chip":
        yield f"{where}.scope", level.scope, "must be chip, as all cores share it"
    if 0 < level.far_miss_latency_cycles < level.latency_cycles:
        rule = f"must be at least latency_cycles = {level.latency_cycles:g}"
        yield f"{where}.far_miss_latency_cycles", level.far_miss_latency_cycles, rule


def _scratchpad(where: str, level: Level) -> Iterator[Broken]:
    for key in _CACHE_ONLY:
        if getattr(level, key):
            yield f"{where}.{key}", getattr(level, key), 'only a cache has it, managed = "hardware"'
    if level.partitions != 1:
        yield f"{where}.partitions", level.partitions, 'only a cache has it, managed = "hardware"'


def _cache(where: str, level: Level) -> Iterator[Broken]:
    missing = [key for key in ("line_bytes", "sector_bytes", "ways") if not getattr(level, key)]
    if missing:
        yield from ((f"{where}.{key}", None, "a cache needs it") for key in missing)
        return
    for key in ("line_bytes", "sector_bytes"):
        size = getattr(level, key)
        if size & (size - 1):
            yield f"{where}.{key}", size, "must be a power of two"
    if level.line_bytes not in (level.sector_bytes * n for n in range(1, _SECTORS_PER_LINE + 1)):
        rule = f"must be 1 to {_SECTORS_PER_LINE} sectors of sector_bytes = {level.sector_bytes}"
        yield f"{where}.line_bytes", level.line_bytes, rule
    row_bytes = level.line_bytes * level.ways
    if level.capacity_bytes % row_bytes:
        rule = f"must be a multiple of line_bytes × ways = {row_bytes}"
        yield f"{where}.capacity_bytes", level.capacity_bytes, rule
    if level.partitions != 1:
        yield from _two_partitions(where, level)


def _two_partitions(where: str, level: Level) -> Iterator[Broken]:
    if level.partitions != 2:
        yield f"{where}.partitions", level.partitions, "must be 1 or 2"
    if level.scope != "partition":
        yield f"{where}.scope", level.scope, "must be partition, as partitions = 2"
    for key in ("far_latency_cycles", "home_run_bytes"):
        if not getattr(level, key):
            yield f"{where}.{key}", None, "a cache of two partitions needs it"
    if level.far_latency_cycles < level.latency_cycles:
        rule = f"must be at least latency_cycles = {level.latency_cycles:g}"
        yield f"{where}.far_latency_cycles", level.far_latency_cycles, rule
    run = level.home_run_bytes
    if run < level.line_bytes or run & (run - 1):
        rule = f"must be a power of two, at least line_bytes = {level.line_bytes}"
        yield f"{where}.home_run_bytes", level.home_run_bytes, rule
