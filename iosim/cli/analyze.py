"""`iosim analyze`: kernels on a chip, side by side and by operand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iosim.cli.flags import Command, Flag, One, Values, chip_flags, output_flags, run_flags, word
from iosim.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from iosim.cli.requests import Request
    from iosim.report.tables import Table
    from iosim.result import Result

ABOUT = """Bytes per level and operand, work, bounds and what limits, of kernels on a chip.

With nothing but a chip: standard attention beside the FlashAttention kernels, batch 1, 16 heads,
4096 rows of 128 elements. Sizes are written 4096, 4k or 64MiB."""
SUFFIXES = (".json", ".csv", ".md")
_NOT_IN_AGAINST = ("against", "output", "json")


def run(values: Values) -> None:
    """The command."""
    from iosim.cli import output
    from iosim.cli.requests import request_of
    from iosim.report.files import require_suffix, require_writable

    target: Path | None = values.one("output")
    if target is not None:
        require_suffix(target, SUFFIXES)
        require_writable(target)
    requests = [request_of(values)]
    if "against" in values.given:
        requests.append(request_of(against(values)))
    outcomes = [results_of(request) for request in requests]
    document = document_of(outcomes)
    if target is not None:
        write(target, document, requests, outcomes)
    if values.one("json"):
        output.print_json(document)
        return
    output.print_lines(header(requests[0], outcomes[0]))
    output.print_tables(tables_of(requests[0], outcomes[0]))
    if len(outcomes) > 1:
        output.print_tables(difference_tables(document))


def against(values: Values) -> Values:
    """The values of the second run: those of the first, and what --against changes."""
    text = values.one("against")
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise RequestError(
            f"--against {text!r}: {error}".replace("No closing", "no closing")
        ) from error
    if not arguments:
        raise RequestError('--against is empty; write flags, such as --against "--tile 128x64"')
    changed = Values(COMMAND.make_context("analyze --against", arguments))
    wrong = [name for name in _NOT_IN_AGAINST if name in changed.given]
    if wrong:
        raise RequestError(f"--{wrong[0]} has no meaning inside --against")
    changed.given = {**values.given, **changed.given}
    return changed


def results_of(request: Request) -> list[Result]:
    """The results of a request, in the order of its kernels."""
    from iosim.cli import output
    from iosim.study.sweep import check, run

    chosen = request.points
    check(chosen)
    names = [kernel.name for kernel in request.kernels]
    output.warn_if_cold({chip.machine for chip in request.chips}, names)
    with output.spinner(f"simulating {', '.join(names)}"):
        return output.interruptibly(lambda: run(chosen, request.how))


def document_of(outcomes: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """The JSON: the results; with --against also those of the second run and the difference."""
    from iosim.report.difference import differences
    from iosim.result import document

    first = document(list(outcomes[0]))
    if len(outcomes) == 1:
        return first
    second = document(list(outcomes[1]))
    diff = differences(first["results"], second["results"])
    return {**first, "against": second["results"], "diff": diff}


def header(request: Request, results: Sequence[Result]) -> list[str]:
    """What was run, on what, and how, in words."""
    from iosim.report.analysis import chip_line
    from iosim.report.words import problem_text

    chip = results[0].chip
    seeds = request.how.seeds
    drift = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    problems = dict.fromkeys(problem_text(result.problem) for result in results)
    how = f"every cache line, {drift}" if chip.machine == "gpu" else "every window"
    return [chip_line(chip, results[0].clock_hz), *problems, *request.notes, f"counted: {how}", ""]


def tables_of(request: Request, results: Sequence[Result]) -> list[Table]:
    """All tables of one run."""
    from iosim.report.analysis import forms_table, launch_table, operand_table, side_by_side
    from iosim.report.story import story

    tables = [side_by_side(results, request.how.cache)]
    reasons = tuple(why_not(request, result) for result in results if not result.fits)
    tables[0] = with_notes(tables[0], (*reasons, *story(results, request.how.cache)))
    for result in results:
        if result.launches:
            more = (operand_table(result), launch_table(result), forms_table(result))
            tables += [table for table in more if table is not None]
    return tables


def with_notes(table: Table, notes: tuple[str, ...]) -> Table:
    """The table with lines below it."""
    from dataclasses import replace

    return replace(table, notes=table.notes + notes)


def why_not(request: Request, result: Result) -> str:
    """Why a block does not fit, and the nearest tile that does."""
    from iosim.report.words import tile_text
    from iosim.study.sweep import nearest_fit

    kernel = next(k for k in request.kernels if k.name == result.kernel)
    tile = nearest_fit(result, kernel)
    hint = f"; --tile {tile_text(tile)} fits" if tile else ""
    return f"{result.kernel} {tile_text(result.schedule.tile)}: {result.why_not}{hint}"


def difference_tables(document: dict[str, Any]) -> list[Table]:
    """The second run beside the first."""
    from iosim.report.difference import difference_table

    return [difference_table(entry) for entry in document["diff"]]


def write(
    target: Path,
    document: dict[str, Any],
    requests: Sequence[Request],
    outcomes: Sequence[Sequence[Result]],
) -> None:
    """Writes the file of -o in the form that its suffix names."""
    from iosim.cli import output
    from iosim.report.files import write_whole
    from iosim.report.results import csv_rows
    from iosim.report.tables import as_csv, as_markdown

    if target.suffix.lower() == ".json":
        content = output.as_json(document)
    elif target.suffix.lower() == ".csv":
        content = as_csv(csv_rows([*document["results"], *document.get("against", ())]))
    else:
        parts = [
            "\n".join([*(f"{line}  " for line in header(request, results) if line), ""])
            + "\n"
            + as_markdown(tables_of(request, results))
            for request, results in zip(requests, outcomes, strict=True)
        ]
        if "diff" in document:
            parts.append(as_markdown(difference_tables(document)))
        content = "\n".join(parts)
    write_whole(target, content)
    output.say(f"iosim: wrote {target}")


COMMAND = Command(
    "analyze",
    run,
    ABOUT,
    [
        *chip_flags(One),
        *run_flags(One),
        Flag(["--against"], "Output", 'A second run to compare with: "--tile 128x64".',
             type=One(word, "FLAGS")),
        *output_flags(", ".join(SUFFIXES)),
    ],
)  # fmt: skip
