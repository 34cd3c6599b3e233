"""What the jitted parts need to know of a chip, in one flat record: geometry, latencies, costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.cost import UNITS, unit_costs
from iosim.launch import Launch
from iosim.memory.cache import run_lines

_INT = (
    "line_shift", "sector_shift", "sector_bytes", "sector_all", "pair_mask",
    "partitions", "partition_shift", "home_shift", "group_shift", "run_shift", "l2_runs",
)  # fmt: skip
_CACHE = ("l2_sets", "l2_ways", "l2_run", "l1_sets", "l1_ways", "dirty_max")
_FLOAT = (
    "l2_runs_inverse", "near_hit", "far_hit", "near_miss", "far_miss", "l1_hit",
    "port_bytes_per_cycle", "l2_bytes_per_cycle", "dram_bytes_per_cycle",
)  # fmt: skip

MODEL_DTYPE: np.dtype[Any] = np.dtype(
    [(name, np.int64) for name in (*_INT, *_CACHE, "stages")]
    + [(name, np.float64) for name in (*_FLOAT, *UNITS)]
)


def gpu_model(chip: Chip, launch: Launch, clock_hz: float, resident: int) -> Any:
    """The record for one launch on a chip with caches; `resident` blocks share a core.

    What the resident blocks take of the common memory of a core is not there for L1.
    """
    l1, l2, dram = chip.levels["l1"], chip.levels["l2"], chip.dram
    assert chip.limits is not None
    taken = resident * (launch.footprint.shared_bytes + chip.limits.shared_reserved_per_block_bytes)
    l1_row = l1.line_bytes * l1.ways
    l1_bytes = max(l1.capacity_bytes - min(taken, chip.limits.shared_per_core_bytes), l1_row)
    l2_sets = l2.capacity_bytes // (l2.line_bytes * l2.ways)
    l1_sets = l1_bytes // l1_row
    run = run_lines(l2_sets)
    home_lines = max(1, l2.home_run_bytes // l2.line_bytes)
    values: dict[str, float] = {
        "line_shift": _log2(l2.line_bytes),
        "sector_shift": _log2(l2.sector_bytes),
        "sector_bytes": l2.sector_bytes,
        "sector_all": (1 << (l2.line_bytes // l2.sector_bytes)) - 1,
        "pair_mask": int(dram.answer_bytes >= 2 * l2.sector_bytes),
        "partitions": l2.partitions,
        "partition_shift": _log2(l2.partitions),
        "home_shift": _log2(home_lines),
        "run_shift": _log2(run),
        "l2_runs": l2_sets // run,
        "l2_runs_inverse": run / l2_sets,
        "group_shift": _log2(min(home_lines, run)),
        "l2_sets": l2_sets,
        "l2_ways": l2.ways,
        "l2_run": run,
        "l1_sets": l1_sets,
        "l1_ways": l1.ways,
        "dirty_max": (l2.dirty_max_bytes or 1 << 60) // l2.sector_bytes,
        "stages": launch.stages,
        "near_hit": l2.latency_cycles,
        "far_hit": l2.far_latency_cycles or l2.latency_cycles,
        "near_miss": dram.latency_cycles,
        "far_miss": dram.far_miss_latency_cycles or dram.latency_cycles,
        "l1_hit": l1.latency_cycles,
        "port_bytes_per_cycle": l1.bytes_per_cycle(clock_hz),
        "l2_bytes_per_cycle": l2.bytes_per_cycle(clock_hz),
        "dram_bytes_per_cycle": dram.bytes_per_cycle(clock_hz),
        **unit_costs(chip, launch.dtype),
    }
    record = np.zeros(1, dtype=MODEL_DTYPE).view(np.recarray)
    for name, value in values.items():
        record[name] = value
    return record[0]


def _log2(value: int) -> int:
    return value.bit_length() - 1
