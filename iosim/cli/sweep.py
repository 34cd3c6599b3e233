"""`iosim sweep`: the same over lists, as a table, as data, as a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iosim.cli.flags import (
    Command,
    Flag,
    Many,
    One,
    Values,
    chip_flags,
    output_flags,
    path,
    run_flags,
)

if TYPE_CHECKING:
    from pathlib import Path

    from iosim.cli.requests import Request
    from iosim.result import Result

ABOUT = """The runs of analyze over comma lists: every combination, one row each.

Every flag under Attention, Matrix product, Streams and Schedule takes a list, and so do --profile
and --kernel: --tile 64x64,128x64 --seqlen 1k,4k. Without --tile, and with a --plot or no list at
all, a list of usual tiles is taken."""
DATA, FIGURES = (".json", ".csv", ".md"), (".png", ".svg")
_SQUARE = tuple((side, side) for side in (128, 256, 512, 1024, 2048))
USUAL_TILES = {
    ("Attention", "gpu"): (
        (32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (256, 128), (256, 256),
    ),
    ("Attention", "tpu"): _SQUARE,
    ("Gemm", "gpu"): (
        (32, 32, 32), (64, 64, 32), (128, 64, 64), (128, 128, 64), (256, 128, 64), (256, 256, 64),
    ),
    ("Gemm", "tpu"): tuple((side, side, side) for side, _ in _SQUARE),
}  # fmt: skip


def run(values: Values) -> None:
    """The command."""
    from iosim.cli import output
    from iosim.report.files import write_whole
    from iosim.report.sweeps import sweep_table, varying
    from iosim.result import document

    targets = _targets(values)
    request = _request(values)
    results = results_of(request)
    given = [name.replace("_", "-") for name in request.axes]
    names = varying(results, given)
    table = sweep_table(results, names, request.how.cache)
    for target in targets:
        content = _content(target, request, results, names, values.command)
        write_whole(target, content)
        output.say(f"iosim: wrote {target}")
    if values.one("json"):
        output.print_json(document(results))
        return
    output.print_lines(header(request, results, names))
    output.print_tables([table], whole=True)


def _targets(values: Values) -> list[Path]:
    """The files to write; all of them are possible, or RequestError before any work."""
    from iosim.errors import RequestError
    from iosim.report.files import require_suffix, require_writable

    possible = {"output": (*DATA, *FIGURES), "plot": FIGURES}
    found: list[Path] = [values.one(name) for name in possible if name in values.given]
    for name, target in zip((n for n in possible if n in values.given), found, strict=True):
        require_suffix(target, possible[name])
        require_writable(target)
    if len(found) == 2 and found[0] == found[1]:
        raise RequestError(f"-o and --plot both name {str(found[0])!r}")
    return found


def _request(values: Values) -> Request:
    """The request; with the usual tiles where the flags leave the choice of tiles open."""
    from dataclasses import replace

    from iosim.cli.requests import request_of

    request = request_of(values)
    lists = any(len(found) > 1 for found in request.axes.values())
    if "tile" in request.axes or (lists and "plot" not in values.given):
        return request
    kernel, chip = request.kernels[0], request.chips[0]
    usual = USUAL_TILES.get((kernel.problem.__name__, chip.machine))
    return replace(request, axes={**request.axes, "tile": usual}) if usual else request


def results_of(request: Request) -> list[Result]:
    """The results, with a bar while they come."""
    from iosim.cli import output
    from iosim.study.sweep import check, run

    chosen = request.points
    check(chosen)
    names = [kernel.name for kernel in request.kernels]
    output.warn_if_cold({chip.machine for chip in request.chips}, names)
    with output.progress("runs", len(chosen)) as told:
        return output.interruptibly(lambda: run(chosen, request.how, told))


def header(request: Request, results: list[Result], names: tuple[str, ...]) -> list[str]:
    """What is the same in all rows."""
    from iosim.report.analysis import chip_line
    from iosim.report.words import problems_text

    chips = [chip_line(chip, request.how.clock_hz or chip.cores.clock_hz) for chip in request.chips]
    kernels = ", ".join(kernel.name for kernel in request.kernels)
    problem = problems_text([result.problem for result in results], names)
    varied = ", ".join((*names, "tile")) if "tile" in request.axes else ", ".join(names)
    runs = f"{len(results)} run{'s' if len(results) > 1 else ''} of {kernels}"
    how = f"{runs}, over {varied or 'one point'}{_caches(request)}"
    what = "× compulsory: HBM bytes, what is left dirty included, over those that nothing avoids"
    return [*chips, problem, *request.notes, how, what, ""]


def _caches(request: Request) -> str:
    """`; cold caches`, where a chip has any."""
    has = any("l2" in chip.levels for chip in request.chips)
    return f"; {request.how.cache} caches" if has else ""


def _content(
    target: Path, request: Request, results: list[Result], names: tuple[str, ...], command: str
) -> str | bytes:
    """What stands in a file of that suffix."""
    from iosim.cli import output
    from iosim.report.results import csv_rows
    from iosim.report.sweeps import sweep_table
    from iosim.report.tables import as_csv, as_markdown
    from iosim.result import document

    suffix = target.suffix.lower()
    if suffix in FIGURES:
        return _figure(suffix, request, results, names, command)
    whole: dict[str, Any] = document(results)
    if suffix == ".json":
        return output.as_json(whole)
    if suffix == ".csv":
        return as_csv(csv_rows(whole["results"]))
    lines = "\n".join(f"{line}  " for line in header(request, results, names) if line)
    return f"{lines}\n\n{as_markdown([sweep_table(results, names, request.how.cache)])}"


def _figure(
    suffix: str, request: Request, results: list[Result], names: tuple[str, ...], command: str
) -> bytes:
    from iosim import __version__
    from iosim.report.figures import traffic_by_tile
    from iosim.report.words import problems_text

    problem = problems_text([result.problem for result in results], names)
    chips = ", ".join(f"{chip.title} ({chip.name})" for chip in request.chips)
    kernels = ", ".join(kernel.name for kernel in request.kernels)
    how = f"{kernels} on {chips}\n{problem}{_caches(request)}"
    return traffic_by_tile(
        results,
        names,
        request.how.cache,
        title=f"HBM traffic against tile size\n{how}",
        footer=f"simulated by iosim {__version__}: {command}",
        suffix=suffix,
    )


COMMAND = Command(
    "sweep",
    run,
    ABOUT,
    [
        *chip_flags(Many),
        *run_flags(Many),
        Flag(["--plot"], "Output", "HBM traffic against tile size: .png, .svg.",
             type=One(path, "FILE")),
        *output_flags(", ".join((*DATA, *FIGURES))),
    ],
)  # fmt: skip
