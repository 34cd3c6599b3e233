"""The tables of `kernels`: all of them in a line each, and one in full."""

from __future__ import annotations

from collections.abc import Iterable

from iosim.chip import Chip
from iosim.launch import ClosedForm, Footprint, Kernel, why_not
from iosim.problem import Problem, Schedule
from iosim.report.analysis import block_limit, resident_text
from iosim.report.tables import Cell, Table, cells
from iosim.report.words import problem_text, schedule_text, tile_text
from iosim.units import format_capacity

_PROBLEMS = {
    "Attention": "attention",
    "Decode": "decoding",
    "PagedDecode": "decoding, K and V in pages",
    "LatentDecode": "decoding with latent K and V",
    "BlockSparse": "block-sparse attention",
    "Gemm": "matrix product",
    "Rows": "rows of a matrix",
    "Stream": "stream",
}


def kernel_table(kernels: Iterable[Kernel]) -> Table:
    """One row per kernel."""
    rows = tuple(
        cells(k.name, _problem(k), ", ".join(m.upper() for m in k.machines), k.summary)
        for k in kernels
    )
    return Table(
        title="", heads=("kernel", "computes", "runs on", ""), rows=rows, align="llll", wraps=(3,)
    )


def _problem(kernel: Kernel) -> str:
    return _PROBLEMS.get(kernel.problem.__name__, kernel.problem.__name__.lower())


def kernel_lines(kernel: Kernel) -> list[str]:
    """What a kernel is, in words."""
    machines = " and ".join(f"a {machine.upper()}" for machine in kernel.machines)
    return [
        f"{kernel.name}: {kernel.summary}",
        f"computes {_problem(kernel)}, on {machines}",
        f"loops: {kernel.loops}",
        *([f"variants: {', '.join(kernel.variants)}"] if kernel.variants else []),
        *(f"source: {source}" for source in kernel.sources),
    ]


def parameter_table(kernel: Kernel) -> Table:
    """What can be chosen, and what that does."""
    rows = tuple(cells(name, text) for name, text in kernel.parameters.items())
    return Table(title="", heads=("parameter", "what it means"), rows=rows, align="ll", wraps=(1,))


def plan_lines(kernel: Kernel, problem: Problem, schedule: Schedule, chip: Chip) -> list[str]:
    """What a kernel chooses on a chip for a problem, and what a block of each launch needs."""
    lines = [
        f"on {chip.name}, {chip.title}, for the default {problem_text(problem)}:",
        f"  tile {tile_text(schedule.tile)}, {schedule_text(schedule, chip.machine)}",
    ]
    for launch in kernel.launches(problem, schedule, chip):
        need = footprint_text(launch.footprint, chip)
        lines.append(f"  {launch.name}: {launch.blocks:,} blocks, {need}")
    return lines


def footprint_text(footprint: Footprint, chip: Chip) -> str:
    """What one block needs of what it may have."""
    limit = format_capacity(block_limit(chip))
    reason = why_not(footprint, chip)
    if reason:
        return reason
    if chip.grid:
        return f"VMEM {format_capacity(footprint.vmem_bytes)} of {limit}"
    shared = format_capacity(footprint.shared_bytes)
    return (
        f"shared memory {shared} of {limit}, per {chip.cores.name} {resident_text(footprint, chip)}"
    )


def form_table(forms: Iterable[ClosedForm]) -> Table:
    """What pencil and paper say."""
    rows = tuple(
        cells(form.quantity, f"{form.value:,}", form.formula, Cell(form.source, "faint"))
        for form in forms
    )
    return Table(
        title="closed forms",
        heads=("quantity", "value", "formula", "source"),
        rows=rows,
        align="lrll",
        wraps=(2, 3),
    )
