"""A table apart from how it is shown: for a terminal (Rich), for Markdown, for a spreadsheet.

Cells are text; a `tone` says what a cell means (good, bad, faint, strong), never how it looks.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {"good": "green", "bad": "red", "faint": "dim", "strong": "bold", "plain": ""}
GAP = 2  # columns between two cells


@dataclass(frozen=True)
class Cell:
    """One cell: its text and what it means."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, the heads of the columns, rows of cells; `align` holds one of l, r per column.

    A row of one cell is a heading inside the table. Columns named in `wraps` may take several
    lines; all others keep theirs whole.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    align: str
    wraps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def widths(self) -> list[int]:
        """Characters that each column needs."""
        from rich.cells import cell_len

        full = [row for row in self.rows if len(row) == len(self.heads)]
        columns = zip(self.heads, *([cell.text for cell in row] for row in full), strict=True)
        return [
            max(cell_len(line) for text in column for line in text.split("\n"))
            for column in columns
        ]


def cells(*texts: str | Cell) -> tuple[Cell, ...]:
    """A row; plain text becomes a plain cell."""
    return tuple(text if isinstance(text, Cell) else Cell(text) for text in texts)


def split(table: Table, width: int) -> list[Table]:
    """`table` in pieces that fit `width`, each with the first column and as many others as go."""
    widths = [w + GAP for w in table.widths]
    groups: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        used = widths[0] + sum(widths[c] for c in groups[-1])
        if groups[-1] and used + widths[column] > width + GAP:
            groups.append([])
        groups[-1].append(column)
    if len(groups) == 1:
        return [table]
    return [_columns(table, [0, *group]) for group in groups]


def _columns(table: Table, kept: Sequence[int]) -> Table:
    rows = (tuple(row[c] for c in kept) if len(row) > 1 else row for row in table.rows)
    return replace(
        table,
        heads=tuple(table.heads[c] for c in kept),
        rows=tuple(rows),
        align="".join(table.align[c] for c in kept),
        wraps=tuple(i for i, c in enumerate(kept) if c in table.wraps),
    )


def show(tables: Iterable[Table], console: Console) -> None:
    """Prints tables, one below the other; where nobody looks, without blanks at line ends."""
    with console.capture() as captured:
        for table in tables:
            console.print(as_rich(table))
            for note in table.notes:
                console.print(note, style=STYLES["faint"], markup=False)
            console.print()
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    console.file.write(text)


def as_rich(table: Table) -> RenderableType:
    """The table for a terminal: a bold title, a rule below the heads, no frame."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(
        title=Text(table.title, style=STYLES["strong"]) if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - 1, 0, 0),
    )
    for i, head in enumerate(table.heads):
        rich.add_column(
            Text(head, style=STYLES["strong"]),
            justify="right" if table.align[i] == "r" else "left",
            no_wrap=i not in table.wraps,
            overflow="fold",
        )
    for row in table.rows:
        texts = [Text(cell.text, style=STYLES[cell.tone]) for cell in row]
        rich.add_row(*texts, *[""] * (len(table.heads) - len(texts)))
    return rich


def as_markdown(tables: Iterable[Table]) -> str:
    """The tables as GitHub shows them."""
    parts = []
    for table in tables:
        rules = ["---:" if a == "r" else "---" for a in table.align]
        lines = [_markdown_row(table.heads), _markdown_row(rules)]
        for row in table.rows:
            texts = [f"**{cell.text}**" if len(row) == 1 else cell.text for cell in row]
            lines.append(_markdown_row(texts + [""] * (len(table.heads) - len(texts))))
        title = [f"**{table.title}**", ""] if table.title else []
        notes = [line for note in table.notes for line in ("", note)]
        parts.append("\n".join([*title, *lines, *notes]))
    return "\n\n".join(parts) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
    escaped = (" ".join(text.replace("|", "\\|").split()) for text in texts)
    return f"| {' | '.join(escaped)} |"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row; the columns are all keys, in the order in which they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def flat(record: Mapping[str, Any], skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A nested JSON record as one row: `traffic.dram_read_bytes`; lists are left out."""
    row: dict[str, Any] = {}
    for name, value in record.items():
        if name in skip or isinstance(value, list):
            continue
        if isinstance(value, Mapping):
            row.update({f"{name}.{inner}": v for inner, v in flat(value).items()})
        else:
            row[name] = value
    return row
