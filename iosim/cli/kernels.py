"""`iosim kernels`: the algorithms, and one of them with loops, parameters and closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from iosim.cli import output
from iosim.cli.flags import Command, Flag, One, Values, word

if TYPE_CHECKING:
    from iosim.chip import Chip
    from iosim.launch import ClosedForm, Kernel
    from iosim.problem import Problem, Schedule

ABOUT = """The kernels; with NAME one of them: its loops, its parameters, its sources.

With --profile also the tile it takes there, what a block needs, and its closed forms for the
default problem."""
FORMAT = 1


def run(values: Values) -> None:
    """The command."""
    from iosim.kernels import kernel_names, load_kernel
    from iosim.profiles import load_profile

    name = values.one("name")
    profile = values.one("profile")
    chip = load_profile(profile) if profile else None
    kernels = [load_kernel(n) for n in ((name,) if name else kernel_names())]
    if values.one("json"):
        entries = [kernel_json(kernel, chip) for kernel in kernels]
        output.print_json({"format": FORMAT, "kernels": entries})
        return
    if name is None:
        _print_list(kernels, chip)
        return
    _print_one(kernels[0], chip)


def _print_list(kernels: list[Kernel], chip: Chip | None) -> None:
    from iosim.report.algorithms import kernel_table

    kernels = [k for k in kernels if chip is None or chip.machine in k.machines]
    output.print_tables([kernel_table(kernels)])
    output.print_lines(["iosim kernels NAME shows the loops and parameters of one."])


def _print_one(kernel: Kernel, chip: Chip | None) -> None:
    from iosim.report.algorithms import (
        form_table,
        kernel_lines,
        loop_nest,
        parameter_table,
        picture_lines,
        plan_lines,
    )
    from iosim.study.visits import sketch

    plan = _plan(kernel, chip) if chip else None  # refused before anything is printed
    output.warn_if_cold([], [kernel.launches.__module__.rsplit(".", 1)[-1]])
    drawn = picture_lines(sketch(kernel, _chips(chip)))
    output.print_lines([*kernel_lines(kernel), ""])
    output.print_whole([*loop_nest(kernel), ""])
    output.print_lines(drawn[:1])
    output.print_whole([*drawn[1:], ""])
    output.print_tables([parameter_table(kernel)])
    if chip is not None and plan is not None:
        output.print_lines([*plan_lines(kernel, *plan, chip), ""])
        forms = kernel.closed_forms(*plan, chip)
    else:
        forms = _forms(kernel)
    if forms:
        output.print_tables([form_table(forms, values=chip is not None)])
    if chip is None:
        output.print_lines(["With --profile NAME: its tile and the values on that chip."])


def _chips(first: Chip | None) -> Iterator[Chip]:
    """The chips of the package, `first` before all others."""
    from iosim.profiles import load_profile, profile_names

    if first is not None:
        yield first
    yield from map(load_profile, profile_names())


def _forms(kernel: Kernel) -> tuple[ClosedForm, ...]:
    """The closed forms on the first chip that has some, for the default problem."""
    from iosim.errors import RequestError

    for chip in _chips(None):
        try:
            forms = kernel.closed_forms(*_plan(kernel, chip), chip)
        except RequestError:
            continue
        if forms:
            return forms
    return ()


def _plan(kernel: Kernel, chip: Chip) -> tuple[Problem, Schedule]:
    """The default problem of a kernel and its own schedule for it. Raises RequestError."""
    from iosim.study.sweep import check, points

    [point] = points([kernel], [chip], {})
    check([point])
    return point.problem, kernel.default_schedule(point.problem, chip)


def kernel_json(kernel: Kernel, chip: Chip | None) -> dict[str, Any]:
    """One kernel as data."""
    entry: dict[str, Any] = {
        "name": kernel.name,
        "summary": kernel.summary,
        "problem": {
            "kind": kernel.problem.__name__.lower(),
            **dataclasses.asdict(kernel.problem()),
        },
        "machines": list(kernel.machines),
        "loops": kernel.loops,
        "variants": list(kernel.variants),
        "parameters": dict(kernel.parameters),
        "sources": list(kernel.sources),
    }
    if chip is not None and chip.machine in kernel.machines:
        problem, schedule = _plan(kernel, chip)
        forms = kernel.closed_forms(problem, schedule, chip)
        entry["on"] = {
            "profile": chip.name,
            "problem": dataclasses.asdict(problem),
            "schedule": dataclasses.asdict(schedule),
            "closed_forms": [dataclasses.asdict(form) for form in forms],
        }
    return entry


COMMAND = Command(
    "kernels",
    run,
    ABOUT,
    [
        click.Argument(["name"], required=False, type=One(word, "NAME"), metavar="[NAME]"),
        Flag(["--profile"], "What", "A chip of `iosim profiles`.", type=One(word, "NAME")),
        Flag(["--json"], "Output", "JSON on stdout, and nothing else there.", is_flag=True),
    ],
)
