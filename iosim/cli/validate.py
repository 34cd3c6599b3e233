"""`iosim validate COUNTERS`: predicted beside measured, errors by family and level."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iosim.cli.flags import (
    Command,
    Flag,
    Many,
    One,
    Values,
    between,
    output_flags,
    path,
    whole,
    word,
)
from iosim.errors import RequestError, unknown_name

if TYPE_CHECKING:
    from iosim.chip import Chip
    from iosim.counters.table import CounterTable
    from iosim.validation.compare import Comparison

ABOUT = """Predicted beside measured counters: errors by family and level.

COUNTERS is a file of JSON lines, one kernel launch a line. Rows of Nsight Compute counters do not
name their chip: --profile does. Only launch facts of a row are used, never a counter or a time."""
SUFFIXES = (".json", ".csv", ".md")


def run(values: Values) -> None:
    """The command."""
    from iosim.cli import output
    from iosim.counters.table import read_table
    from iosim.profiles import load_profile
    from iosim.report.files import require_suffix, require_writable

    target: Path | None = values.one("output")
    if target is not None:
        require_suffix(target, SUFFIXES)
        require_writable(target)
    counters: Path = values.one("counters")
    profile = values.one("profile")
    chip = load_profile(profile) if profile else None
    families = values.many("family")
    table = read_table(counters)
    _require_meaning(table, chip, families, counters)
    comparisons = _compared(values, counters, chip, families, len(table.rows))
    if target is not None:
        _write(target, comparisons)
    if values.one("json"):
        from iosim.validation.compare import document

        output.print_json(document(comparisons))
        return
    named = f", on {chip.title} ({chip.name})" if chip else ""
    asked = sum(c.skipped is None for c in comparisons)
    output.print_lines([f"{counters}: {asked:,} of {len(comparisons):,} rows predicted{named}", ""])
    output.print_tables(_tables(comparisons))


def _require_meaning(
    table: CounterTable, chip: Chip | None, families: tuple[str, ...], counters: Path
) -> None:
    """Raises RequestError where nothing could be predicted: no chip, or no such family."""
    if chip is None and any(row.kind == "gpu" for row in table.rows):
        raise RequestError(f"the rows of {counters} do not name their chip; give --profile NAME")
    known = {row.family for row in table.rows}
    for family in families:
        if family not in known:
            raise unknown_name("family", family, known)


def _compared(
    values: Values, counters: Path, chip: Chip | None, families: tuple[str, ...], rows: int
) -> list[Comparison]:
    from iosim.cli import output
    from iosim.validation.compare import validate

    first = values.one("seed", 0)
    seeds = range(first, first + values.one("seeds", 1))
    machine = chip.machine if chip else "tpu"
    output.warn_if_cold([machine], [])
    with output.progress("rows", rows) as told:
        return output.interruptibly(
            lambda: validate(
                counters,
                chip,
                families=families,
                seeds=tuple(seeds),
                progress=lambda done, _: told(done),
            )
        )


def _tables(comparisons: list[Comparison]) -> list[Any]:
    from iosim.report.errors import error_table, skipped_table
    from iosim.validation.compare import family_errors

    tables = (error_table(family_errors(comparisons)), skipped_table(comparisons))
    return [table for table in tables if table is not None and table.rows]


def _write(target: Path, comparisons: list[Comparison]) -> None:
    from iosim.cli import output
    from iosim.report.files import write_whole
    from iosim.report.tables import as_csv, as_markdown, flat
    from iosim.validation.compare import document

    suffix = target.suffix.lower()
    whole = document(comparisons)
    if suffix == ".json":
        content = output.as_json(whole)
    elif suffix == ".csv":
        content = as_csv([flat(row) for row in whole["rows"]])
    else:
        content = as_markdown(_tables(comparisons))
    write_whole(target, content)
    output.say(f"iosim: wrote {target}")


COMMAND = Command(
    "validate",
    run,
    ABOUT,
    [
        click.Argument(["counters"], type=One(path, "COUNTERS"), metavar="COUNTERS"),
        Flag(["--profile"], "What", "The chip of rows that do not name theirs.",
             type=One(word, "NAME")),
        Flag(["--family"], "What", "Only these families.", type=Many(word, "NAME,…")),
        Flag(["--seed"], "How it is run", "Seed of how blocks drift apart (0).",
             type=One(whole, "N")),
        Flag(["--seeds"], "How it is run", "Seeds from --seed on; several give a band.",
             type=One(between(1, 1000), "K")),
        *output_flags(", ".join(SUFFIXES)),
    ],
)  # fmt: skip
