"""Two result documents compared, kernel by kernel: what was asked differently, what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from iosim.errors import RequestError
from iosim.report.tables import Cell, Table, cells
from iosim.report.words import LEVELS, NOTHING, percent, ratio, resource, seconds
from iosim.units import format_bytes, format_capacity, format_count

Entry = Mapping[str, Any]
_ASKED = ("profile", "dtype", "order", "clock_hz")


def differences(first: Sequence[Entry], second: Sequence[Entry]) -> list[dict[str, Any]]:
    """One record per pair of results, each value as [first, second].

    Results are paired by kernel; where a kernel stands several times, by everything asked for.
    Two lists of one are paired whatever they hold. Raises RequestError where nothing matches.
    """
    if len(first) == len(second) == 1:
        return [_difference(first[0], second[0])]
    pairs = list(_pairs(first, second))
    if not pairs:
        names = [sorted({entry["kernel"] for entry in side}) for side in (first, second)]
        raise RequestError(
            f"nothing to compare: one side has {', '.join(names[0])}, the other "
            f"{', '.join(names[1])}, and no run is in both"
        )
    return [_difference(a, b) for a, b in pairs]


def _pairs(first: Sequence[Entry], second: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    counts = [Counter(entry["kernel"] for entry in side) for side in (first, second)]
    for entry in first:
        name = entry["kernel"]
        alone = counts[0][name] == counts[1][name] == 1
        for other in second:
            if other["kernel"] == name and (alone or _asked(other) == _asked(entry)):
                yield entry, other
                break


def _asked(entry: Entry) -> dict[str, Any]:
    """Everything that was asked for, flat."""
    asked = {name: entry.get(name) for name in _ASKED}
    asked["tile"] = "x".join(str(side) for side in entry["tile"].values())
    asked.update(entry["problem"])
    schedule = entry.get("schedule")
    asked.update(schedule if isinstance(schedule, Mapping) else {})
    return asked


def _difference(a: Entry, b: Entry) -> dict[str, Any]:
    asked = (_asked(a), _asked(b))
    names = dict.fromkeys((*asked[0], *asked[1]))
    changed = {n: [asked[0].get(n), asked[1].get(n)] for n in names}
    operands = dict.fromkeys((*a["operands"], *b["operands"]))
    return {
        "kernel": [a["kernel"], b["kernel"]],
        "profile": [a["profile"], b["profile"]],
        "changed": {n: pair for n, pair in changed.items() if pair[0] != pair[1]},
        "fits": [a.get("fits"), b.get("fits")],
        "why_not": [a.get("why_not"), b.get("why_not")],
        "footprint_bytes": [a.get("footprint_bytes"), b.get("footprint_bytes")],
        "traffic": _both(a["traffic"], b["traffic"]),
        "operands": {
            name: _both(a["operands"].get(name), b["operands"].get(name)) for name in operands
        },
        "flops": [a.get("flops"), b.get("flops")],
        "exps": [a.get("exps"), b.get("exps")],
        "floor_s": [a.get("floor_s"), b.get("floor_s")],
        "limiter": [a.get("limiter"), b.get("limiter")],
    }


def _both(a: Entry | None, b: Entry | None) -> dict[str, list[Any]]:
    names = dict.fromkeys((*(a or {}), *(b or {})))
    return {name: [(a or {}).get(name), (b or {}).get(name)] for name in names}


def difference_table(record: Mapping[str, Any]) -> Table:
    """One pair as a table: what was asked differently, bytes by level, bytes by operand."""
    rows: list[tuple[Cell, ...]] = [
        cells(name, _plain(a), _plain(b), "") for name, (a, b) in record["changed"].items()
    ]
    rows.append(cells("fits", *(_fits(fits) for fits in record["fits"]), ""))
    rows.append(_row("on-chip memory of a block", record["footprint_bytes"], format_capacity))
    rows.append((Cell("bytes by level", "strong"),))
    rows += [_row(LEVELS.get(n, n), pair, format_bytes) for n, pair in record["traffic"].items()]
    rows.append((Cell("bytes by operand", "strong"),))
    for name, fields in record["operands"].items():
        for field, pair in fields.items():
            if field in LEVELS and any(pair) and None not in pair:
                rows.append(_row(f"{name} {LEVELS[field]}", pair, format_bytes))
    rows.append((Cell("work and floor", "strong"),))
    rows.append(_row("flops", record["flops"], format_count))
    if any(record["exps"]):
        rows.append(_row("exps", record["exps"], format_count))
    rows.append(_row("floor", record["floor_s"], seconds))
    rows.append(cells("limited by", *(resource(name) for name in record["limiter"]), ""))
    notes = [f"{side}: {why}" for side, why in zip("AB", record["why_not"], strict=True) if why]
    return Table(
        title=_title(record),
        heads=("", "A", "B", "B against A"),
        rows=tuple(rows),
        align="lrrr",
        notes=tuple(notes),
    )


def _title(record: Mapping[str, Any]) -> str:
    sides = [f"{k} on {p}" for k, p in zip(record["kernel"], record["profile"], strict=True)]
    return sides[0] if sides[0] == sides[1] else f"A: {sides[0]}, B: {sides[1]}"


def _plain(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _fits(fits: bool | None) -> Cell:
    words = {True: Cell("yes", "good"), False: Cell("no", "bad")}
    return words[fits] if isinstance(fits, bool) else Cell(NOTHING, "faint")


def _row(label: str, pair: Sequence[Any], text: Any) -> tuple[Cell, ...]:
    said = (text(value) if isinstance(value, int | float) else NOTHING for value in pair)
    return cells(label, *said, _change(*pair))


def _change(a: Any, b: Any) -> Cell:
    """How b differs from a: `same`, `+3.1 %`, `2.00 ×`."""
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return Cell("")
    if a == b:
        return Cell("same", "faint")
    if not a:
        return Cell("from nothing")
    if 0.5 < b / a < 2:
        return Cell(f"{'+' if b > a else '−'}{percent(abs(b / a - 1))}")
    return Cell(ratio(b, a) if b > a else f"{b / a:.3g} ×")
