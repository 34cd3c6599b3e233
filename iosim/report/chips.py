"""The tables of `profiles`: all chips in a line each, one chip with every number and its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from iosim.chip import Chip, Fact
from iosim.report.tables import Cell, Table, cells
from iosim.units import DTYPE_BYTES, format_bytes, format_capacity, format_count

#: the unit that the end of a field's name says
_UNITS = {
    "bytes_per_clock": "bytes per clock",
    "bytes_per_s": "bytes per second",
    "flops_per_s": "flops per second",
    "per_core_per_clock": "per core and clock",
    "cycles": "cycles",
    "bytes": "bytes",
    "hz": "Hz",
    "spread": "share",
}
_KIND_TONES = {"published": "good", "measured": "good", "assumed": "bad"}


def chip_table(chips: Iterable[Chip]) -> Table:
    """One row per chip."""
    rows = [
        cells(
            chip.name,
            chip.title,
            ", ".join(chip.aliases),
            f"{chip.cores_used}",
            f"{format_bytes(chip.dram.bandwidth_bytes_per_s)}/s",
            in_words("bytes", chip.dram.capacity_bytes),
            _on_chip(chip),
            _peak(chip),
        )
        for chip in chips
    ]
    heads = ("profile", "chip", "also", "cores", "HBM", "of", "on chip", "16-bit\nflop/s")
    return Table(title="", heads=heads, rows=tuple(rows), align="lllrrrrr")


def _on_chip(chip: Chip) -> str:
    """The memory that decides about HBM traffic: the L2 of a GPU, the VMEM of a TPU's core."""
    for name in ("l2", "vmem"):
        if name in chip.levels:
            level = chip.levels[name]
            units = level.partitions if level.scope == "partition" else 1
            return f"{name.upper()} {format_capacity(level.capacity_bytes * units)}"
    return ""


def _peak(chip: Chip) -> str:
    wide = [peak for peak in chip.peaks if DTYPE_BYTES[peak.dtype] == 2]
    return format_count(wide[0].flops_per_s) if wide else ""


def fact_tables(chip: Chip) -> list[Table]:
    """Every number of a chip: value, what that is, kind, source; one table a section."""
    sections: dict[str, list[tuple[Cell, ...]]] = {}
    for where, fact in chip.facts.items():
        section, label = _place(chip, where)
        rows = sections.setdefault(section, [])
        field = where.rpartition(".")[2]
        said = number(fact.value), in_words(field, fact.value)
        rows.append(cells(label, *said, Cell(fact.kind, _KIND_TONES[fact.kind]), fact.source))
        for value, source in fact.other:
            others = ("", number(value), in_words(field, value), "other", source)
            rows.append(tuple(Cell(text, "faint") for text in others))
    return [
        Table(
            title=section,
            heads=("field", "value", "that is", "kind", "source"),
            rows=tuple(rows),
            align="lrrll",
            wraps=(4,),
        )
        for section, rows in sections.items()
    ]


def _place(chip: Chip, where: str) -> tuple[str, str]:
    """The table and the row of a number: a rate or a peak is called by what it is the rate of."""
    section, _, field = where.rpartition(".")
    kind, _, rest = section.partition(".")
    if kind == "rates":
        rate = chip.rates[int(rest)]
        label = " ".join(filter(None, (rate.unit, rate.path, rate.dtype)))
        return kind, label if field == "per_core_per_clock" else f"{label}, {field}"
    if kind == "peaks":
        peak = chip.peaks[int(rest)]
        return kind, f"{peak.dtype}, by {peak.path}"
    return rest or kind, field


def number(value: float) -> str:
    """A number without rounding: `4,800,000,000,000`, `0.05`."""
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def unit_of(field: str) -> str:
    """The unit that a field's name ends in; nothing for a plain count."""
    return next((unit for end, unit in _UNITS.items() if field.endswith(end)), "")


def in_words(field: str, value: float) -> str:
    """A value as a person says it: `4.8 TB/s`, `227 KiB`, `1.755 GHz`; else its unit alone."""
    unit = unit_of(field)
    if unit == "bytes":
        return format_capacity(value) if _is_binary(value) else format_bytes(value)
    if unit == "bytes per second":
        return f"{format_bytes(value)}/s"
    if unit == "flops per second":
        return f"{format_count(value)}flop/s"
    if unit == "Hz":
        return f"{value / 1e9:.4g} GHz"
    if unit == "share":
        return f"{100 * value:.3g} %"
    return unit


def _is_binary(value: float) -> bool:
    """Whether a number of bytes is a round number of KiB, MiB or GiB."""
    power = max((p for p in (1024, 1024**2, 1024**3) if value >= p), default=1)
    return float(f"{value / power:.4g}") * power == value


def chip_json(chip: Chip) -> dict[str, Any]:
    """One chip with every number, its unit and its source."""
    return {
        "name": chip.name,
        "title": chip.title,
        "machine": chip.machine,
        "aliases": list(chip.aliases),
        "levels": {
            name: {"managed": level.managed, "scope": level.scope, "counter": level.counter}
            for name, level in chip.levels.items()
        },
        "rates": [dataclasses.asdict(rate) for rate in chip.rates],
        "peaks": [dataclasses.asdict(peak) for peak in chip.peaks],
        "numbers": {where: _fact_json(where, fact) for where, fact in chip.facts.items()},
    }


def _fact_json(where: str, fact: Fact) -> dict[str, Any]:
    return {
        "value": fact.value,
        "unit": unit_of(where),
        "kind": fact.kind,
        "source": fact.source,
        "other": [{"value": value, "source": source} for value, source in fact.other],
    }
