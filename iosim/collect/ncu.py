"""Nsight Compute: the command that profiles our ranges, and its raw page as counters by launch."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from iosim.errors import CountersError
from iosim.units import SECTOR_BYTES

RANGE = "iosim:"  # prefix of the NVTX ranges that name our launches

#: field of a row: the metric, and what one unit of it counts
METRICS = {
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "dram_write_bytes": ("dram__bytes_write.sum", 1),
    "l2_from_l1_bytes": ("lts__t_sectors_srcunit_tex.sum", SECTOR_BYTES),
    "l2_from_l1_hit_bytes": ("lts__t_sectors_srcunit_tex_lookup_hit.sum", SECTOR_BYTES),
    "l2_from_l1_miss_bytes": ("lts__t_sectors_srcunit_tex_lookup_miss.sum", SECTOR_BYTES),
    "l2_fabric_bytes": ("lts__t_sectors_srcunit_ltcfabric.sum", SECTOR_BYTES),
    "l1_fill_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1),
    "l1_write_bytes": ("l1tex__m_l1tex2xbar_write_bytes.sum", 1),
    "time_ns_cold": ("gpu__time_duration.sum", 1),
    "sm_cycles": ("sm__cycles_elapsed.max", 1),
    "grid": ("launch__grid_size", 1),
    "block": ("launch__block_size", 1),
    "smem_per_block": ("launch__shared_mem_per_block", 1),
    "smem_config": ("launch__shared_mem_config_size", 1),
    "registers": ("launch__registers_per_thread", 1),
    "occ_smem": ("launch__occupancy_limit_shared_mem", 1),
    "occ_regs": ("launch__occupancy_limit_registers", 1),
    "occ_warps": ("launch__occupancy_limit_warps", 1),
}
HOW = (
    "ncu --clock-control none, kernel replay, caches flushed and invalidated before each pass "
    "(--cache-control all); NVTX ranges name the launches"
)


def found() -> str | None:
    """Where the profiler is; None where it is not installed."""
    return shutil.which("ncu")


def command(program: Sequence[str], ncu: str = "ncu") -> list[str]:
    """The command line that profiles every launch of `program` inside one of our ranges."""
    metrics = ",".join(metric for metric, _ in METRICS.values())
    return [
        ncu, "--clock-control", "none", "--cache-control", "all", "--nvtx",
        "--nvtx-include", f"regex:{RANGE}.*/", "--print-nvtx-rename", "kernel",
        "--target-processes", "all", "--metrics", metrics,
        "--csv", "--page", "raw", "--print-units", "base", *program,
    ]  # fmt: skip


def launches(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(id of the range, counters) of each launch in what that command printed.

    Raises CountersError where there is no table, with the last line that the profiler wrote.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise CountersError(f"ncu gave no counters; its last line: {last.strip()[:200]}")
    table = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    next(table, None)  # the units
    return [(_id(row["Kernel Name"]), _counters(row)) for row in table]


def _id(name: str) -> str:
    """`iosim:ID/kernel` without what the profiler and we have put around it."""
    return name.removeprefix(RANGE).rpartition("/")[0]


def _counters(row: dict[str, str]) -> dict[str, Any]:
    return {
        field: _number(row[metric]) * unit
        for field, (metric, unit) in METRICS.items()
        if row.get(metric) not in (None, "", "n/a")
    }


def _number(text: str) -> int:
    return round(float(text.replace(",", "")))


def together(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one launch: the median of each field, and `range` where they differ."""
    every = list(runs)
    values = {name: sorted(run[name] for run in every if name in run) for name in every[0]}
    row: dict[str, Any] = {name: found[len(found) // 2] for name, found in values.items()}
    spans = {name: [v[0], v[-1]] for name, v in values.items() if v[0] != v[-1]}
    return {**row, **({"range": spans} if len(every) > 1 else {})}
