"""The least time that each resource of a chip needs for a launch, and which one needs most.

A floor, not a prediction: every resource works at its nominal rate and at the stated clock, all of
them at once, with no latency, no tail and no wave that is not full.
"""

from __future__ import annotations

from collections.abc import Mapping

from iosim.chip import Chip
from iosim.launch import Launch
from iosim.traffic import Traffic


def floor_times(launch: Launch, traffic: Traffic, chip: Chip, clock_hz: float) -> dict[str, float]:
    """Seconds per resource, by the names of the field: tensor, exp, vector, hbm, l1 or cmem.

    Matrix work takes the path that the launch's tile can use; products of one tile height are
    assumed. HBM moves reads and writes at the nominal bandwidth; fills share the ports of the cores
    evenly. L2 is left out: a coalescer in front of it can spare it reads. A launch of fewer blocks
    than cores leaves the others idle.
    """
    cores, work = min(chip.cores_used, launch.blocks), launch.work
    per_s = cores * clock_hz
    rows = launch.matrix_rows
    off_chip = traffic.dram_read_bytes + traffic.dram_write_bytes
    times = {"hbm": _seconds(chip, "hbm", off_chip, clock_hz)}
    if work.issued_flops:
        rate = chip.rate("matrix", launch.dtype, rows).per_core_per_clock
        times["tensor"] = work.issued_flops / (rate * per_s)
    if work.issued_exps:
        times["exp"] = work.issued_exps / (chip.rate("exp").per_core_per_clock * per_s)
    if work.issued_vector_ops:
        times["vector"] = work.issued_vector_ops / (chip.rate("vector").per_core_per_clock * per_s)
    if "l1" in chip.levels:
        times["l1"] = _seconds(chip, "l1", traffic.l1_fill_bytes / cores, clock_hz)
    if "cmem" in chip.levels:
        moved = traffic.cmem_read_bytes + traffic.cmem_write_bytes
        times["cmem"] = _seconds(chip, "cmem", moved, clock_hz)
    return times


def limiter(times: Mapping[str, float]) -> str | None:
    """The resource that needs most; None where nothing needs anything."""
    name = max(times, key=lambda key: times[key])
    return name if times[name] > 0 else None


def _seconds(chip: Chip, level: str, moved: float, clock_hz: float) -> float:
    return moved / chip.levels[level].peak_bytes_per_s(clock_hz)
