"""A small picture of a launch: which tile is read when, one line per tile, one column per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

READ, WRITTEN, BOTH, ADDED = "read", "written", "read and written", "added to"
SIGNS = {READ: "█", WRITTEN: "░", BOTH: "▓", ADDED: "+"}
_RANK = (READ, WRITTEN, ADDED, BOTH)  # where tiles share a line, the last of these is shown
MORE = "⋮"
MOST_LINES = 8  # of one operand; more tiles share lines


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One operand: `marks` says of (tile, column) what happens there; `tiles` it has in all.

    A tile is a box that some block reads or writes, by address; a column is a step of a block.
    """

    operand: str
    tiles: int
    marks: dict[tuple[int, int], str]


@dataclass(frozen=True, kw_only=True)
class Calendar:
    """The first blocks of a launch: how many steps each has, and a strip for every operand."""

    launch: str
    blocks: int  # of the launch
    steps: tuple[int, ...]  # of the blocks that are shown
    strips: tuple[Strip, ...]


def legend(calendars: Iterable[Calendar]) -> str:
    """What the signs of these pictures mean, those that occur."""
    seen = {mark for c in calendars for strip in c.strips for mark in strip.marks.values()}
    return ", ".join(f"{SIGNS[mark]} {mark}" for mark in SIGNS if mark in seen)


def picture(calendar: Calendar) -> list[str]:
    """The lines of one launch: a head with the blocks, then a strip for every operand."""
    width = max(len(strip.operand) for strip in calendar.strips)
    margin = width + 4
    heads = [_head(index, n) for index, n in enumerate(calendar.steps)]
    lines = [title(calendar), " " * margin + _bar(calendar.steps).join(heads).rstrip()]
    for strip in calendar.strips:
        lines += _strip_lines(strip, calendar.steps, width)
    return lines


def title(calendar: Calendar) -> str:
    """Which blocks of how many a picture shows."""
    shown = len(calendar.steps)
    which = "block 0" if shown == 1 else f"blocks 0 to {shown - 1}"
    what = f"{which} of {calendar.blocks}" if shown < calendar.blocks else "all blocks"
    return f"{calendar.launch}, {what}"


def _bar(steps: tuple[int, ...]) -> str:
    """What stands between two blocks; nothing where each is one column."""
    return "│" if max(steps) > 1 else ""


def _head(index: int, width: int) -> str:
    texts = (f"block {index}", str(index), str(index % 10))
    return next(text for text in texts if len(text) <= width).ljust(width)


def _strip_lines(strip: Strip, steps: tuple[int, ...], width: int) -> list[str]:
    """A line per tile, or per few neighbouring tiles where there are many."""
    used = max(tile for tile, _ in strip.marks)
    least = -(-(used + 1) // MOST_LINES)
    share = next(s for s in range(least, used + 2) if strip.tiles % s == 0 or s > 2 * least)
    lines = []
    for first in range(0, used + 1, share):
        row = [" "] * sum(steps)
        for (tile, column), mark in strip.marks.items():
            if first <= tile < first + share:
                row[column] = _stronger(row[column], SIGNS[mark])
        name = strip.operand if first == 0 else ""
        lines.append(f"{name:<{width}} {first:>2} {_in_blocks(row, steps)}".rstrip())
    if used + share < strip.tiles:
        lines.append(f"{'':<{width}} {MORE:>2}")  # tiles of blocks that are not shown
    return lines


def _in_blocks(row: list[str], steps: tuple[int, ...]) -> str:
    parts, begin = [], 0
    for count in steps:
        parts.append("".join(row[begin : begin + count]))
        begin += count
    return _bar(steps).join(parts)


def _stronger(one: str, other: str) -> str:
    order = [" ", *(SIGNS[mark] for mark in _RANK)]
    return max(one, other, key=order.index)
