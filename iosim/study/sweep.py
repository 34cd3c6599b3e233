"""A product of lists (tiles, lengths, chips, …) as points, and the results of running them all.

points(...)   kernels × chips × problems × schedules, in the order of the lists
check(...)    what makes no sense is refused before the first run
run(...)      the results, in the order of the points
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.launch import Kernel, require_form, why_not
from iosim.problem import Problem, Schedule, Stream
from iosim.result import Result
from iosim.simulation import complete, simulate
from iosim.units import DTYPE_BYTES, dtype_bytes

Axes = Mapping[str, Sequence[Any]]
BYTES = "bytes"  # an axis of streams, turned into elements
#: axes that a kernel takes only where its `parameters` name them
_BY_PARAMETER = (
    "order", "group", "stages", "mode", "reps", "stride", "splits", "cluster", "variant",
    "kv_dtype", "spills",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    kernel: Kernel
    chip: Chip
    problem: Problem
    schedule: Schedule

    def __str__(self) -> str:
        tile = "x".join(map(str, self.schedule.tile)) or "its own tile"
        return f"{self.kernel.name}, {tile}, on {self.chip.name}"


@dataclass(frozen=True, kw_only=True)
class How:
    """How every point is run; see `simulate`."""

    cache: str = "cold"
    seeds: tuple[int, ...] = (0,)
    clock_hz: float = 0.0


def default_dtype(chip: Chip) -> str:
    """The first 16-bit type that the chip has a matrix unit for."""
    for peak in chip.peaks:
        if DTYPE_BYTES[peak.dtype] == 2:
            return peak.dtype
    return chip.peaks[0].dtype


def takes(kernel: Kernel, axis: str) -> bool:
    """Whether an axis means something to a kernel: by its problem, schedule and parameters."""
    if axis in _BY_PARAMETER:
        return axis in ", ".join(kernel.parameters).split(", ")
    if axis == BYTES:
        return kernel.problem is Stream
    records = (kernel.problem, Schedule)
    return any(field.name == axis for record in records for field in dataclasses.fields(record))


def points(kernels: Sequence[Kernel], chips: Sequence[Chip], axes: Axes) -> tuple[Point, ...]:
    """Every combination, chip by chip and kernel by kernel; the first axis varies slowest.

    Axes that a kernel does not have leave it alone. Raises RequestError for a problem that cannot
    exist.
    """
    found = []
    for chip, kernel in product(chips, kernels):
        own = {name: values for name, values in axes.items() if takes(kernel, name)}
        own.setdefault("dtype", (default_dtype(chip),))
        for values in product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            found.append(
                Point(
                    kernel=kernel,
                    chip=chip,
                    problem=_problem(kernel, chosen),
                    schedule=_schedule(chosen),
                )
            )
    return tuple(found)


def check(chosen: Sequence[Point]) -> None:
    """Plans every point without running it. Raises RequestError for one that cannot be planned."""
    for point in chosen:
        try:
            require_form(point.kernel, point.chip)
            full = complete(point.kernel, point.problem, point.chip, point.schedule)
            planned = point.kernel.launches(point.problem, full, point.chip)
            if any(launch.work.issued_flops for launch in planned):
                point.chip.rate("matrix", point.problem.dtype)
        except RequestError as error:
            if len(chosen) == 1:
                raise
            raise RequestError(f"{point}: {error}") from error


def run(
    chosen: Sequence[Point], how: How, progress: Callable[[int], None] | None = None
) -> list[Result]:
    """The result of every point, in order; `progress` is told how many are done."""
    results = []
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="iosim-worker") as pool:
        for result in pool.map(lambda point: run_one(point, how), chosen):
            results.append(result)
            if progress:
                progress(len(results))
    return results


def run_one(point: Point, how: How) -> Result:
    """The result of one point."""
    return simulate(
        point.kernel.name,
        point.problem,
        point.chip,
        point.schedule,
        cache=how.cache,
        seeds=how.seeds,
        clock_hz=how.clock_hz,
    )


def nearest_fit(result: Result, kernel: Kernel) -> tuple[int, ...] | None:
    """The largest tile of the same aspect that fits where this one does not: halved, and again."""
    for tile in _halved(result.schedule.tile):
        schedule = dataclasses.replace(result.schedule, tile=tile)
        try:
            planned = kernel.launches(result.problem, schedule, result.chip)
        except RequestError:
            continue
        if not any(why_not(launch.footprint, result.chip) for launch in planned):
            return tile
    return None


def _halved(tile: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    while min(tile) > 1 and not any(side % 2 for side in tile):
        tile = tuple(side // 2 for side in tile)
        yield tile


def _problem(kernel: Kernel, chosen: Mapping[str, Any]) -> Problem:
    names = {field.name for field in dataclasses.fields(kernel.problem)}
    values = {name: value for name, value in chosen.items() if name in names}
    if BYTES in chosen and kernel.problem is Stream:
        size = dtype_bytes(chosen["dtype"])
        if chosen[BYTES] % size:
            raise RequestError(
                f"{chosen[BYTES]} bytes are no whole number of {chosen['dtype']} elements"
            )
        values["elements"] = chosen[BYTES] // size
    return kernel.problem(**values)


def _schedule(chosen: Mapping[str, Any]) -> Schedule:
    names = {field.name for field in dataclasses.fields(Schedule)}
    return Schedule(**{name: value for name, value in chosen.items() if name in names})
