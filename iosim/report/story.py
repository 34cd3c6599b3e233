"""Kernels on one problem in a sentence each: what goes over HBM, what comes again, what limits."""

from __future__ import annotations

from collections.abc import Sequence

from iosim.report.analysis import CORE_FIELDS, own_writes
from iosim.report.words import ratio, resource, seconds
from iosim.result import Result
from iosim.traffic import OperandTraffic
from iosim.units import format_bytes

_SAME = 0.02  # operands whose bytes differ by less are told together


def story(results: Sequence[Result], cache: str) -> list[str]:
    """One line per kernel that ran; none where there are fewer than two to compare."""
    told = [result for result in results if result.launches]
    if len(told) < 2:
        return []
    return [_sentence(result, told[0], cache) for result in told]


def _sentence(result: Result, first: Result, cache: str) -> str:
    parts = [_over_hbm(result, first, cache), _again(result), *_shared(result), *_idle(result)]
    limit = resource(result.limiter)
    parts.append(f"no faster than {seconds(result.floor_s)} ({limit})")
    return f"{result.kernel}: {'; '.join(part for part in parts if part)}"


def _hbm_bytes(result: Result, cache: str) -> int:
    return result.traffic.dram_read_bytes + own_writes(result, cache)


def _over_hbm(result: Result, first: Result, cache: str) -> str:
    moved = _hbm_bytes(result, cache)
    text = f"{format_bytes(moved)} over HBM, {ratio(moved, sum(result.compulsory))} compulsory"
    if result is first or result.problem != first.problem:
        return text
    before = _hbm_bytes(first, cache)
    if max(moved, before) < (1 + _SAME) * min(moved, before):
        return f"{text}, as much as {first.kernel}"
    if moved < before:
        return f"{text}, {ratio(before, moved)} less than {first.kernel}"
    return f"{text}, {ratio(moved, before)} more than {first.kernel}"


def _again(result: Result) -> str:
    """The operands that cross the cores' edge most, and how often they come from HBM."""
    fields = CORE_FIELDS[result.chip.machine]
    moved = {
        name: sum(getattr(row, field) for field in fields)
        for name, row in result.operands.items()
        if name != "local"
    }
    most = max(moved.values())
    names = [name for name, value in moved.items() if value >= (1 - _SAME) * most]
    rows = [result.operands[name] for name in names]
    total = sum(rows, OperandTraffic())
    who = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    core = result.chip.cores.name
    off_chip = total.dram_read_bytes + total.dram_write_bytes
    at_cores = sum(moved[name] for name in names)
    unique = sum(row.unique_bytes for row in rows)
    inside, outside = (
        (ratio(at_cores, unique), ratio(off_chip, unique))
        if unique
        else (format_bytes(at_cores), format_bytes(off_chip))
    )
    size = " of what they hold" if unique and len(names) > 1 else " of what it holds"
    return f"most moved: {who}, {inside}{size if unique else ''} at the {core}s, {outside} at HBM"


def _shared(result: Result) -> list[str]:
    """Whether one answer of L2 serves several cores (multicast)."""
    moved = result.traffic.l1_fill_bytes + result.traffic.l1_write_bytes
    if result.traffic.l2_from_l1_bytes >= (1 - _SAME) * moved:
        return []
    asked = format_bytes(result.traffic.l2_from_l1_bytes)
    return [f"L2 is asked for {asked} of {format_bytes(moved)}, the rest is multicast"]


def _idle(result: Result) -> list[str]:
    """Whether the longest launch has fewer blocks than the chip has cores."""
    longest = max(result.launches, key=lambda run: run.floor_s)
    cores = result.chip.cores_used
    if longest.launch.blocks >= cores:
        return []
    return [f"{longest.launch.blocks} blocks for {cores} {result.chip.cores.name}s"]
