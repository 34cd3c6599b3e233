"""Figures of results, drawn with Matplotlib, as the bytes of a PNG or SVG file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from iosim.report.analysis import block_limit, own_writes
from iosim.report.sweeps import label_of
from iosim.report.words import tile_text
from iosim.result import Result
from iosim.units import format_bytes, format_capacity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

Tile = tuple[int, ...]
INK, FAINT, LIMIT = "#222222", "#777777", "#b3261e"
#: Okabe and Ito's colours, which colour-blind readers tell apart, without yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LOG_FROM = 6.0  # greatest over least from which on an axis is logarithmic
_SAME = 0.02  # totals so close are one line
_FOOTER_COLUMNS = 118


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a figure: the results of one kind, one per tile."""

    label: str
    colour: str
    marker: str
    results: dict[Tile, Result]


def traffic_by_tile(
    results: Sequence[Result],
    names: Sequence[str],
    cache: str,
    *,
    title: str,
    footer: str,
    suffix: str,
) -> bytes:
    """HBM traffic against tile size above, on-chip bytes of a block and their limit below.

    Tiles stand in order of the on-chip bytes that they need; `names` are the axes that tell lines
    apart. Compulsory bytes are dashed lines; tiles that do not fit are crosses beyond the limit.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tiles = ordered_tiles(results)
    series = series_of(results, names)
    with rc_context({"svg.hashsalt": "iosim", "font.size": 9, "axes.edgecolor": FAINT}):
        figure = Figure(figsize=(max(7.2, 1.6 + 0.75 * len(tiles)), 6.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _draw_traffic(above, series, tiles, cache)
        _draw_footprints(below, series, tiles)
        _shade(above, below, series, tiles)
        _dress(figure, above, below, tiles, title, footer)
        out = io.BytesIO()
        figure.savefig(out, format=suffix.removeprefix("."), dpi=150, metadata=_metadata(suffix))
    return out.getvalue()


def ordered_tiles(results: Sequence[Result]) -> list[Tile]:
    """The tiles, by the greatest number of on-chip bytes that any run needs for them."""
    needs: dict[Tile, int] = {}
    for result in results:
        tile = result.schedule.tile
        needs[tile] = max(needs.get(tile, 0), result.footprint_bytes)
    return sorted(needs, key=lambda tile: (needs[tile], tile))


def series_of(results: Sequence[Result], names: Sequence[str]) -> list[Series]:
    """Results that differ in nothing but the tile, as one line each."""
    groups: dict[str, dict[Tile, Result]] = {}
    for result in results:
        groups.setdefault(label_of(result, names, results), {})[result.schedule.tile] = result
    return [
        Series(
            label=label,
            colour=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            results=found,
        )
        for i, (label, found) in enumerate(groups.items())
    ]


def moved_bytes(result: Result, cache: str) -> int:
    """HBM bytes read and written, with those that are left to be written."""
    return result.traffic.dram_read_bytes + own_writes(result, cache)


def _draw_traffic(axes: Axes, series: Sequence[Series], tiles: Sequence[Tile], cache: str) -> None:
    values = []
    for line, above in zip(series, reversed(range(len(series))), strict=True):
        found = [(i, line.results[t]) for i, t in enumerate(tiles) if t in line.results]
        run = [(i, moved_bytes(r, cache)) for i, r in found if r.launches]
        values += [y for _, y in run]
        axes.plot(
            [i for i, _ in run],
            [y for _, y in run],
            color=line.colour,
            marker=line.marker,
            label=line.label,
            linewidth=min(6.0, 1.6 + above),  # of lines that lie on each other all can be seen
            markersize=min(11.0, 5.0 + 1.5 * above),
        )
    floors = _compulsory(series)
    for low, high, colour in floors:
        axes.axhline(high, color=colour, linestyle=(0, (4, 3)), linewidth=1.1)
        span = " to ".join(dict.fromkeys((_short_bytes(low), _short_bytes(high))))
        right = _is_free(axes, high, -1) >= _is_free(axes, high, 0)
        _note(axes, f"compulsory {span}", high, colour, right=right)
    _scale(axes, [*values, *(high for _, high, _ in floors)])
    axes.set_ylabel("HBM traffic, read + written")
    axes.yaxis.set_major_formatter(lambda value, _: _short_bytes(value))


def _compulsory(series: Sequence[Series]) -> list[tuple[int, int, str]]:
    """Compulsory totals as (least, greatest, colour), those that no eye tells apart as one.

    The colour is a line's own where no other line shares its total.
    """
    totals: dict[int, set[str]] = {}
    for line in series:
        for result in line.results.values():
            totals.setdefault(sum(result.compulsory), set()).add(line.colour)
    groups: list[list[int]] = []
    for total in sorted(totals):
        if groups and total <= groups[-1][0] * (1 + _SAME):
            groups[-1].append(total)
        else:
            groups.append([total])
    found = []
    for group in groups:
        colours = set().union(*(totals[total] for total in group))
        own = len(colours) == 1 and len(series) > 1
        found.append((group[0], group[-1], colours.pop() if own else INK))
    return found


def _is_free(axes: Axes, y: float, end: int) -> float:
    """How far the nearest line is from `y` at one end, as a factor."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    ends = [float(points[end]) for points in drawn if points.size and points.any()]
    return min((max(v / y, y / v) for v in ends if v not in (0, y)), default=1.0)


