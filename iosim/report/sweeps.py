"""The table of `sweep`, and what tells its rows apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from iosim.report.analysis import EMPTY, over_compulsory
from iosim.report.tables import Cell, Table, cells
from iosim.report.words import resource, seconds, tile_text
from iosim.result import Result
from iosim.units import format_bytes, format_capacity

_SHOWN_REASONS = 6


def axes_of(result: Result) -> dict[str, Any]:
    """Everything that was asked for, by the name of its flag; the tile is not among it."""
    asked: dict[str, Any] = {"profile": result.chip.name, "kernel": result.kernel}
    asked.update(dataclasses.asdict(result.problem))
    schedule = result.schedule
    asked.update(order=schedule.order, group=schedule.group, stages=schedule.stages)
    asked.update(warps=schedule.warps, registers=schedule.registers)
    return {name.replace("_", "-"): value for name, value in asked.items()}


def varying(results: Sequence[Result], given: Sequence[str]) -> tuple[str, ...]:
    """The axes among `given` on which results differ; kernel and profile count as given."""
    every = [axes_of(result) for result in results]
    names = dict.fromkeys(name for axes in every for name in axes)
    asked = {"profile", "kernel", *given}
    return tuple(n for n in names if n in asked and len({axes.get(n) for axes in every}) > 1)


def label_of(result: Result, names: Sequence[str], others: Sequence[Result]) -> str:
    """What tells a result apart from `others`: `flash2, seqlen 4096`.

    What is the same in all results of its kernel does not (an order, for a kernel without one).
    """
    axes = axes_of(result)
    same_kernel = [axes_of(other) for other in others if other.kernel == result.kernel]
    words = [
        _word(name, axes[name])
        for name in names
        if name == "kernel" or any(own.get(name) != axes.get(name) for own in same_kernel)
    ]
    return ", ".join(words) or result.kernel


def _word(name: str, value: Any) -> str:
    if name in ("profile", "kernel", "dtype"):
        return str(value)
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def sweep_table(results: Sequence[Result], names: Sequence[str], cache: str) -> Table:
    """One row per run: what tells it apart, what it needs on chip, what it moves, what limits."""
    columns: list[tuple[str, str, Callable[[Result], Cell | str]]] = [
        (name, "l" if name in ("profile", "kernel", "dtype", "order") else "r", _axis(name))
        for name in names
    ]
    columns += [
        ("tile", "r", lambda r: tile_text(r.schedule.tile)),
        ("on chip", "r", lambda r: format_capacity(r.footprint_bytes)),
        ("HBM\nread", "r", lambda r: _or_empty(r, format_bytes(r.traffic.dram_read_bytes))),
        ("HBM\nwrite", "r", lambda r: _or_empty(r, format_bytes(r.traffic.dram_write_bytes))),
        ("HBM\nboth", "r", _moved),
        ("× com-\npulsory", "r", lambda r: _or_empty(r, over_compulsory(r, cache))),
        ("floor", "r", lambda r: _or_empty(r, seconds(r.floor_s))),
        ("limit", "l", _limit),
    ]
    return Table(
        title="",
        heads=tuple(head for head, _, _ in columns),
        rows=tuple(cells(*(make(result) for _, _, make in columns)) for result in results),
        align="".join(align for _, align, _ in columns),
        notes=_reasons(results),
    )


def _axis(name: str) -> Callable[[Result], Cell | str]:
    def make(result: Result) -> Cell | str:
        value = axes_of(result).get(name)
        return EMPTY if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return make


def _or_empty(result: Result, text: str) -> Cell | str:
    return text if result.launches else EMPTY


def _moved(result: Result) -> Cell | str:
    traffic = result.traffic
    return _or_empty(result, format_bytes(traffic.dram_read_bytes + traffic.dram_write_bytes))


def _limit(result: Result) -> Cell | str:
    return resource(result.limiter) if result.fits else Cell("does not fit", "bad")


def _reasons(results: Sequence[Result]) -> tuple[str, ...]:
    """Why the tiles that do not fit do not, once each."""
    reasons = dict.fromkeys(
        f"{r.kernel} {tile_text(r.schedule.tile)} does not fit {r.chip.name}: {r.why_not}"
        for r in results
        if not r.fits
    )
    more = len(reasons) - _SHOWN_REASONS
    tail = (f"and {more} more that do not fit; --json says why",) if more > 0 else ()
    return (*list(reasons)[:_SHOWN_REASONS], *tail)
