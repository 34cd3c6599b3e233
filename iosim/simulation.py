"""The main path: (kernel, problem, schedule, chip) -> Result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from iosim.chip import Chip
from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.counts import Counts
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.launch import Kernel, Launch, require_form, tensors_too_large, why_not
from iosim.problem import Problem, Schedule
from iosim.result import LaunchResult, Result
from iosim.timing.roofline import floor_times
from iosim.traffic import FIELDS

CACHES = ("cold", "warm")


def simulate(
    kernel: str,
    problem: Problem,
    chip: Chip,
    schedule: Schedule | None = None,
    *,
    cache: str = "cold",
    seeds: Sequence[int] = (0,),
    clock_hz: float = 0.0,
    only: str = "",
) -> Result:
    """What `kernel` moves and computes for `problem` on `chip`.

    What `schedule` leaves open the kernel chooses. `cache` warm: the launches run once before, and
    what they left in the cache is there. The first of `seeds` gives the values, all of them the
    band. `only` names the one launch of several to run. A block that does not fit gives a Result
    without launches, whose `why_not` says why. Raises RequestError where kernel, problem and chip
    do not go together.
    """
    if cache not in CACHES:
        raise RequestError(f"cache must be one of {', '.join(CACHES)}, not {cache!r}")
    algorithm = load_kernel(kernel)
    require_form(algorithm, chip)
    full = complete(algorithm, problem, chip, schedule or Schedule())
    planned = _chosen(algorithm.launches(problem, full, chip), only)
    clock = clock_hz or chip.cores.clock_hz
    outcome = Result(
        kernel=kernel,
        chip=chip,
        problem=problem,
        schedule=full,
        cache=cache,
        seeds=tuple(seeds),
        clock_hz=clock,
        planned=planned,
        launches=(),
        closed_forms=() if only else algorithm.closed_forms(problem, full, chip),
        why_not=_why_not(planned, chip),
    )
    if not outcome.fits:
        return outcome
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda seed: _run(planned, chip, cache, clock, seed), seeds))
    results = [dataclasses.replace(outcome, launches=run) for run in runs]
    return dataclasses.replace(results[0], band=_band(results))


def _chosen(planned: tuple[Launch, ...], only: str) -> tuple[Launch, ...]:
    """The launches that are run: all, or the one of that name."""
    if not only:
        return planned
    chosen = tuple(launch for launch in planned if launch.name == only)
    if not chosen:
        names = ", ".join(launch.name for launch in planned)
        raise RequestError(f"there is no launch {only!r} (possible: {names})")
    return chosen


def _why_not(planned: tuple[Launch, ...], chip: Chip) -> str | None:
    """The first reason why the launches cannot run on `chip`."""
    reasons = (why_not(launch.footprint, chip) for launch in planned)
    return next((reason for reason in reasons if reason), tensors_too_large(planned, chip))


def complete(kernel: Kernel, problem: Problem, chip: Chip, schedule: Schedule) -> Schedule:
    """`schedule` with the kernel's own choice for everything that it leaves open.

    Raises RequestError where a tile of one size is asked of a kernel with more.
    """
    default = kernel.default_schedule(problem, chip)
    if len(schedule.tile) == 1 < len(default.tile):
        raise RequestError(
            f"tile {schedule.tile[0]} of {kernel.name} needs two sizes or more, such as "
            f"{'x'.join(map(str, default.tile))}"
        )
    tile = schedule.tile + default.tile[len(schedule.tile) :]
    return dataclasses.replace(
        schedule,
        tile=tile,
        stages=schedule.stages or default.stages,
        warps=schedule.warps or default.warps,
        splits=schedule.splits or default.splits,
        cluster=schedule.cluster or default.cluster,
        variant=_variant(kernel, schedule.variant, default.variant),
    )


def _variant(kernel: Kernel, asked: str, default: str) -> str:
    """The variant that is meant: where none is asked for the default schedule's, else the first."""
    if asked and asked not in kernel.variants:
        known = f"; it has {', '.join(kernel.variants)}" if kernel.variants else ""
        raise RequestError(f"{kernel.name} has no variant {asked!r}{known}")
    return asked or default or next(iter(kernel.variants), "")


def _run(
    planned: tuple[Launch, ...], chip: Chip, cache: str, clock_hz: float, seed: int
) -> tuple[LaunchResult, ...]:
    if chip.grid is not None:
        on_chip = _kept_on_chip(planned, chip)
        return tuple(
            _outcome(launch, run_grid(launch, chip, on_chip), chip, clock_hz) for launch in planned
        )
    memory = CachedMemory(chip)
    passes = 2 if cache == "warm" else 1
    for turn in range(passes):
        counts = [
            run_blocks(
                launch,
                chip,
                memory,
                clock_hz=clock_hz,
                seed=seed + i,
                soil=turn == 0 and i == 0 and cache == "cold",
            )
            for i, launch in enumerate(planned)
        ]
    return tuple(
        _outcome(launch, count, chip, clock_hz)
        for launch, count in zip(planned, counts, strict=True)
    )


def _kept_on_chip(planned: tuple[Launch, ...], chip: Chip) -> frozenset[str]:
    """Intermediate tensors that pass from launch to launch through CMEM: all of them, or none."""
    scratch = {o.name: o.size_bytes for run in planned for o in run.operands if o.role == "scratch"}
    level = chip.levels.get("cmem")
    fits = level is not None and sum(scratch.values()) < level.capacity_bytes
    return frozenset(scratch) if fits else frozenset()


def _outcome(launch: Launch, counts: Counts, chip: Chip, clock_hz: float) -> LaunchResult:
    return LaunchResult(
        launch=launch,
        traffic=counts.traffic,
        operands=counts.operands,
        floor_times_s=floor_times(launch, counts.traffic, chip, clock_hz),
        makespan_cycles=counts.makespan_cycles,
    )


def _band(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """Least and greatest of each field over the seeds; empty where there is only one."""
    if len(results) < 2:
        return {}
    names = FIELDS[results[0].chip.machine]
    values = {name: [getattr(r.traffic, name) for r in results] for name in names}
    return {name: (min(v), max(v)) for name, v in values.items()}