def _short_bytes(value: float) -> str:
    """`40 MB` for a tick, `33.7 MB` beside a line."""
    number, _, unit = format_bytes(value).partition(" ")
    return f"{float(number):.3g} {unit}"


def _note(axes: Axes, text: str, y: float, colour: str, *, right: bool) -> None:
    """A few words on a horizontal line, at one of its ends."""
    axes.annotate(
        text,
        (float(right), y),
        xycoords=("axes fraction", "data"),
        xytext=(-4 if right else 4, 5),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        color=colour,
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        zorder=1.5,  # below the lines, above the grid
    )


def _scale(axes: Axes, values: Sequence[int]) -> None:
    """Logarithmic where the values span much, else from zero."""
    least, most = min(values), max(values)
    if least > 0 and most / least >= _LOG_FROM:
        axes.set_yscale("log")
        axes.set_ylim(least / 1.5, most * 1.5)
        _log_ticks(axes)
    else:
        axes.set_ylim(0, most * 1.15)


def _log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 1e3 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_footprints(axes: Axes, series: Sequence[Series], tiles: Sequence[Tile]) -> None:
    """On-chip bytes of a block, once for lines that need the same, and the limits."""
    drawn: dict[tuple[Any, ...], Series] = {}
    for line in series:
        needs = tuple(
            (i, line.results[t].footprint_bytes, line.results[t].fits)
            for i, t in enumerate(tiles)
            if t in line.results
        )
        drawn.setdefault(needs, line)
    alone = len(drawn) < len(series) and len(drawn) == 1
    for needs, line in drawn.items():
        colour = FAINT if alone else line.colour
        axes.plot([i for i, _, _ in needs], [y for _, y, _ in needs], color=colour, linewidth=1)
        fit = [(i, y) for i, y, fits in needs if fits]
        out = [(i, y) for i, y, fits in needs if not fits]
        marker = "o" if alone else line.marker
        axes.plot(*_columns(fit), linestyle="", color=colour, marker=marker, markersize=4)
        axes.plot(*_columns(out), linestyle="", color=LIMIT, marker="x", markersize=7, zorder=3)
    limits = _limits(series)
    for limit, text in limits.items():
        axes.axhline(limit, color=LIMIT, linewidth=1.2)
        _note(axes, text, limit, LIMIT, right=False)
    axes.set_ylabel("on chip,\nof one block")
    most = max([*limits, *(y for needs in drawn for _, y, _ in needs)])
    if most > 4 * max(limits):
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(y for needs in drawn for _, y, _ in needs) / 1.5, most * 2)
    else:
        axes.set_ylim(0, most * 1.25)
        axes.yaxis.set_major_locator(_binary_ticks(most))
    axes.yaxis.set_major_formatter(lambda value, _: format_capacity(value) if value else "0")


def _binary_ticks(most: int) -> Locator:
    """Ticks at multiples of a power of two, about four of them."""
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(1 << max(0, (most // 3).bit_length() - 1))


def _columns(points: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [x for x, _ in points], [y for _, y in points]


def _limits(series: Sequence[Series]) -> dict[int, str]:
    """What one block may use, and on which chips."""
    chips = {r.chip.name: r.chip for line in series for r in line.results.values()}
    names: dict[int, list[str]] = {}
    for chip in chips.values():
        names.setdefault(block_limit(chip), []).append(chip.name)
    return {n: f"limit {format_capacity(n)} ({', '.join(who)})" for n, who in names.items()}


def _shade(above: Axes, below: Axes, series: Sequence[Series], tiles: Sequence[Tile]) -> None:
    """A faint red ground behind tiles that fit no line."""
    hidden = []
    for i, tile in enumerate(tiles):
        found = [line.results[tile] for line in series if tile in line.results]
        if not any(result.fits for result in found):
            hidden.append(i)
            for axes in (above, below):
                axes.axvspan(i - 0.5, i + 0.5, color=LIMIT, alpha=0.08, linewidth=0)
    if hidden:
        above.text(
            (hidden[0] + hidden[-1]) / 2,
            0.5,
            "does not fit",
            transform=above.get_xaxis_transform(),
            rotation=90 if len(hidden) < 2 else 0,
            ha="center",
            va="center",
            color=LIMIT,
            fontsize=9,
        )


def _dress(
    figure: Figure, above: Axes, below: Axes, tiles: Sequence[Tile], title: str, footer: str
) -> None:
    """Titles, ticks, legend, and where it comes from."""
    head, *more = title.split("\n")
    figure.suptitle(head, x=0.01, ha="left", fontsize=12, color=INK)
    above.set_title("\n".join(more), loc="left", fontsize=8.5, color=FAINT)
    below.set_xlim(-0.5, len(tiles) - 0.5)
    turned = 45 if len(tiles) > 12 else 0
    below.set_xticks(range(len(tiles)), [tile_text(t) for t in tiles], rotation=turned)
    below.set_xlabel("tile, by what it needs on chip")
    for axes in (above, below):
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if len(above.get_legend_handles_labels()[0]) > 1:
        above.legend(frameon=False, fontsize=8.5)
    lines = textwrap.wrap(footer, _FOOTER_COLUMNS)[:3]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=FAINT)


def _metadata(suffix: str) -> dict[str, Any]:
    """No date, so that equal figures are equal files."""
    return {"Date": None} if suffix == ".svg" else {"Software": "iosim"}
